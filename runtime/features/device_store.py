"""A feature store whose rows the device gathers itself.

Own rows lie in the device's memory, a peer's in that peer's, the host's in page-locked memory that
the kernel reads in place; a dynamic cache is one more place in the device's memory. Rows that
cannot be addressed (disk, other hosts) are staged. `gather` fills tensors on the device and waits
for staged rows only; `read` adds the copies and the wait that arrays on the host need.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.features.device_rows import as_array, as_tensor, padded_rows
from gnnplan.runtime.features.gather import check_output
from gnnplan.runtime.features.location import MAX_SOURCES, SOURCE_BITS, SOURCE_MASK, Codes
from gnnplan.runtime.features.peer import DeviceExchange
from gnnplan.runtime.features.tier import AbstractFeatureStore, Counters, Tiers, sum_counters
from gnnplan.runtime.processor import processor_of

_FAR = (1 << 62) - 1
_LOADED = 1 << 32
"""Amount added to the touch of a loaded row, which leaves after the batch's hits."""
_BATCH_BITS = 33
SLOT_BYTES = 24
"""Most bytes of a slot of a cache beside its row: its node, its last touch and a mark."""


@dataclass(frozen=True, slots=True)
class DeviceDecision:
    """Effect of one gather on the cache; tensors of length n on the device."""

    nodes: Tensor
    """Ids, or the number of nodes where an id is outside the graph."""
    slots: Tensor
    """Slot that each row goes to; the number of slots where it is not kept."""
    first: Tensor
    """Position at which the batch first asks for the same node."""
    repeats: Tensor
    """bool: the batch asked before for this row, which the cache did not hold."""
    numbers: Tensor
    """Source number of each id before the batch; -1 outside the graph."""


def copy_codes(codes: Codes, device: torch.device, *, wide: bool = False) -> Tensor:
    """Copy location codes to a device as int32 or int64 bits, with one spare entry at the end."""
    signed = np.int64 if wide or codes.itemsize == 8 else np.int32
    held = np.zeros(codes.shape[0] + 1, signed)
    np.copyto(held[:-1], codes, casting="unsafe")
    return torch.from_numpy(held).to(device)


