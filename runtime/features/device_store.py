"""A feature store whose rows are gathered by the device itself.

Own rows lie in the device's memory, a peer's in that peer's, the host's in page-locked memory that
the kernel reads in place; a dynamic cache is one more place in the device's memory. Rows that
cannot be addressed (disk, other hosts) are staged. `gather` fills tensors on the device and waits
for nothing but staged rows; `read` is the contract of every store, with the copies and the wait
that arrays on the host need. `device_open` puts a plan's store together.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.features.device_rows import DeviceExchange, Staged, padded_rows
from gnnplan.runtime.features.gather import check_output
from gnnplan.runtime.features.location import SOURCE_BITS, SOURCE_MASK, Codes
from gnnplan.runtime.features.tier import AbstractFeatureStore, Counters, total
from gnnplan.runtime.processor import processor_of

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


if TYPE_CHECKING:  # a store is a type that code without Triton names too
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
        """Wrap a table.

        Args:
            table: the codes, and the sources that the kernel reads; with a cache its codes are the
                cache's.
            max_programs: cap of the gather's grid; None as in `DeviceTable.gather`.
            others: what fetches the rows of all other sources.
            cache: a dynamic cache in front of all but own rows.
            release: called when the store is closed, last.
        """
        self.feature_dim = table.feature_dim
        self.device = table.device
        self.cache = cache
        self._table = table
        self._max_programs = max_programs
        self._others = list(others)
        self._release = release
        self._counts = table.new_counts()
        self._fetched: list[Counters] = []
        self._in_place = torch.zeros(257, dtype=torch.bool, device=self.device)
        self._in_place[list(table.sources)] = True
        # Peers and a cache want their gathers one at a time, whatever thread they come from.
        self._lock = threading.Lock()

    @property
    def waits(self) -> bool:
        """Whether gathers wait for the device, to fetch rows that it cannot address."""
        return bool(self._others)

    @property
    def exchanges(self) -> bool:
        """Whether every gather meets the other ranks' in a collective."""
        return any(isinstance(each, DeviceExchange) for each in self._others)

    def empty(self, count: int) -> Tensor:
        """An undefined float32 [count, feature_dim] for `gather`: padded rows on a GPU."""
        if not processor_of(self.device).is_gpu:
            return torch.empty((count, self.feature_dim))
        return padded_rows(count, self.feature_dim, torch.float32, self.device)

    def new_counts(self) -> Tensor:
        """Counters of one gather, to be named by `named` once the device is done."""
        return self._table.new_counts()

    def gather(self, ids: Tensor, out: Tensor, counts: Tensor | None = None) -> Counters:
        """out[i] = features of node ids[i], on the current stream.

        Waits for the device only where rows must be fetched. Ids outside the graph leave their
        rows as they are and are reported by `counters`, or by `named`.

        Args:
            ids: int64 [n] on the device.
            out: float32, float16 or bfloat16 [n, feature_dim] on the device, as `empty` gives it.
            counts: from `new_counts`; None adds to what `counters` gives.

        Returns:
            What was counted by those who fetched rows; the device's counts come without waiting.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        with self._lock:
            kept = self._counts if counts is None else counts
            fetched = self._gather(ids, out, kept)
            if counts is None and self._others:
                self._fetched.append(fetched)
        return fetched

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
                cache.clear()  # the directory names rows that never came
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
        found, slots = split(codes[torch.where(known, ids, 0)])
        numbers = torch.where(known, found, -1)
        wanted = None if decision is None else ~decision.repeats
        fetched = total([each.fill(numbers, slots, wanted, out) for each in self._others])
        if decision is not None:
            again = (decision.repeats & ~self._in_place[decision.numbers]).nonzero().squeeze(1)
            out.index_copy_(0, again, out[decision.first[again]])
        return fetched

    def _count_repeats(self, decision: DeviceDecision, counts: Tensor, number: int) -> None:
        """Repeats of a miss are the cache's, though the kernel read them where the miss lies."""
        repeats = decision.repeats
        read = repeats & self._in_place[decision.numbers]
        counts.index_add_(0, decision.numbers.clamp(min=0), -read.long())
        counts[number] += repeats.sum()

    def counters(self) -> Counters:
        """Rows and bytes by source since the last call; waits for the gathers under way.

        Raises:
            IndexError: some ids or slots since then were out of range.
        """
        with self._lock:
            counts = self._counts.tolist()
            self._counts.zero_()
            fetched, self._fetched = self._fetched, []
        return total([self.named(counts), *fetched])

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """See `AbstractFeatureStore.read`."""
        check_output(ids, out, self.feature_dim)
        rows, counts = self.empty(ids.size), self.new_counts()
        asked = torch.from_numpy(np.array(ids)).to(self.device)
        fetched = self.gather(asked, rows, counts)
        counters = total([self.named(counts.tolist()), fetched])
        torch.from_numpy(out).copy_(rows)
        return counters

    def named(self, counts: list[int]) -> Counters:
        """Counts of the device by the kind of their source.

        Raises:
            IndexError: some ids or slots were out of range.
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
        """Bytes of all sources' rows, the location table, cache and staging, each counted once.

        A peer's rows are that peer's.
        """
        tables = {
            s.table.data_ptr(): s.table for s in self._table.sources.values() if s.kind != "peer"
        }
        held = sum(table.numel() * table.element_size() for table in tables.values())
        held += self._table.codes.numel() * self._table.codes.element_size()
        held += 0 if self.cache is None else self.cache.nbytes - self.cache.rows.nbytes
        return held + sum(other.resident_bytes for other in self._others)

    def close(self) -> None:
        """Let go of the rows and of those who fetch; no gather may be under way."""
        self._table.sources.clear()
        self.cache = None
        for other in self._others:
            other.close()
        self._others = []
        if self._release is not None:
            self._release()
            self._release = None
