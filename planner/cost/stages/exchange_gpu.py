"""Price exchanges of rows between GPUs: an all-to-all in equal shares, and reads of peers' rows.

What goes to a rank of the same clique crosses the links between the GPUs, to another of the host
the way over the host's memory, to another host the card that the ranks of a host share. All of
these carry at once, so the slowest one governs: a port of a switch of NVLinks, the upstream port
of a PCIe switch, a GPU's own slot, a card (DEC-130).

Source: docs/formulas.md 8.4 [A4]; messages by tables `gpu_message` and `host_message`.
"""

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.memory import BatchTail, ranks_by_host
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import MachineTable, rate_per_rank
from gnnplan.planner.cost.request import (
    Request,
    handed_row_bytes,
    row_bytes,
    seeds_per_rank,
)
from gnnplan.planner.cost.stages.gather_gpu import (
    Ground,
    find_routes,
    ground_of,
    memory_seconds_per_byte,
    read_seconds,
    routes_over,
)
from gnnplan.planner.cost.stages.host import (
    ASK_STARTS,
    FETCH_STARTS,
    GATHER_STARTS,
    ROW_STARTS,
    start_seconds,
    started_collective,
)
from gnnplan.planner.cost.stages.sample import (
    KERNELS_PER_HOP,
    NEIGHBOUR_BYTES,
    OFFSETS_BYTES,
    gpu_sample_seconds,
    scan_seconds,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import byte_seconds
from gnnplan.runtime.stages import Stage

ID_BYTES = 8
EXCHANGES = 2
"""Messages of an all-to-all of ids whose numbers are not known: counts, then ids."""


def exchange_seconds(
    machine: MachineModel,
    candidate: Candidate,
    num_bytes: float,
    *,
    messages: int = 1,
    group: Collection[int] | None = None,
) -> float:
    """Return the seconds in which the slowest rank sends bytes to all others, `messages` in turn.

    m max((g - 1) t_g, (P - g) t_h) + n / (P - 1) max(k c_peer, f c_host, (f + P - g) c_slot,
    (P - g) h / B)

    with n bytes of a rank, P ranks, g of them on a host and k + 1 in a clique, f = g - 1 - k; t_g
    and t_h seconds of a message inside a host and between hosts, c seconds per byte between GPUs
    of a clique, from the host while all copy, and over a GPU's own slot; B bytes per second of the
    card of a host and its h ranks. A byte on its way over the host goes up while others go down.

    The P ranks are all, or a `group`, while all others exchange in groups of their own. Where all
    ranks' exchanges were measured, their seconds stand for all of it; where the machine names its
    collectives' backend, m a + n / B of that do.
    """
    every, members = ranks_by_host(machine, candidate), set(group or range(candidate.num_ranks))
    ranks = len(members)
    if ranks == 1:
        return 0.0
    measured = started_collective(machine, MachineTable.NCCL_ALL_TO_ALL, candidate, num_bytes)
    asked = started_collective(machine, MachineTable.NCCL_ASKED, candidate, 0.0)
    if ranks == candidate.num_ranks and measured is not None and asked is not None:
        return measured.seconds + (messages - 1) * asked.seconds / EXCHANGES
    if machine.backend is not None:
        return machine.backend.exchange_seconds(num_bytes, messages)
    hosts = {
        host: mine for host, all_ in every.items() if (mine := [r for r in all_ if r in members])
    }
    here, sharing = (max(len(mine) for mine in each.values()) for each in (hosts, every))
    started = (here - 1) * rate_per_rank(machine, MachineTable.GPU_MESSAGE, candidate)
    per_byte = _seconds_per_byte(ground_of(machine, candidate), frozenset(members))
    if len(hosts) > 1:
        away = ranks - here
        started = max(started, away * machine.table(MachineTable.HOST_MESSAGE).at(ranks=1.0))
        per_byte = max(per_byte, away * sharing / card_bandwidth(machine))
    return messages * started + num_bytes / (ranks - 1) * per_byte


@functools.lru_cache(maxsize=64)
def _seconds_per_byte(ground: Ground, members: frozenset[int]) -> float:
    """Return the seconds per byte to each other member over GPUs' own links, of the slowest one."""
    found, ranks = routes_over(ground), len(members)
    peer, over_host = byte_seconds(found.peer), byte_seconds(found.host)
    host_of = {p.name: p.host for p in ground.wiring.processors}
    slowest = 0.0
    for clique in ground.cliques:
        for rank in set(clique) & members:
            name = ground.gpus[rank]
            alike = [r for r in members if host_of[ground.gpus[r]] == host_of[name]]
            near = len(set(clique) & set(alike)) - 1
            far, away = len(alike) - 1 - near, ranks - len(alike)
            # A clique whose links are not known is crossed by way of the host, too.
            to_mates = near * (peer[name] or over_host[name])
            slots = [x for r in found.host[rank].routes for x in r.links[-2:]]
            slot = min((x.bandwidth_bytes_per_second for x in slots), default=math.inf)
            slowest = max(slowest, to_mates, far * over_host[name], (far + away) / slot)
    return slowest


def card_bandwidth(machine: MachineModel) -> float:
    """Return the bytes per second of a host's network cards taken together, one direction."""
    return min(
        x.bandwidth_bytes_per_second
        for x in machine.links
        if x.name.startswith("nic") and x.name.endswith((".out", ".in"))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerReads:
    """Seconds of reading one rank's rows of peers, in both ways."""

    mapped: float
    """Seconds of reading the rows in place."""
    asked: float
    """Seconds of handing over ids, where rows are exchanged."""
    sent: float
    """Seconds of handing over rows."""
    packed: float
    """Seconds in which the GPU's memory reads and writes exchanged rows."""
    starts: float
    """Number of kernels that the host starts for an exchange, beside those of a gather."""
    start: float
    """Seconds that the host takes to start one kernel."""

    @property
    def exchanged(self) -> float:
        """Return the seconds of the exchange, the host's starts included."""
        return self.asked + self.sent + self.packed + self.starts * self.start

    @property
    def way(self) -> str:
        """Return the way that takes less: "mapped" or "exchange"."""
        return "mapped" if self.mapped <= self.exchanged else "exchange"


def peer_reads(
    machine: MachineModel, candidate: Candidate, rank: int, rows: RankRows, row_bytes: int
) -> PeerReads | None:
    """Price a rank's rows of peers; None where it reads none.

    mapped    r c_peer
    exchange  T(8 r) + T(r s) + r (c_own + 3 b s) + K t_s

    with r rows of s bytes read of peers, c seconds per row read at random, T the all-to-all's
    seconds, b seconds per byte of copies within the GPU's memory and K starts of t_s. In place, a
    row crosses the link in lines; exchanged, it is packed, sent whole and unpacked.
    """
    count, stored = rows.rows.get("peer", 0.0), read_seconds(machine, candidate, row_bytes)
    if count <= 0 or "peer" not in stored:
        return None
    near = stored["peer"][rank]
    if math.isinf(near):  # no link between them: only by way of the host
        near = stored["host"][rank]
    placed = 3 * row_bytes * memory_seconds_per_byte(machine, candidate)
    return PeerReads(
        mapped=count * near,
        asked=exchange_seconds(machine, candidate, ID_BYTES * count, messages=EXCHANGES),
        sent=exchange_seconds(machine, candidate, row_bytes * count),
        packed=count * (stored["own"][rank] + placed),
        starts=FETCH_STARTS + ASK_STARTS + ROW_STARTS,
        start=start_seconds(machine),
    )


def peer_way(
    machine: MachineModel, candidate: Candidate, placed: PlacedRows, row_bytes: int
) -> str:
    """Choose how peers' rows come, by what takes the slowest rank less."""
    found = [
        peer_reads(machine, candidate, rank, rows, row_bytes)
        for rank, rows in enumerate(placed.ranks)
    ]
    read = [each for each in found if each is not None]
    if not read:
        return "mapped"
    mapped, exchanged = max(x.mapped for x in read), max(x.exchanged for x in read)
    return "mapped" if mapped <= exchanged else "exchange"


def rows_in_transit(received: float, served: float, stored: int, handed: int) -> int:
    """Return the bytes of a GPU's buffers for rows that come by way of others, and rows it serves.

    n (8 + s) for n rows of s bytes, with the id of each; n h more for those received where they are
    handed out in another type, in h bytes.

    >>> rows_in_transit(10, 10, 400, 400), rows_in_transit(10, 0, 208, 400)
    (8160, 6160)
    """
    widened = 0 if stored == handed else handed
    return round(received * (ID_BYTES + stored + widened) + served * (ID_BYTES + stored))


def transit_parts(
    request: Request, candidate: Candidate, placed: PlacedRows
) -> list[dict[str, int]]:
    """Return the bytes of each rank's buffers for exchanged rows of peers, and rows of the disk.

    Of peers as many are served as received. Ranks that share a batch have buffers of their own.
    """
    peers, disk = ([r.shares.get(kind, 0.0) for r in placed.ranks] for kind in ("peer", "disk"))
    if not any(peers) or not _exchanges(request, candidate, placed):
        peers = [0.0] * len(peers)
    if candidate.batching != "independent" or not (any(peers) or any(disk)):
        return [{} for _ in peers]
    most, sizes = _largest_batch(request, candidate).vertices, _row_sizes(request, candidate)
    return [
        {"rows in transit": rows_in_transit(most * (near + far), most * near, *sizes)}
        for near, far in zip(peers, disk, strict=True)
    ]


def most_in_transit(request: Request, candidate: Candidate, *, disk: bool) -> int:
    """Return the most bytes that `transit_parts` counts of any placement, with rows on `disk`."""
    if candidate.batching != "independent":
        return 0
    largest = _largest_batch(request, candidate)
    peers = candidate.cache is None and max(map(len, candidate.cliques), default=1) > 1
    if peers:
        mean = largest.vertices / largest.scale
        every = RankRows(rows={"peer": mean}, working_rows={}, shares={})
        placed = PlacedRows(policy="", ranks=[every] * candidate.num_ranks, host_rows=0)
        peers = _exchanges(request, candidate, placed)
    received = largest.vertices if peers or disk else 0.0
    served = largest.vertices if peers else 0.0
    return rows_in_transit(received, served, *_row_sizes(request, candidate))


def _row_sizes(request: Request, candidate: Candidate) -> tuple[int, int]:
    """Return the bytes of a row as it is stored and as it is handed out, without padding."""
    return row_bytes(request.graph), handed_row_bytes(request, candidate, padded=False)


def _exchanges(request: Request, candidate: Candidate, placed: PlacedRows) -> bool:
    if candidate.loads_ahead:  # batches loaded ahead map rows, since training uses NCCL
        return False
    stored = row_bytes(request.graph)
    return peer_way(request.machine, candidate, placed, stored) == "exchange"


def _largest_batch(request: Request, candidate: Candidate) -> BatchTail:
    seeds = seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
    return BatchTail.of(request.profile.batch(seeds))


def add_peer_exchange(work: RankWork, times: RankTimes) -> RankTimes:
    """Price rows of peers as exchanged where that takes less than reading them in place.

    A captured step that draws its batch reads them in place: an exchange's sizes are the host's.
    """
    shapes = work.candidate.shapes
    if not work.candidate.gpus or (shapes is not None and shapes.drawn):
        return times
    reads = peer_reads(work.machine, work.candidate, work.rank, work.rows, work.row_bytes)
    if reads is None or reads.way == "mapped":
        return times
    gather, device = times.stages[Stage.GATHER], times.device
    started = reads.starts * reads.start
    least = GATHER_STARTS * reads.start
    over = "derived: messages and bytes over the links between the GPUs x rows of peers"
    changed = {
        Stage.GATHER: replace(
            gather,
            seconds=max(least, gather.seconds - reads.mapped) + reads.packed + started,
            provenance=f"{gather.provenance}; rows of peers served, exchanged and placed",
        ),
        Stage.EXCHANGE_IDS: StageTime(seconds=reads.asked, spread=gather.spread, provenance=over),
        Stage.EXCHANGE_ROWS: StageTime(seconds=reads.sent, spread=gather.spread, provenance=over),
    }
    busy = replace(
        device,
        memory=device.memory + reads.packed,
        links=max(0.0, device.links - reads.mapped),
        host=device.host + started,
    )
    return replace(times.with_stages(changed), device=busy)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Share of a step of one processing element (PE); lists run from the seeds outwards."""

    owned: list[float]
    """|S_p^l|, l = 0 .. L: vertices that the PE expands; the last is its input set."""
    asked: list[float]
    """|S~_p^{l+1}|, l = 0 .. L-1: vertices asked for, own ones included; alone: `owned[1:]`."""
    edges: list[float]
    """|E_p^l|, l = 0 .. L-1: edges drawn."""
    cooperative: bool
    entries: float = 0.0
    """Entries of the lists that a sampler reads whole; 0 where it reads chosen neighbours alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuStep:
    """Seconds of one step, each stage alone."""

    sample: float
    features: float
    exchange: float
    """Seconds of exchanging activations and gradients, which are part of the published F/B."""


def remote_share(owned: float, asked: float, ranks: int) -> float:
    """Return the share x of the vertices asked for that other PEs own, with owners by hash.

    x = (1 - 1/P) (1 - |S_p^l| / |S~_p^{l+1}|)

    Source: docs/formulas.md 5.6 [C20].

    >>> remote_share(1000.0, 6000.0, 4)
    0.625
    """
    return (1 - 1 / ranks) * (1 - owned / asked) if asked > 0 else 0.0


def gpu_batch_seconds(
    machine: MachineModel,
    candidate: Candidate,
    sizes: BatchSizes,
    *,
    row_bytes: int,
    hidden_bytes: int,
    miss_rate: float,
    topology: str = "host",
) -> GpuStep:
    """Return the seconds to draw one PE's share and to bring its rows, without compute.

    independent  T = sum_l topo(E_p^l(b)) + |S_p^L(b)| (rho c_host + (1 - rho) c_own)
    cooperative  T = sum_l [topo(E_p^l) + 8 x |S~_p^{l+1}| c_peer] + |S_p^L| (rho' c_host + ...)
                     + x |S~_p^L| d c_peer + 2 sum_{l<L-1} x |S~_p^{l+1}| h c_peer

    with |S_p^l| = |S^l(P b)| / P of its own, S~ what they ask for, x the share of it owned
    elsewhere, rho the share of rows that the PE's cache lacks (`miss_rate`), d and h the bytes of a
    stored row and of a row of activations; all PEs read.

    A sampler that decides on every neighbour reads whole lists in place of what it draws.

    Source: docs/formulas.md 5.6 [R11], [C20].
    """
    ranks = candidate.num_ranks
    launch = rate_per_rank(machine, MachineTable.GPU_KERNEL, candidate)
    ids = read_seconds(machine, candidate, NEIGHBOUR_BYTES)
    offsets = read_seconds(machine, candidate, OFFSETS_BYTES)
    stored = read_seconds(machine, candidate, row_bytes)
    lists = sum(sizes.owned[:-1])
    whole = None
    if sizes.entries > 0:
        list_bytes = max(1, round(NEIGHBOUR_BYTES * sizes.entries / lists))
        read = max(read_seconds(machine, candidate, list_bytes)[topology])
        whole = scan_seconds(sizes.entries, lists, read)
    sample = gpu_sample_seconds(
        sum(sizes.edges),
        lists,
        KERNELS_PER_HOP * len(sizes.edges),
        neighbour_seconds=max(ids[topology]),
        offsets_seconds=max(offsets[topology]),
        hash_seconds=max(ids["own"]),
        kernel_seconds=launch,
        lists_seconds=whole,
    )
    rows = sizes.owned[-1]
    features = rows * (miss_rate * max(stored["host"]) + (1 - miss_rate) * max(stored["own"]))
    features += rows * row_bytes * memory_seconds_per_byte(machine, candidate) + launch
    if not sizes.cooperative or ranks == 1:
        return GpuStep(sample=sample, features=features, exchange=0.0)
    sent = max(byte_seconds(find_routes(machine, candidate).peer).values())
    wait = EXCHANGES * (ranks - 1) * rate_per_rank(machine, MachineTable.GPU_MESSAGE, candidate)
    moved = [
        remote_share(own, asked, ranks) * asked
        for own, asked in zip(sizes.owned[:-1], sizes.asked, strict=True)
    ]
    sample += sum(ID_BYTES * rows * sent + wait for rows in moved)
    features += moved[-1] * row_bytes * sent + wait
    exchange = sum(2 * (rows * hidden_bytes * sent + wait) for rows in moved[:-1])
    return GpuStep(sample=sample, features=features, exchange=exchange)