def split_codes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the source numbers and slots of codes, both int64."""
    bits = codes.long()
    if codes.dtype == torch.int32:
        bits = bits & 0xFFFF_FFFF
    return bits & SOURCE_MASK, bits >> SOURCE_BITS


class DeviceCache:
    """Rows, directory and policy state of a dynamic cache on a device.

    The caller lets in one gather at a time, all on one stream.
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

        `codes` is the location table without the cache, `number` the kept rows' source number in
        it. Rows of the sources in `bypass` (256,) never enter. `dtype` is that of all sources, or
        float32.
        """
        self.num_slots, self.number, self.device = num_slots, number, device
        self.num_nodes = int(codes.shape[0])
        self._clock = policy == "clock"
        wide = num_slots >= 1 << (32 - SOURCE_BITS)
        self._below = copy_codes(codes, device, wide=wide)
        self.codes = self._below.clone()
        """Location table with the cache, int32 or int64 (num_nodes + 1,)."""
        # Lanes with nothing to write write the last entry of every array.
        self.rows = padded_rows(num_slots + 1, width, dtype, device)
        self._bypass = torch.from_numpy(np.append(bypass, True)).to(device)
        self._first = torch.full((self.num_nodes + 1,), _FAR, dtype=torch.int64, device=device)
        self._touch = torch.empty(num_slots + 1, dtype=torch.int64, device=device)
        self._hit = torch.empty(num_slots + 1, dtype=torch.bool, device=device)
        self._node = torch.empty(num_slots + 1, dtype=torch.int64, device=device)
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self._batch = 0
        self.totals = torch.zeros(2, dtype=torch.int64, device=device)
        """Numbers of distinct rows looked up so far and of those that the cache held."""
        self.clear()

    @property
    def below(self) -> Tensor:
        """Location table without the cache, int32 or int64 (num_nodes,)."""
        return self._below[:-1]

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
        """Look up ids (n,), touch the hits and give slots to the misses, without waiting."""
        count = ids.numel()
        known = (ids >= 0) & (ids < self.num_nodes)
        nodes = torch.where(known, ids, self.num_nodes)
        position = torch.arange(count, device=self.device)
        first = self._first.scatter_reduce_(0, nodes, position, "amin")[nodes]
        self._first[nodes] = _FAR
        numbers, slot = split_codes(self.codes[nodes])
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
        """Store the rows of a gathered batch (n, feature_dim) that were given slots."""
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
        """Return copies of the kept nodes and rows, for tests and reports; waits for the device."""
        used = self._node[:-1] >= 0
        return self._node[:-1][used].cpu(), self.rows[:-1][used].cpu()

    def _by_age(self, hits: Tensor, missing: Tensor, position: Tensor) -> Tensor:
        """Touch `hits` and return the slot of each miss, by LRU."""
        now = self._batch << _BATCH_BITS
        self._touch[hits] = position + now
        found = (hits < self.num_slots).sum()
        slots, _ = self._taken(self._touch[:-1], found, missing)
        self._touch[slots] = position + (now + _LOADED)
        return slots

    def _by_clock(self, hits: Tensor, missing: Tensor, position: Tensor) -> Tensor:
        """Touch `hits` and return the slot of each miss, by clock."""
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
        # `gather`: the host would fetch an index of no dimensions.
        last = order.gather(0, (kept - 1).clamp(min=0).view(1))
        lap = swept > (free & ~marked).sum()
        passed = marked & (swept > 0) & (lap | (ahead < ahead.gather(0, last)))
        self._hit[:-1] &= ~passed
        self._hit[slots] = False
        hand = torch.where(swept > 0, (last.squeeze(0) + 1) % size, hand)
        self._state.copy_(torch.stack([used + kept - swept, hand]))
        return slots

    def _taken(self, keys: Tensor, found: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Return a slot per miss, as far as untouched slots go, and the slots by ascending key."""
        most = min(self.num_slots, missing.numel())
        order = torch.topk(keys, most, largest=False, sorted=True).indices
        turn = torch.cumsum(missing, 0) - 1
        kept = missing & (turn < self.num_slots - found)
        return torch.where(kept, order[turn.clamp(0, most - 1)], self.num_slots), order


_NO_LANE = 255


