"""What stacks of batches on a device share: one numbering of all their vertices.

A vertex of batch b is the key b N + v. Rows of a stack stand batch by batch, so new keys, which are
numbered in order of first appearance, do too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from runtime.errors import SamplerError
from runtime.sampling.device_batch import DeviceBatch
from runtime.sampling.matrix_stack import Request
from runtime.sampling.minibatch import Dialect
from runtime.sampling.relabel_triton import DeviceRelabel

_PASSING = 3
"""Bytes under way while a stack is drawn, in bytes of its results: positions, values and ranks."""


@runtime_checkable
class DeviceStack(Protocol):
    """Draws several batches at once."""

    def sample_stack(self, requests: Sequence[Request]) -> list[DeviceBatch]:
        """The batches of some requests; their tensors may be views of common ones."""
        ...


def owners(ends: Tensor) -> Tensor:
    """The row of each entry of rows that end at `ends`; int64."""
    numbers = torch.arange(ends.numel() - 1, device=ends.device)
    return torch.repeat_interleave(numbers, ends[1:] - ends[:-1])


def number(table: DeviceRelabel, keys: Tensor, known: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers of keys in order of first appearance, and the new keys; waits for how many."""
    total = torch.tensor([keys.numel()], device=keys.device)
    local, new, sums = table.add(keys, total, known)
    num_new = int(sums[-1]) if keys.numel() else 0
    table.num_known += num_new
    return local.to(torch.int64), new[:num_new]


def stack_of(sampler: object) -> DeviceStack:
    """Stacks of the batches that a sampler on a device draws one by one, equal to them.

    Raises:
        SamplerError: it has no such form, as `BulkSampler.of` says for the host's.
    """
    from runtime.sampling.layerwise_device import DeviceLayerwiseSampler
    from runtime.sampling.neighbor_stack_device import DeviceNeighborStack
    from runtime.sampling.neighbor_triton import DeviceNeighborSampler, Method

    if isinstance(sampler, DeviceLayerwiseSampler):
        return sampler
    if isinstance(sampler, DeviceNeighborSampler) and sampler.method is Method.NEIGHBOR:
        return DeviceNeighborStack(sampler)
    raise SamplerError(
        "expected uniform neighbours without replacement, ladies, pladies or fastgcn for "
        f"stacks of batches, found {type(sampler).__name__}; plan with bulk_batches 1"
    )


class StackedBatches:
    """Cuts requests into stacks that stay below a bound of bytes.

    Args:
        stack: draws them.
        budget_bytes: most bytes of a stack, what is under way included; None: all at once. The
            first stack ever is one batch, which tells how many fit.
        kept_batches: batches that the caller keeps beside the next stack, off the bound.
    """

    def __init__(self, stack: DeviceStack, budget_bytes: int | None, kept_batches: int) -> None:
        self._stack, self._budget_bytes, self._kept = stack, budget_bytes, kept_batches
        self._size = 1

    def stacks(self, requests: Sequence[Request]) -> Iterator[list[DeviceBatch]]:
        """The batches, stack by stack; drop one before asking for the next."""
        done = 0
        while done < len(requests):
            size = len(requests) if self._budget_bytes is None else self._size
            found = self._stack.sample_stack(requests[done : done + size])
            done += len(found)
            if self._budget_bytes is not None:
                each = (1 + _PASSING) * max(batch_bytes(batch) for batch in found)
                self._size = max(self._budget_bytes // max(each, 1) - self._kept, 1)
            yield found
            del found


def batch_bytes(batch: DeviceBatch) -> int:
    """Bytes of a batch's tensors, nested blocks counted once."""
    nested = batch.blocks[:1] if batch.dialect is Dialect.FIRST_SEEN else batch.blocks
    held = [batch.n_id]
    for block in nested:
        held += [
            t for t in (block.indptr, block.indices, block.e_id, block.weight) if t is not None
        ]
    return sum(t.numel() * t.element_size() for t in held)


def with_own_tensors(batch: DeviceBatch) -> DeviceBatch:
    """The same batch without views of a stack's tensors; nested blocks stay parts of the first."""
    nested = batch.dialect is Dialect.FIRST_SEEN
    outer = replace(
        batch.blocks[0],
        indptr=batch.blocks[0].indptr.clone(),
        indices=batch.blocks[0].indices.clone(),
        e_id=_copy(batch.blocks[0].e_id),
        weight=_copy(batch.blocks[0].weight),
    )
    blocks = [outer]
    for block in batch.blocks[1:]:
        edges = block.indices.numel()
        blocks.append(
            replace(
                block,
                indptr=outer.indptr[: block.num_dst + 1] if nested else block.indptr.clone(),
                indices=outer.indices[:edges] if nested else block.indices.clone(),
                e_id=_part(outer.e_id, edges) if nested else _copy(block.e_id),
                weight=_part(outer.weight, edges) if nested else _copy(block.weight),
            )
        )
    return replace(batch, blocks=blocks, n_id=batch.n_id.clone())


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _part(tensor: Tensor | None, count: int) -> Tensor | None:
    return None if tensor is None else tensor[:count]
