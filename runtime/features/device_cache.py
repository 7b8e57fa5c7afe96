"""A dynamic cache of rows in a GPU's memory: the decisions of `features.cache`, made by the device.

The directory is the location table itself: a row that the cache holds is located there, under a
source number of its own, so that one gather reads hits and misses alike. All decisions of a batch
are taken at once and the host waits for none of them:

    LRU     slots in order of (batch, hit or loaded, position) of their last touch; the first are
            taken, empty ones before them
    clock   slots in order of the hand, those not hit since it passed before those that were; the
            hand then stands behind the last one taken, and has cleared what it passed

which is what touching and evicting row by row does, because a batch never evicts what it touches.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.features.device_rows import padded_rows
from runtime.features.location import SOURCE_BITS, SOURCE_MASK, Codes

_FAR = (1 << 62) - 1
_LOADED = 1 << 32
"""Added to the touch of a row that was loaded: it leaves after the batch's hits."""
_BATCH_BITS = 33


@dataclass(frozen=True, slots=True)
class DeviceDecision:
    """What one gather does to the cache; tensors of length n on the device."""

    nodes: Tensor
    """Ids, or the number of nodes where an id is outside the graph."""
    slots: Tensor
    """Slot that the row goes to; the number of slots where it is not kept."""
    first: Tensor
    """Position at which the batch asks for the same node first."""
    repeats: Tensor
    """bool: asks again for a row that was not cached when the batch came."""
    numbers: Tensor
    """Source number of each id before the batch; -1 outside the graph."""


def codes_on(codes: Codes, device: torch.device, *, wide: bool = False) -> Tensor:
    """Location codes as int32 or int64 bits on a device, with one spare entry at the end."""
    signed = np.int64 if wide or codes.itemsize == 8 else np.int32
    held = np.zeros(codes.shape[0] + 1, signed)
    np.copyto(held[:-1], codes, casting="unsafe")
    return torch.from_numpy(held).to(device)


