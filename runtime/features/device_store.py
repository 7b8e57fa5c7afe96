"""A feature store whose rows are gathered by the device itself.

Own rows lie in the device's memory, a peer's in that peer's, the host's in page-locked memory that
the kernel reads in place; a dynamic cache is one more place in the device's memory. Rows that
cannot be addressed (disk, other hosts) are staged. `gather` fills tensors on the device and waits
for nothing but staged rows; `read` is the contract of every store, with the copies and the wait
that arrays on the host need. `device_open` puts a plan's store together.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.features.device_cache import DeviceCache, DeviceDecision, split
from runtime.features.device_rows import DeviceExchange, Staged, padded_rows
from runtime.features.gather import check_output
from runtime.features.tier import AbstractFeatureStore, Counters, total

if TYPE_CHECKING:  # a store is a type that code without Triton names too
    from runtime.features.gather_triton import DeviceTable


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
        if self.device.type != "cuda":
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