class Staged:
    """Tiers of some sources, read by the host into page-locked rows for a device.

    The host must know which rows those are, so it waits for the ids; the copy to the device runs on
    the stream. Rows cross in `dtype`, which is that of all tiers, or float32.
    """

    def __init__(
        self,
        tiers: Tiers,
        width: int,
        device: torch.device,
        *,
        pinned: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._tiers = tiers
        self._width, self._device, self._pinned = width, device, pinned
        self._dtype = dtype
        self._lanes = np.full(MAX_SOURCES, _NO_LANE, np.uint8)
        order = [number for _, numbers in tiers for number in numbers]
        self._lanes[order] = np.arange(len(order))
        staged = np.append(self._lanes != _NO_LANE, False)
        self.holds = torch.from_numpy(staged).to(device)
        """bool (257,) by source number; the last entry is for ids outside the graph (-1)."""

    @property
    def resident_bytes(self) -> int:
        """Bytes that the tiers hold."""
        return sum(tier.resident_bytes for tier, _ in self._tiers)

    def fill(self, numbers: Tensor, slots: Tensor, wanted: Tensor | None, out: Tensor) -> Counters:
        """Write the rows of these sources into the batch; read every tier, even for nothing.

        Args:
            numbers: int64 (n,) on the device, source number of each row, -1 for none.
            slots: int64 (n,) on the device.
            wanted: bool (n,), rows to fill; None fills all.
            out: (n, feature_dim) on the device; rows of other sources stay as they are.
        """
        mine = self.holds[numbers] if wanted is None else self.holds[numbers] & wanted
        places = mine.nonzero().squeeze(1)
        number, slot = torch.stack([numbers[places], slots[places]]).cpu().numpy()
        lanes = self._lanes[number]
        order = np.argsort(lanes, kind="stable")
        counts = np.bincount(number, minlength=MAX_SOURCES).astype(np.int64)
        staging = torch.empty((slot.size, self._width), dtype=self._dtype, pin_memory=self._pinned)
        counters, first = Counters(), 0
        for tier, sources in self._tiers:
            part = order[first : first + int(counts[sources].sum())]
            tier.read(
                np.ascontiguousarray(slot[part]), part, counts[sources], as_array(staging), counters
            )
            first += part.size
        if slot.size:
            rows = staging.to(self._device, non_blocking=self._pinned)
            out.index_copy_(0, places, rows.to(out.dtype))
        return counters

    def close(self) -> None:
        """Close the tiers."""
        for tier, _ in self._tiers:
            tier.close()
        self._tiers = []


if TYPE_CHECKING:  # code without Triton names this type too
    from gnnplan.runtime.features.gather_triton import DeviceTable


class DeviceFeatureStore(AbstractFeatureStore):
    """A device's location table and sources, with counters that stay on the device."""

    def __init__(
        self,
        table: "DeviceTable",
        *,
        max_programs: int | None = None,
        others: Sequence[Staged | DeviceExchange] = (),
        cache: DeviceCache | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a table, whose codes are the cache's where there is one.

        `others` read the rows of all sources that the kernel does not; `release` is called last
        when the store is closed.
        """
        self.feature_dim = table.feature_dim
        self.device = table.device
        self.cache = cache
        self._table = table
        self._max_programs = max_programs
        self._others = list(others)
        self._release = release
        self._in_place = torch.zeros(257, dtype=torch.bool, device=self.device)
        self._in_place[list(table.sources)] = True
        # What lasts while the loader's gathers change a cache.
        self._lasting = table if cache is None else table.with_codes(cache.below)
        # Peers and a cache need one gather at a time, from whatever thread.
        self._lock = threading.Lock()

    @property
    def exchanges(self) -> bool:
        """Whether every gather meets the other ranks' in a collective."""
        return any(isinstance(each, DeviceExchange) for each in self._others)

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an undefined (count, feature_dim) for `gather`: padded rows on a GPU."""
        if not processor_of(self.device).is_gpu:
            return torch.empty((count, self.feature_dim), dtype=dtype)
        return padded_rows(count, self.feature_dim, dtype, self.device)

    def new_counts(self) -> Tensor:
        """Return counters for gathers, which `named` reads once the device is done."""
        return self._table.new_counts()

    def gather(self, ids: Tensor, out: Tensor, counts: Tensor) -> Counters:
        """Write the features of node `ids[i]` to `out[i]`, on the current stream.

        The call waits for the device only where the host must fetch rows, whose counters it
        returns. Ids outside the graph leave their rows as they are, and `named` reports them.

        Args:
            ids: int64 (n,) on the device.
            out: float32, float16 or bfloat16 (n, feature_dim) on the device, as from `empty`.
            counts: From `new_counts`; the device adds to it.
        """
        with self._lock:
            return self._gather(ids, out, counts)

    @property
    def num_launches(self) -> int:
        """Return how many kernels `gather_padded` launches."""
        return self._table.num_launches

    def check_padded(self) -> None:
        """Refuse rows that `gather_padded` cannot read."""
        if self.cache is not None or self._others:
            raise SamplerError(
                "expected all rows where the device reads them in place, found a dynamic cache, or "
                "rows on disk, of other hosts or of peers that cannot be mapped; gather them batch "
                "by batch"
            )

    def gather_padded(self, ids: Tensor, known_ids: Tensor, out: Tensor, counts: Tensor) -> None:
        """Gather the first `known_ids` (int64 [1]) rows; those of the other ids become 0.

        Arguments as in `gather`. Only launches kernels, so that a graph may capture it.
        """
        self._table.gather(ids, out, counts, known_ids=known_ids, max_programs=self._max_programs)

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of nodes, and the positions of those that it does not read in place.

        Neither counted nor kept in the cache, nor collective: any thread may call it meanwhile.
        """
        out, table = self.empty(ids.numel()), self._lasting
        table.gather(ids, out, table.new_counts(), max_programs=self._max_programs)
        numbers, _ = split_codes(table.codes[ids])
        return out, (~self._in_place[numbers]).nonzero().squeeze(1)

    def _gather(self, ids: Tensor, out: Tensor, counts: Tensor) -> Counters:
        if self.cache is None and not self._others:
            self._table.gather(ids, out, counts, max_programs=self._max_programs)
            return Counters()
        cache = self.cache
        decision = None if cache is None else cache.decide(ids)
        try:
            self._table.gather(ids, out, counts, max_programs=self._max_programs)
            fetched = self._fetch(ids, out, decision)
        except BaseException:
            if cache is not None:
                cache.clear()  # rows that it lists were never read
            raise
        if cache is not None and decision is not None and ids.numel():
            self._count_repeats(decision, counts, cache.number)
            cache.keep(decision, out)
        return fetched

    def _fetch(self, ids: Tensor, out: Tensor, decision: DeviceDecision | None) -> Counters:
        if not self._others:
            return Counters()
        codes, num_nodes = self._table.codes, self._table.num_nodes
        known = (ids >= 0) & (ids < num_nodes)
        found, slots = split_codes(codes[torch.where(known, ids, 0)])
        numbers = torch.where(known, found, -1)
        wanted = None if decision is None else ~decision.repeats
        fetched = sum_counters([each.fill(numbers, slots, wanted, out) for each in self._others])
        if decision is not None:
            again = (decision.repeats & ~self._in_place[decision.numbers]).nonzero().squeeze(1)
            out.index_copy_(0, again, out[decision.first[again]])
        return fetched

    def _count_repeats(self, decision: DeviceDecision, counts: Tensor, number: int) -> None:
        """Count repeats of a miss as the cache's, though the kernel read them from the source."""
        repeats = decision.repeats
        read = repeats & self._in_place[decision.numbers]
        counts.index_add_(0, decision.numbers.clamp(min=0), -read.long())
        counts[number] += repeats.sum()

    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> Counters:
        """Read rows as `AbstractFeatureStore.read` says."""
        check_output(ids, out, self.feature_dim)
        rows, counts = self.empty(ids.size), self.new_counts()
        asked = torch.from_numpy(np.array(ids)).to(self.device)
        fetched = self.gather(asked, rows, counts)
        counters = sum_counters([self.named(counts.tolist()), fetched])
        as_tensor(out).copy_(rows)
        if self.cache is not None:  # whose next gather may be on a lane
            processor_of(self.device).synchronize()
        return counters

    def named(self, counts: list[int]) -> Counters:
        """Turn counts of the device into rows and bytes by kind of source.

        Ids or slots that were out of range raise IndexError.
        """
        if counts[-1]:
            raise IndexError(
                f"expected node ids in [0, {self._table.num_nodes}), found {counts[-1]} outside it "
                "(or located past the end of their source)"
            )
        counters = Counters()
        for number, source in self._table.sources.items():
            counters.add_rows(source.kind, counts[number], counts[number] * source.row_bytes)
        return counters

    @property
    def resident_bytes(self) -> int:
        """Bytes of rows (without the peers'), location table, cache and staging."""
        tables = {
            s.table.data_ptr(): s.table for s in self._table.sources.values() if s.kind != "peer"
        }
        held = sum(table.numel() * table.element_size() for table in tables.values())
        held += self._table.codes.numel() * self._table.codes.element_size()
        held += 0 if self.cache is None else self.cache.nbytes - self.cache.rows.nbytes
        return held + sum(other.resident_bytes for other in self._others)

    def close(self) -> None:
        """Release the rows and close the readers; no gather may be under way."""
        self._table.sources.clear()
        self.cache = None
        for other in self._others:
            other.close()
        self._others = []
        if self._release is not None:
            self._release()
            self._release = None
