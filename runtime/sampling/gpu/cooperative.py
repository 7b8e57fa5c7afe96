"""Cooperative batches on a GPU: its own vertices drawn, numbered and dealt in its memory.

What ranks exchange, and in which order, is `distributed.cooperative`'s: batches are those of ranks
on cores, seed for seed. The host waits for the sizes of each exchange.
"""

from collections.abc import Sequence
from typing import Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.distributed.cooperative import (
    AbstractCooperativeSampler,
    HostIds,
    IdExchange,
)
from gnnplan.runtime.sampling.distributed.owner import Owners, owner_stream
from gnnplan.runtime.sampling.gpu.choose import row_ends
from gnnplan.runtime.sampling.gpu.hops import AbstractDeviceHops, DeviceBatch, DeviceBlock
from gnnplan.runtime.sampling.gpu.relabel import DeviceRelabel
from gnnplan.runtime.sampling.gpu.rng import key_of, signed
from gnnplan.runtime.sampling.minibatch import Request, RowExchange

_BLOCK = 256


@triton.jit(do_not_specialize=["stream", "num_ranks"])
@no_type_check
def _owners_kernel(stream, ids, out, count, num_ranks, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    key = key_of(stream, tl.load(ids + at, mask=mask, other=0))
    ranks = (tl.zeros_like(at) + num_ranks).to(tl.uint64)
    tl.store(out + at, (key % ranks).to(tl.int64), mask=mask)


class DeviceNumbering:
    """`distributed.cooperative.Numbering` on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forget all numbers."""
        self._relabel = DeviceRelabel(self._device)
        self._parts = [torch.empty(0, dtype=torch.int64, device=self._device)]

    @property
    def count(self) -> int:
        """Return how many ids have a number."""
        return self._relabel.num_known

    def add(self, ids: Tensor) -> Tensor:
        """Return the number of each id, new ones being the next; waits for how many are new."""
        numbers, new = self._relabel.number(ids, self._parts)
        self._parts.append(new)
        return numbers

    def ids(self, first: int = 0) -> Tensor:
        """Return the ids numbered so far, from number `first` on."""
        return torch.cat(self._parts)[first:]


class DeviceIds(HostIds):
    """Ids in tensors of a device."""

    def __init__(self, owners: Owners, num_nodes: int, device: torch.device) -> None:
        super().__init__(owners, num_nodes)
        self._device = device
        self._parts = None
        if owners.parts.size:
            self._parts = torch.from_numpy(owners.parts.astype(np.int64)).to(device)

    def numbering(self) -> DeviceNumbering:
        """Make an empty numbering of ids."""
        return DeviceNumbering(self._device)

    def owners_of(self, ids: Tensor) -> Tensor:
        """Return the rank that owns each id."""
        if self._parts is not None:
            return self._parts[ids]
        out = torch.empty_like(ids)
        if ids.numel():
            grid = (triton.cdiv(ids.numel(), _BLOCK),)
            _owners_kernel[grid](
                signed(owner_stream()), ids.contiguous(), out, ids.numel(),
                self._owners.num_ranks, BLOCK=_BLOCK,
            )  # fmt: skip
        return out

    def deal(self, owners: Tensor) -> tuple[list[int], Tensor]:
        """Group positions by owner; waits for the counts."""
        counts = torch.bincount(owners, minlength=self._owners.num_ranks)
        return counts.tolist(), torch.argsort(owners, stable=True)

    def count_from(self, first: int, last: int) -> Tensor:
        """Return the numbers from `first` to `last`, which is not one of them."""
        return torch.arange(first, last, device=self._device)

    def empty(self, count: int) -> Tensor:
        """Return so many undefined numbers."""
        return torch.empty(count, dtype=torch.int64, device=self._device)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts one after another."""
        return torch.cat(list(parts))

    def repeat_ranks(self, counts: Sequence[int]) -> Tensor:
        """Return each rank as often as it is counted."""
        ranks = torch.arange(len(counts), device=self._device)
        each = torch.tensor(counts, device=self._device)
        return torch.repeat_interleave(ranks, each, output_size=sum(counts))

    def row_ends(self, degrees: Tensor) -> Tensor:
        """Return 0 and the running sums of degrees."""
        return row_ends(degrees)

    def narrow(self, ids: Tensor) -> Tensor:
        """Return local ids as blocks hold them."""
        return ids.to(torch.int32)

    def send(self, ids: Tensor) -> Tensor:
        """Return ids as a collective takes them."""
        return ids

    def receive(self, ids: Tensor) -> Tensor:
        """Return ids that a collective gave."""
        return ids


class DeviceCooperativeSampler(AbstractCooperativeSampler[DeviceBatch]):
    """Cooperative sampling on a GPU, by a sampler of all hops over a topology that it reads."""

    def __init__(
        self, sampler: Sampler, hops: AbstractDeviceHops, *, owners: Owners, comm: IdExchange
    ) -> None:
        ids = DeviceIds(owners, hops.num_nodes, hops.device)
        super().__init__(sampler, hops.num_nodes, ids, owners, comm)
        self._hops = hops
        self.num_hops, self.topology = hops.num_hops, hops.topology
        self.exchanges: list[RowExchange] = []
        """Those of the last batch, outermost block first."""

    def _sample(self, request: Request) -> DeviceBatch:
        with self._lock:
            hops = self._shared_hops(request)
            self.exchanges = [hop.exchange for hop in reversed(hops)]
        return DeviceBatch(
            blocks=[hop.block for hop in reversed(hops)],
            n_id=hops[-1].exchange.ids,
            **self._describe(request, hops),
        )

    def _seeds(self, seeds: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.array(seeds)).to(self._hops.device)

    def _draw(self, rows: Tensor, hop: int, request: Request) -> tuple[Any, Tensor, int]:
        return self._hops.draw_hop(rows, hop, request)

    def _block(self, **fields: Any) -> DeviceBlock:
        return DeviceBlock(**fields)
