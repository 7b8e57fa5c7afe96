"""Opening a plan's feature store on a rank's GPU.

Own rows that find no room in the GPU's memory are read from the host instead, with one warning that
shows the plan's sum; other ranks are told. Of the peers whose rows the location table reads, those
of the host are mapped where the plan says so and the devices can; rows of the others are exchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import BudgetExceeded, PlanError, warn_once
from gnnplan.runtime.features.device_rows import (
    AnyRows,
    DeviceRows,
    HostShare,
    SharedRows,
    SomeRows,
    as_tensor,
    padded_rows,
    share_host_rows,
    share_rows,
    torch_dtype,
)
from gnnplan.runtime.features.device_store import (
    SLOT_BYTES,
    DeviceCache,
    DeviceFeatureStore,
    Staged,
)
from gnnplan.runtime.features.gather_triton import DeviceTable
from gnnplan.runtime.features.location import SOURCE_BITS, SOURCE_MASK, LocationTable, encode
from gnnplan.runtime.features.peer import DeviceExchange
from gnnplan.runtime.features.store import (
    OwnRows,
    build_tiers,
    open_host_rows,
    own_row_parts,
    read_location,
)
from gnnplan.runtime.features.tier import Dense, TypedHost
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import row_dtype, word_multiple
from gnnplan.runtime.limits import planned_sum, sum_text
from gnnplan.runtime.plan.schema import Plan, Source
from gnnplan.runtime.processor import processor_of

T = TypeVar("T")
_SMALLER = 0.75
"""Share of the rows that is tried next where rows found no room."""
_HELD_ALREADY = ("own rows", "cache rows", "context", "reserve")
"""Parts of the plan's sum that are these rows, or that the device has given away already."""


def count_room(plan: Plan, rank: int, device: torch.device, row_bytes: int) -> int | None:
    """Return how many rows fit a GPU beside all else that the plan puts there; None for a CPU."""
    free = processor_of(device).free_bytes()
    if free is None:
        return None
    use = plan.prediction.memory_bytes.get(f"rank{rank}")
    parts = {} if use is None else dict(use.parts)
    others = sum(size for name, size in parts.items() if name not in _HELD_ALREADY)
    return max(0, free - others) // max(1, row_bytes)


def make_largest(planned: int, room: int | None, make: Callable[[int], T]) -> T:
    """Return make(count) with the largest count tried that fits, or raise OutOfMemoryError."""
    count = planned if room is None else min(planned, room)
    while True:
        try:
            return make(count)
        except torch.OutOfMemoryError:
            if count == 0:
                raise
            count = int(count * _SMALLER)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def relocate_rows(
    plan: Plan,
    rank: int,
    location: LocationTable,
    own_ids: Mapping[int, NDArray[np.int64]],
    kept: Mapping[int, int],
    *,
    device: torch.device,
    whole_dataset: bool,
) -> tuple[LocationTable, int] | None:
    """Point the rows beyond `kept` rows per rank to the host, or to the disk.

    Returns the new table and the number of the source that takes the rows; None where all found
    room. Raises BudgetExceeded where this host does not hold them.
    """
    if all(kept.get(holder, ids.size) >= ids.size for holder, ids in own_ids.items()):
        return None
    codes, sources = location.codes, list(location.sources)
    numbers, slots = location.decode(np.arange(codes.size))
    lost = np.zeros(codes.size, np.bool_)
    for number, source in enumerate(sources):
        holder = rank if source.kind == "own" else source.rank
        if source.kind in ("own", "peer") and holder in kept:
            lost |= (numbers == number) & (slots >= kept[holder])
    if not lost.any():
        return None
    kinds = [source.kind for source in sources]
    if whole_dataset and "host" not in kinds:
        sources.append(Source(kind="host"))
        kinds.append("host")
    instead = next((kinds.index(kind) for kind in ("host", "disk") if kind in kinds), -1)
    if instead < 0 or not whole_dataset:
        raise BudgetExceeded(
            f"rank {rank}: {int(lost.sum())} rows find no room on {device} and this host does not "
            f"hold them; {planned_sum(plan, rank)}; plan again with a smaller --device-memory"
        )
    numbers, slots = numbers.astype(np.int64), slots.copy()
    numbers[lost], slots[lost] = instead, np.flatnonzero(lost)
    return LocationTable(encode(numbers, slots), sources), instead


def open_device_store(
    graph: Graph,
    plan: Plan,
    plan_folder: Path,
    rank: int,
    device: torch.device,
    *,
    comm: Communicator | None = None,
    max_programs: int | None = None,
    threads: int = 1,
) -> DeviceFeatureStore:
    """Open a plan's sources where the device reads them; collective where ranks read each other's.

    On the CPU (tests) nothing is page-locked. `max_programs` caps the gather's grid; None takes the
    plan's, or four per multiprocessor. Raises PinError where the host's rows cannot be page-locked,
    BudgetExceeded where own rows do not fit and are nowhere else.
    """
    if graph.x is None and not graph.x_by_type:
        raise PlanError(
            f"{graph.path}: expected dense features for a gather by the GPU, found sparse ones; "
            "import the graph with --features dense, or gather on the host"
        )
    opening = _Opening(graph, plan, plan_folder, rank, device, comm, threads)
    return opening.store(max_programs or plan.strategy.threads.gather_programs or None)