def split(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Source numbers and slots of codes, both int64."""
    bits = codes.long()
    if codes.dtype == torch.int32:
        bits = bits & 0xFFFF_FFFF
    return bits & SOURCE_MASK, bits >> SOURCE_BITS


class DeviceCache:
    """Rows, directory and policy state of one cache.

    Gathers take their turns: the caller lets no two of them in at once, and puts all of them on one
    stream.
    """

    def __init__(
        self,
        codes: Codes,
        bypass: NDArray[np.bool_],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        policy: str,
        num_slots: int,
        number: int,
    ) -> None:
        """Make an empty cache.

        Args:
            codes: the location table without the cache.
            bypass: shape (256,); source numbers whose rows never enter the cache.
            width: columns of a row.
            dtype: of the rows as they are kept: float32, or float16 where all sources hold that.
            device: where the cache lies.
            policy: lru | clock.
            num_slots: rows it keeps.
            number: the source number of the rows it keeps.
        """
        self.num_slots, self.number, self.device = num_slots, number, device
        self.num_nodes = int(codes.shape[0])
        self._clock = policy == "clock"
        wide = num_slots >= 1 << (32 - SOURCE_BITS)
        self._below = codes_on(codes, device, wide=wide)
        self.codes = self._below.clone()
        """The location table with the cache, int32 or int64 [num_nodes + 1]."""
        # The last entry of every array is where lanes that have nothing to write write it.
        self.rows = padded_rows(num_slots + 1, width, dtype, device)
        self._bypass = torch.from_numpy(np.append(bypass, True)).to(device)
        self._first = torch.full((self.num_nodes + 1,), _FAR, dtype=torch.int64, device=device)
        self._touch = torch.empty(num_slots + 1, dtype=torch.int64, device=device)
        self._hit = torch.empty(num_slots + 1, dtype=torch.bool, device=device)
        self._node = torch.empty(num_slots + 1, dtype=torch.int64, device=device)
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self._batch = 0
        self.totals = torch.zeros(2, dtype=torch.int64, device=device)
        """Distinct rows looked up so far, and those of them that the cache held."""
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of rows and directory, without the location table that a store has anyway."""
        kept = (self._below, self.rows, self._first, self._touch, self._hit, self._node)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    def clear(self) -> None:
        """Forget every row."""
        self.codes.copy_(self._below)
        self._touch.copy_(torch.arange(self.num_slots + 1, device=self.device) - self.num_slots)
        self._hit.zero_()
        self._node.fill_(-1)
        self._state.zero_()

    def decide(self, ids: Tensor) -> DeviceDecision:
        """Look up a batch, touch what it finds, give slots to what it misses; waits for nothing.

        Args:
            ids: int64 [n]; repeated ids are allowed, those outside the graph are left alone.
        """
        count = ids.numel()
        known = (ids >= 0) & (ids < self.num_nodes)
        nodes = torch.where(known, ids, self.num_nodes)
        position = torch.arange(count, device=self.device)
        first = self._first.scatter_reduce_(0, nodes, position, "amin")[nodes]
        self._first[nodes] = _FAR
        numbers, slot = split(self.codes[nodes])
        numbers = torch.where(known, numbers, -1)
        held = numbers == self.number
        absent = known & ~held & ~self._bypass[numbers]
        fresh = first == position
        hit, missing = held & fresh, absent & fresh
        slots = torch.full_like(nodes, self.num_slots)
        if count:
            self._batch += 1
            take = self._by_clock if self._clock else self._by_age
            slots = take(torch.where(hit, slot, self.num_slots), missing, position)
            self.totals += torch.stack([(hit | missing).sum(), hit.sum()])
        return DeviceDecision(nodes, slots, first, absent & ~fresh, numbers)

    def keep(self, decision: DeviceDecision, rows: Tensor) -> None:
        """Copy the rows that were given slots into them and locate them there.

        Args:
            decision: of this batch.
            rows: [n, feature_dim], the batch as it was gathered.
        """
        slots, kept = decision.slots, decision.slots < self.num_slots
        self.rows[slots] = rows.to(self.rows.dtype)
        gone = self._node[slots]
        gone = torch.where(kept & (gone >= 0), gone, self.num_nodes)
        self.codes[gone] = self._below[gone]
        nodes = torch.where(kept, decision.nodes, self.num_nodes)
        self._node[slots] = nodes
        located = ((slots << SOURCE_BITS) | self.number).to(self.codes.dtype)
        self.codes[nodes] = located

    def held(self) -> tuple[Tensor, Tensor]:
        """The nodes kept now and their rows, copied; waits. For tests and reports."""
        used = self._node[:-1] >= 0
        return self._node[:-1][used].cpu(), self.rows[:-1][used].cpu()

    def _by_age(self, hits: Tensor, missing: Tensor, position: Tensor) -> Tensor:
        """Touch `hits` and return the slot of each miss; LRU."""
        now = self._batch << _BATCH_BITS
        self._touch[hits] = position + now
        found = (hits < self.num_slots).sum()
        slots, _ = self._taken(self._touch[:-1], found, missing)
        self._touch[slots] = position + (now + _LOADED)
        return slots

    def _by_clock(self, hits: Tensor, missing: Tensor, position: Tensor) -> Tensor:
        """The same by the clock; `_state` holds the number of slots in use and the hand."""
        del position
        size, (used, hand) = self.num_slots, self._state
        touched = torch.zeros_like(self._hit)
        touched[hits] = True
        self._hit[hits] = True
        every = torch.arange(size, device=self.device)
        ahead, empty = (every - hand) % size, every >= used
        marked, free = self._hit[:-1] & ~touched[:-1] & ~empty, ~touched[:-1] & ~empty
        late = torch.where(touched[:-1], 2 * size, torch.where(marked, size, 0))
        found = (hits < size).sum()
        slots, order = self._taken(torch.where(empty, every - size, ahead + late), found, missing)
        kept = (slots < size).sum()
        swept = (kept - (size - used)).clamp(min=0)
        # `gather`, because an index of no dimensions would be fetched by the host.
        last = order.gather(0, (kept - 1).clamp(min=0).view(1))
        lap = swept > (free & ~marked).sum()
        passed = marked & (swept > 0) & (lap | (ahead < ahead.gather(0, last)))
        self._hit[:-1] &= ~passed
        self._hit[slots] = False
        hand = torch.where(swept > 0, (last.squeeze(0) + 1) % size, hand)
        self._state.copy_(torch.stack([used + kept - swept, hand]))
        return slots

    def _taken(self, keys: Tensor, found: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Slots for the misses in order, as far as untouched ones go; and slots in order of key."""
        most = min(self.num_slots, missing.numel())
        order = torch.topk(keys, most, largest=False, sorted=True).indices
        turn = torch.cumsum(missing, 0) - 1
        kept = missing & (turn < self.num_slots - found)
        return torch.where(kept, order[turn.clamp(0, most - 1)], self.num_slots), order
