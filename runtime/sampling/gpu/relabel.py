"""Unique and relabel on a GPU: local ids in order of first appearance, as the CPU gives them.

A hash table with linear probing maps a node to a rank: its local id once it has one, else
`UNNUMBERED` plus the smallest position at which the hop drew it (atomic min). Positions that equal
their node's rank are first appearances; a prefix sum over them numbers the new nodes. The result
does not depend on the order in which programs run. Compare values of atomics have the pointer's
type: a Python number there does nothing in Triton's interpreter.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.sampling.gpu.rng import mix

UNNUMBERED = 1 << 48
_NEVER = (1 << 63) - 1
_BLOCK = 256


@triton.jit(do_not_specialize=["first"])
@no_type_check
def _insert_kernel(values, total, slots, keys, ranks, wrap, first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    empty = tl.full((BLOCK,), -1, tl.int64)
    value = tl.load(values + at, mask=asked, other=-1)
    slot = (mix(value.to(tl.uint64)) & wrap.to(tl.uint64)).to(tl.int64)
    # A compare-and-swap takes no mask: idle lanes swap -1 for -1 in the spare slot at the end.
    slot = tl.where(asked, slot, wrap + 1)
    pending = asked
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        held = tl.atomic_cas(keys + slot, empty, value, sem="relaxed")
        pending = pending & (held != -1) & (held != value)
        slot = tl.where(pending, (slot + 1) & wrap, slot)
    tl.store(slots + at, slot, mask=asked)
    tl.atomic_min(ranks + slot, first + at, mask=asked, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
@no_type_check
def _flag_kernel(slots, total, ranks, flags, bound, first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    slot = tl.load(slots + at, mask=asked, other=0)
    rank = tl.load(ranks + slot, mask=asked, other=0)
    tl.store(flags + at, (asked & (rank == first + at)).to(tl.int32), mask=at < bound)


@triton.jit
@no_type_check
def _number_kernel(
    values, slots, total, ranks, flags, sums, nodes, known, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    new = asked & (tl.load(flags + at, mask=asked, other=0) != 0)
    number = tl.load(sums + at, mask=new, other=1) - 1
    tl.store(nodes + number, tl.load(values + at, mask=new, other=0), mask=new)
    rank = tl.load(known) + number
    tl.store(ranks + tl.load(slots + at, mask=new, other=0), rank, mask=new)


@triton.jit
@no_type_check
def _local_kernel(slots, total, ranks, local, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    rank = tl.load(ranks + tl.load(slots + at, mask=asked, other=0), mask=asked, other=0)
    tl.store(local + at, rank.to(tl.int32), mask=asked)


@dataclass(frozen=True, slots=True)
class RelabelTable:
    """Keys (-1 where empty) and ranks of a power of two of slots, and one to spare, int64."""

    keys: Tensor
    ranks: Tensor

    @staticmethod
    def empty(slots: int, device: torch.device) -> "RelabelTable":
        """Make a table for half as many nodes as slots."""
        keys = torch.empty(slots + 1, dtype=torch.int64, device=device)
        table = RelabelTable(keys, torch.empty_like(keys))
        table.clear()
        return table

    def clear(self) -> None:
        """Forget all nodes; waits for nothing."""
        self.keys.fill_(-1)
        self.ranks.fill_(_NEVER)

    def insert(self, values: Tensor, total: Tensor, first: int) -> Tensor:
        """Enter the first `total` values; return their slots. Ranks fall to `first` + place."""
        slots = torch.empty_like(values)
        if values.numel():
            wrap = self.keys.numel() - 2
            _insert_kernel[(triton.cdiv(values.numel(), _BLOCK),)](
                values, total, slots, self.keys, self.ranks, wrap, first, BLOCK=_BLOCK
            )
        return slots

    def number(self, values: Tensor, total: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number the values that are new from `known` on (int64 [1]); see `DeviceRelabel.add`."""
        bound = values.numel()
        slots = self.insert(values, total, UNNUMBERED)
        flags = torch.empty(bound, dtype=torch.int32, device=values.device)
        nodes = torch.empty_like(values)
        local = torch.empty(bound, dtype=torch.int32, device=values.device)
        if bound == 0:
            return local, nodes, nodes
        grid: Any = (triton.cdiv(bound, _BLOCK),)
        _flag_kernel[grid](slots, total, self.ranks, flags, bound, UNNUMBERED, BLOCK=_BLOCK)
        sums = torch.cumsum(flags, 0, dtype=torch.int64)
        _number_kernel[grid](
            values, slots, total, self.ranks, flags, sums, nodes, known, BLOCK=_BLOCK
        )
        _local_kernel[grid](slots, total, self.ranks, local, BLOCK=_BLOCK)
        return local, nodes, sums


def slots_for(num_nodes: int) -> int:
    """Return the slots of a table that so many nodes fill to the half at most."""
    return 1 << (max(2 * num_nodes, 64) - 1).bit_length()


class DeviceRelabel:
    """Local ids of one batch's nodes. Not shared between batches or streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table: RelabelTable | None = None
        self.num_known = 0

    def add(
        self, values: Tensor, total: Tensor, known_nodes: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Number the values that are new; waits for nothing.

        The caller adds how many were new to `num_known` before the next call. The first `total` of
        the values count; the table is filled again from `known_nodes`, in order, where it must
        grow. Return the local id of each value, int32; the new nodes in order, int64, as many as
        the last of the third, running counts of first appearances, int64.
        """
        table = self._reserve(self.num_known + values.numel(), known_nodes)
        known = torch.full((1,), self.num_known, dtype=torch.int64, device=self._device)
        return table.number(values, total, known)

    def number(self, keys: Tensor, known: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Number keys as `add`; return the new ones too. Waits for how many they are."""
        total = torch.tensor([keys.numel()], device=keys.device)
        local, new, sums = self.add(keys, total, known)
        num_new = int(sums[-1]) if keys.numel() else 0
        self.num_known += num_new
        return local.to(torch.int64), new[:num_new]

    def _reserve(self, num_nodes: int, known_nodes: list[Tensor]) -> RelabelTable:
        slots = slots_for(num_nodes)
        if self._table is None or self._table.keys.numel() <= slots:
            self._table = RelabelTable.empty(slots, self._device)
            known = torch.cat([self._table.keys[:0], *known_nodes])
            self._table.insert(known, torch.tensor([known.numel()], device=self._device), 0)
        return self._table