class _Opening:
    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        folder: Path,
        rank: int,
        device: torch.device,
        comm: Communicator | None,
        threads: int,
    ) -> None:
        self.graph, self.plan, self.rank, self.device = graph, plan, rank, device
        self.location, self.own_ids = read_location(graph, plan, folder, rank)
        served, held = open_host_rows(graph, plan, folder, rank, self.location, threads)
        assert isinstance(served, Dense | TypedHost)  # `open_device_store` refuses sparse ones
        # The device holds the rank's own rows: nobody reads these.
        self.no_rows = np.empty((0, served.width), row_dtype(plan.strategy.features.storage_dtype))
        self.dense, self.tiers = build_tiers(graph, plan, rank, served, self.no_rows, comm, threads)
        self.own_rows = OwnRows(served, plan, rank, self.own_ids[rank], held, comm, threads)
        self.on_host = [n for n, each in self.dense.items() if each.kind == "host"]
        by_type = [(t, numbers) for t, numbers in self.tiers if isinstance(t, TypedHost)]
        self.on_host += [number for _, numbers in by_type for number in numbers]
        self.tiers = [each for each in self.tiers if not isinstance(each[0], TypedHost)]
        self.host_rows = served.table if isinstance(served, Dense) else served
        self.whole_dataset = f"host_rows_{plan.strategy.devices[rank].host}" not in plan.arrays
        self.comm = Communicator(device=device) if comm is None else comm
        hosts = [each.host for each in plan.strategy.devices]
        self.mates = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        self.peers = {
            number: source.rank
            for number, source in enumerate(self.location.sources)
            if source.kind == "peer" and source.rank != rank
        }
        # All ranks derive from the plan alone which collectives they enter.
        self.together = len(hosts) > 1 and self.comm.size == len(hosts)
        self.exchanging = any(s.kind == "peer" for s in self.location.sources)

    def store(self, max_programs: int | None) -> DeviceFeatureStore:
        """Assemble the store: own rows first, since what does not fit is read from elsewhere."""
        own = self._own()
        others: list[Staged | DeviceExchange] = []
        rows: dict[int, DeviceRows] = {}
        shared = self._peers(own, rows, others)
        own = shared.own
        host = self._host()
        for number, each in self.dense.items():
            if each.kind == "own":
                rows[number] = DeviceRows("own", own)
        if host is not None:
            rows |= dict.fromkeys(self.on_host, DeviceRows("host", host))
        spare = len(self.location.sources)
        if not rows:  # the kernel needs a source, even an empty one
            rows[spare] = DeviceRows("own", own[:0])
        staged = [(t, numbers) for t, numbers in self.tiers if t.kind != "peer"]
        for tier, _ in self.tiers:
            if tier.kind == "peer":
                tier.close()
        if staged:
            processor = processor_of(self.device)
            pinned = processor.is_gpu and not processor.emulated
            others.append(
                Staged(
                    staged, self.graph.feature_dim, self.device, pinned=pinned, dtype=self._dtype()
                )
            )
        cache = self._cache(spare + 1)
        if cache is not None:
            rows[cache.number] = DeviceRows("cache", cache.rows)
        table = DeviceTable(self.location.codes, rows, self.device)
        if cache is not None:
            table.codes = cache.codes[:-1]
        return DeviceFeatureStore(
            table, max_programs=max_programs, others=others, cache=cache, release=shared.close
        )

    def _own(self) -> Tensor:
        """Copy this rank's rows to its device as far as they find room; tell the other ranks."""
        ids, width, dtype = self.own_rows.ids, self.graph.feature_dim, self.no_rows.dtype
        if not any(source.kind in ("own", "peer") for source in self.location.sources):
            ids = ids[:0]
        planned, stored = ids.size, torch_dtype(self.no_rows)
        table = make_largest(
            planned, self._room(word_multiple(width * dtype.itemsize)),
            lambda count: padded_rows(count, width, stored, self.device),
        )  # fmt: skip
        for part, rows in own_row_parts(replace(self.own_rows, ids=ids[: table.shape[0]])):
            table[part].copy_(as_tensor(rows))
        kept = {self.rank: table.shape[0]}
        if self.exchanging and self.together:
            kept = dict(enumerate(self.comm.all_gather_objects(table.shape[0])))
        if table.shape[0] < planned:
            self._say(f"own rows: {table.shape[0]} of {planned} find room on {self.device}")
        moved = relocate_rows(
            self.plan, self.rank, self.location, self.own_ids, kept, device=self.device,
            whole_dataset=self.whole_dataset,
        )  # fmt: skip
        if moved is not None:
            self.location, instead = moved
            if self.location.sources[instead].kind == "host" and instead not in self.on_host:
                self.on_host.append(instead)
        return table

    def _room(self, row_bytes: int) -> int | None:
        return count_room(self.plan, self.rank, self.device, row_bytes)

    def _say(self, what: str) -> None:
        use = self.plan.prediction.memory_bytes.get(f"rank{self.rank}")
        total = planned_sum(self.plan) if use is None else "planned " + sum_text("GPU", use)
        warn_once(
            f"{what.partition(':')[0]} on {self.device}",
            f"rank {self.rank}: {what}; the others are read from the host ({total}); plan again "
            "on this machine, or with --device-memory, for what fits",
        )

    def _peers(
        self, own: Tensor, rows: dict[int, DeviceRows], others: list[Staged | DeviceExchange]
    ) -> SharedRows:
        """Map the peers whose rows the table reads, and exchange the rows of those that are far."""
        if not self.exchanging or not self.together:
            return SharedRows(own)
        used = self.location.count()
        read = {number: rank for number, rank in self.peers.items() if used[number]}
        shared = self._mapped(own, sorted(set(read.values()) & set(self.mates)))
        far = dict(read)
        for number, rank in read.items():
            if rank in shared.peers:
                rows[number] = DeviceRows("peer", shared.peers[rank])
                del far[number]
        if any(self.comm.all_gather_objects(bool(far))):
            others.append(DeviceExchange(shared.own, far, self.comm.duplicate()))
        return shared

    def _mapped(self, own: Tensor, near: list[int]) -> SharedRows:
        """Map the memory of the ranks near; warn of each that cannot be."""
        if self.plan.strategy.features.peer_way != "mapped":
            return SharedRows(own)
        shared = share_rows(own, near, self.comm)
        for rank, fault in shared.faults.items():
            warn_once(
                f"peer memory {self.rank}-{rank}",
                f"rank {self.rank} exchanges rows with rank {rank}, whose memory it cannot map "
                f"({fault}); run gnnplan doctor",
            )
        return shared

    def _host(self) -> Tensor | None:
        """Lock the host's rows where the table reads them: one copy per host where it can be."""
        numbers = self.on_host
        used = bool(self.location.count()[numbers].any()) if numbers else False
        share = HostShare.of(self.plan, self.rank, self.comm)
        rows: AnyRows = self.host_rows
        elsewhere = {source.kind for source in self.plan.strategy.features.sources}
        if isinstance(rows, np.ndarray) and elsewhere & {"disk", "remote"}:
            rows = self._only_read(rows, share)
        return share_host_rows(rows, share, self.device, used=used)

    def _only_read(self, rows: NDArray[Any], share: HostShare | None) -> AnyRows:
        """Leave out rows that no rank of this host reads from it, and renumber the others.

        The plan counts no room for them: they lie on the disk or in another host.
        """
        codes: Any = np.array(self.location.codes)
        mine = np.isin(codes & SOURCE_MASK, np.array(self.on_host, codes.dtype))
        read = mine
        if share is not None:
            found = share.comm.all_gather_objects(np.packbits(mine))
            bits = np.bitwise_or.reduce([found[rank] for rank in share.ranks])
            read = np.unpackbits(bits, count=mine.size).astype(np.bool_)
        slots = np.cumsum(read, dtype=codes.dtype)[mine] - 1
        codes[mine] = (slots << SOURCE_BITS) | (codes[mine] & SOURCE_MASK)
        self.location = LocationTable(codes, self.location.sources)
        return SomeRows(rows, np.flatnonzero(read))

    def _dtype(self) -> torch.dtype:
        """Return the dtype in which the dataset stores rows."""
        return torch_dtype(self.host_rows)

    def _cache(self, number: int) -> DeviceCache | None:
        """Make the plan's dynamic cache, with as many slots as find room."""
        settings = self.plan.strategy.features.cache
        if settings.policy == "none" or not settings.rows or settings.rows[self.rank] == 0:
            return None
        dtype = self._dtype()
        bypass = self.location.own_sources(self.rank)
        planned = min(settings.rows[self.rank], self.graph.num_nodes)
        width = self.graph.feature_dim

        def make(slots: int) -> DeviceCache:
            return DeviceCache(
                self.location.codes, bypass, width, dtype, self.device,
                policy=settings.policy, num_slots=max(1, slots), number=number,
            )  # fmt: skip

        room = self._room(word_multiple(width * dtype.itemsize) + SLOT_BYTES)
        cache = make_largest(planned, room, make)
        if cache.num_slots < planned:
            self._say(f"cache: {cache.num_slots} of {planned} rows find room on {self.device}")
        return cache
