"""Price cooperative batches: what one rank of P computes, reads and sends for a shared batch.

A hash deals the vertices of a global batch, so a rank has 1/P of each hop's. By concavity of f(B) =
E|S(B)| that is at most what its own batch of B/P seeds would have (formulas 5.7). The price are
exchanges: ids of every hop to their owners, feature rows back, and hidden rows there and back
between two layers. Where parts of the graph deal them, all of that is counted on drawn batches: the
mean rank computes, the one with most remote rows is waited for in exchanges (DEC-141).

Source: docs/formulas.md 5.6 with [C20]; messages by formulas 8.4 [A4].
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.backends.backend import Parts, Wrapper
from gnnplan.planner.cost.backends.cores import step_jitter
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import (
    MachineTable,
    Rate,
    lookup,
    ranks_here,
    readers,
)
from gnnplan.planner.cost.request import (
    ITEM_BYTES,
    Part,
    Request,
    part_from,
    part_of,
    part_profile,
    row_bytes,
)
from gnnplan.planner.cost.stages.exchange import (
    Exchanges,
    all_to_all,
    hidden_rows_rate,
    ids_rate,
    seconds_beside_exchange,
    with_own_share,
)
from gnnplan.planner.cost.stages.exchange_gpu import EXCHANGES, exchange_seconds
from gnnplan.planner.cost.stages.gather_gpu import (
    memory_seconds_per_byte,
    read_seconds,
)
from gnnplan.planner.cost.stages.host import hidden_starts, loader_starts, start_seconds
from gnnplan.planner.cost.stages.sample import (
    HASH_READS,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime.stages import Stage

ID_BYTES = 8
FLOAT_BYTES = 4
SENT_ROOM = 1.25
"""Rows of the buffer of rows to send over those sent."""
HASHED = 8
"""Words of a GPU's hash tables per numbered vertex."""


def id_bytes(part: Part, num_ranks: int) -> float:
    """Return the bytes of ids that a rank sends: P - 1 counts and the ids, after every hop."""
    return sum(ID_BYTES * (num_ranks - 1 + ids) for ids in part.asked)


def feature_bytes(part: Part, row_bytes: int) -> float:
    """Return the bytes of feature rows that a rank sends, and on average receives."""
    return part.remote[-1] * row_bytes


def hidden_bytes(part: Part, hidden: int) -> float:
    """Return the bytes of hidden rows and gradients that a rank sends: 2 sum_(l<L) rows h."""
    return 2 * sum(part.remote[:-1]) * hidden * FLOAT_BYTES


def exchange_parts(part: Part, row_bytes: int, num_nodes: int) -> dict[str, int]:
    """Return the bytes that a rank needs beside an independent one's.

    Every hop's sampler has a workspace, of which the rank's sampling counts one table; own and
    remote vertices are numbered in two more. Ids and places of a hop's rows are stored once more,
    and rows to send, of `row_bytes` in float32, in a buffer with a quarter to spare.
    """
    from gnnplan.runtime.sampling.workspace import workspace_bytes  # on use: with numba

    ids = sum(3 * ID_BYTES * (own + n) for own, n in zip(part.own[1:], part.remote, strict=True))
    asked = max(part.asked)
    own = max(asked, *(n - m for n, m in zip(part.drawn, part.asked, strict=True)))
    room = [(own, part.own[-1] + asked), (asked, max(part.remote) + asked)]
    room += [(0.0, known) for known in part.own[1:-1]]
    tables = sum(
        workspace_bytes(
            num_nodes, ID_BYTES, rows=0, edges=round(new), nodes=round(min(num_nodes, known))
        )
        for new, known in room
    )
    return {"exchange": round(tables + ids + SENT_ROOM * part.remote[-1] * row_bytes)}


def gpu_exchange_parts(part: Part, row_bytes: int) -> dict[str, int]:
    """Return the bytes that a rank on a GPU needs beside an independent one's.

    Own and remote vertices are numbered by hash tables of two words, half full at most and twice
    while they grow. Ids, places and rows in transit are as on cores.
    """
    ids = sum(3 * ID_BYTES * (own + n) for own, n in zip(part.own[1:], part.remote, strict=True))
    tables = HASHED * ID_BYTES * (part.own[-1] + sum(part.drawn))
    return {"exchange": round(tables + ids + 2 * part.remote[-1] * row_bytes)}


class Cooperative(Wrapper):
    """Ranks that sample one batch together, each its own vertices."""

    def batch_of(self, request: Request, candidate: Candidate) -> BatchProfile:
        """Return the rank's part of the global batch."""
        whole = request.profile.batch(request.workload.batch_size)
        return part_profile(whole, part_for(request, candidate))

    def times(self, request: Request, work: RankWork) -> RankTimes:
        """Price a rank's part of the batch, with its exchanges."""
        part, hidden = part_for(request, work.candidate).busiest, request.workload.hidden
        if work.candidate.gpus:
            size = hidden * ITEM_BYTES.get(request.workload.precision, FLOAT_BYTES)
            return gpu_cooperative_times(self.inner.times(request, work), work, part, size)
        return cooperative_times(lambda each: self.inner.times(request, each), work, part, hidden)

    def own_parts(
        self,
        request: Request,
        candidate: Candidate,
        batch: BatchProfile,
        rank: int,
        *,
        reads_peers: bool,
    ) -> Parts:
        """Return a rank's bytes with its tables of vertices and the rows being sent."""
        parts, graph = (
            super().own_parts(request, candidate, batch, rank, reads_peers=reads_peers),
            request.graph,
        )
        part, size = part_for(request, candidate).busiest, row_bytes(graph)
        if candidate.gpus:
            return parts | gpu_exchange_parts(part, size)
        return parts | exchange_parts(part, FLOAT_BYTES * graph.feature_dim, graph.num_nodes)

    def exchanged_bytes(self, request: Request, candidate: Candidate) -> float:
        """Return the bytes of ids, feature rows and hidden rows that ranks exchange per step."""
        ranks, part = candidate.num_ranks, part_for(request, candidate)
        rows = feature_bytes(part, row_bytes(request.graph))
        rows += hidden_bytes(part, request.workload.hidden)
        return ranks * (id_bytes(part, ranks) + rows)


def owner_words(request: Request, candidate: Candidate) -> dict[str, str]:
    """Say what parts of the graph deal to ranks, beside what the hash would; else nothing."""
    owned, profile = request.owned, request.profile
    if candidate.owner != "partition" or owned is None or profile.shared is None:
        return {}
    whole, ranks = profile.batch(request.workload.batch_size), candidate.num_ranks
    hashed = part_of(whole, profile.shared, ranks, every_hop=request.every_hop)
    return {
        "owners": (
            f"owners by parts ({candidate.partition}), counted on drawn batches: a rank asks "
            f"others for {owned.remote[-1]:,.0f} rows a batch, the busiest for "
            f"{owned.remote[-1] * owned.busiest:,.0f}, by hash {hashed.remote[-1]:,.0f}; the "
            f"fullest owns {owned.fullest:.2f} of the mean"
        )
    }


def part_for(request: Request, candidate: Candidate) -> Part:
    """Return one rank's part of the request's global batch.

    Raises:
        KeyError: it was not profiled.
    """
    profile, owned = request.profile, request.owned
    if candidate.owner == "partition" and owned is not None:
        return part_from(
            own=owned.own, edges=owned.edges, remote=owned.remote, touched=owned.touched,
            every_hop=request.every_hop, counted=owned,
        )  # fmt: skip
    if profile.shared is None:
        raise KeyError(candidate.num_ranks)
    whole = profile.batch(request.workload.batch_size)
    return part_of(whole, profile.shared, candidate.num_ranks, every_hop=request.every_hop)


def cooperative_times(
    price: Callable[[RankWork], RankTimes], work: RankWork, part: Part, hidden: int
) -> RankTimes:
    """Price every stage of one rank whose work has a batch of `part_profile`.

    `price` returns the times of a rank's work on its processor.
    """
    machine, candidate = work.machine, work.candidate
    ids, sent = _asked_rates(work, part), _sent_rate(work, part)
    base = price(
        replace(
            work, batch=_relabelled(work.batch, part), exchanges=_exchanges(work, part, ids, sent)
        )
    )
    packed = lookup(
        machine,
        MachineTable.GATHER,
        rows=max(1.0, part.remote[-1]),
        row_bytes=work.row_bytes,
        working_set_bytes=max(1.0, part.own[-1]) * work.row_bytes,
        readers=readers(candidate),
    )
    sample, gather = base.stages[Stage.SAMPLE], base.stages[Stage.GATHER]
    compute = base.stages[Stage.FORWARD_BACKWARD]
    gathered = gather.seconds + part.remote[-1] * packed.seconds
    jitter = step_jitter(machine, ranks_here(candidate))
    # What varies from batch to batch all ranks have in common: it is the hash that parts them.
    relative = (_imbalance(part, candidate.num_ranks) ** 2 + jitter**2) ** 0.5
    changed = replace(
        base,
        loader_sigma=(sample.seconds + gathered) * relative,
        trainer_sigma=compute.seconds * relative,
    )
    sizes = [n * hidden * FLOAT_BYTES for n in part.remote[:-1]]
    return changed.with_stages(
        {
            Stage.SAMPLE: replace(
                sample, provenance=f"{sample.provenance} of a share of the global batch"
            ),
            Stage.EXCHANGE_IDS: replace(
                base.stages[Stage.EXCHANGE_IDS],
                provenance=f"{ids[0].provenance} x ids of every hop",
            ),
            Stage.GATHER: replace(
                gather, seconds=gathered, spread=max(gather.spread, packed.spread)
            ),
            Stage.EXCHANGE_ROWS: replace(
                base.stages[Stage.EXCHANGE_ROWS],
                provenance=f"{sent.provenance} x rows that other ranks own",
            ),
            Stage.FORWARD_BACKWARD: replace(
                compute,
                seconds=compute.seconds + _copy_seconds(machine, candidate, part, hidden),
                provenance="measured: the model on synthetic blocks of a share of the global "
                "batch; derived: copies of the rows that are exchanged",
            ),
            Stage.HALO_EXCHANGE: StageTime(
                seconds=_halo_seconds(machine, candidate, sizes),
                spread=sent.spread,
                provenance=f"{sent.provenance} x hidden rows, there and back",
            ),
        }
    )


def gpu_cooperative_times(
    base: RankTimes, work: RankWork, part: Part, hidden_bytes: int
) -> RankTimes:
    """Add to the times of a rank's part, as a batch of its own, what a shared batch takes on a GPU.

    Exchanges follow each other on the training thread. Between them a hop's vertices are numbered,
    rows are picked and put in place, and rows of `hidden_bytes` are copied around each layer.
    """
    machine, candidate = work.machine, work.candidate
    near = memory_seconds_per_byte(machine, candidate)
    access = max(read_seconds(machine, candidate, ID_BYTES)["own"])
    inner = part.remote[:-1]
    starts = loader_starts(
        candidate, len(part.edges), sampler=work.sampler, every_hop=work.every_hop
    )
    started = {
        Stage.SAMPLE: starts.share * start_seconds(machine),
        Stage.GATHER: starts.pack * start_seconds(machine),
        Stage.FORWARD_BACKWARD: hidden_starts(len(inner)) * start_seconds(machine),
    }
    numbered = sum(
        e + 2 * d + a for e, d, a in zip(part.expanded, part.drawn, part.asked, strict=True)
    )
    ids = sum(
        exchange_seconds(machine, candidate, ID_BYTES * n, messages=EXCHANGES) for n in part.asked
    )
    rows = exchange_seconds(machine, candidate, feature_bytes(part, work.row_bytes))
    halo = sum(2 * exchange_seconds(machine, candidate, n * hidden_bytes) for n in inner)
    copied = sum(own + n for own, n in zip(part.own[1:-1], inner, strict=True)) * hidden_bytes
    added = {
        Stage.SAMPLE: HASH_READS * numbered * access,
        Stage.GATHER: 4 * part.remote[-1] * work.row_bytes * near,
        Stage.FORWARD_BACKWARD: 4 * copied * near,
    }
    words = {
        Stage.SAMPLE: "of a share of the global batch; vertices numbered at their owners",
        Stage.GATHER: "own rows once; rows that others need picked and put in place",
        Stage.FORWARD_BACKWARD: "of a share of the global batch; rows copied around exchanges",
    }
    changed = {
        stage: replace(
            base.stages[stage],
            seconds=base.stages[stage].seconds + started[stage] + more,
            provenance=f"{base.stages[stage].provenance}; {words[stage]}",
        )
        for stage, more in added.items()
    }
    over = "derived: messages and bytes over the links between the GPUs"
    changed |= {
        Stage.EXCHANGE_IDS: StageTime(seconds=ids, provenance=f"{over} x ids of every hop"),
        Stage.EXCHANGE_ROWS: StageTime(
            seconds=rows, provenance=f"{over} x rows that other ranks own"
        ),
        Stage.HALO_EXCHANGE: StageTime(
            seconds=halo, provenance=f"{over} x hidden rows, there and back"
        ),
    }
    relative = _imbalance(part, candidate.num_ranks)
    found = base.with_stages(changed)
    return replace(
        found,
        device=replace(base.device, host=base.device.host + sum(started.values())),
        loader_sigma=found.loader * relative,
        trainer_sigma=found.seconds(Stage.FORWARD_BACKWARD) * relative,
    )


def _relabelled(batch: BatchProfile, part: Part) -> BatchProfile:
    """Return the batch with the number of vertices that are relabelled as its input vertices.

    A hop numbers what it expands and draws, then its own and remote vertices, then those asked.
    """
    numbered = sum(
        e + 2 * d + a for e, d, a in zip(part.expanded, part.drawn, part.asked, strict=True)
    )
    return replace(
        batch, vertices=[*batch.vertices[:-1], replace(batch.vertices[-1], mean=numbered)]
    )


def _asked_rates(work: RankWork, part: Part) -> list[Rate]:
    return [ids_rate(work.machine, work.candidate, n) for n in part.asked]


def _sent_rate(work: RankWork, part: Part) -> Rate:
    size = with_own_share(work.candidate, feature_bytes(part, work.row_bytes))
    return all_to_all(work.machine, work.candidate, size)


def _exchanges(work: RankWork, part: Part, ids: Sequence[Rate], sent: Rate) -> Exchanges:
    machine, candidate, rows = work.machine, work.candidate, part.remote[-1]
    around_ids = MachineTable.ALL_TO_ALL_AROUND_IDS
    return Exchanges(
        asked=replace(ids[0], seconds=sum(r.seconds for r in ids)),
        sent=sent,
        rows=rows,
        around_sample=sum(
            seconds_beside_exchange(machine, candidate, around_ids, n) for n in part.asked
        ),
        around_gather=seconds_beside_exchange(
            machine, candidate, MachineTable.ALL_TO_ALL_AROUND_ROWS, rows, work.row_bytes
        ),
    )


def _halo_seconds(
    machine: MachineModel, candidate: Candidate, sent_bytes: Sequence[float]
) -> float:
    """Return the seconds of exchanging hidden rows and gradients, without waits for slower ranks.

    `sent_bytes` are those of each hop's block, the outermost last. Its rows, the first layer's,
    follow the longest stretch in which ranks do not meet; all others follow a short one.
    """
    meeting, total = _meeting_seconds(machine, candidate), 0.0
    for hop, sent in enumerate(sent_bytes, 1):
        size = with_own_share(candidate, sent)
        measured = hidden_rows_rate(machine, candidate, size) if hop == len(sent_bytes) else None
        if measured is None:
            total += 2 * (all_to_all(machine, candidate, size).seconds + meeting)
        else:
            total += measured.seconds
    return total


def _meeting_seconds(machine: MachineModel, candidate: Candidate) -> float:
    """Return the seconds that ranks wait for each other after compute."""
    met = ids_rate(machine, candidate, 0.0).seconds
    return max(0.0, met - 2 * all_to_all(machine, candidate, 0.0).seconds)


def _copy_seconds(machine: MachineModel, candidate: Candidate, part: Part, hidden: int) -> float:
    """Return the seconds of copies around exchanges of hidden rows: 2 sum_(l<L) (own + sent) rows.

    Own rows go into the block and back, sent ones out; each is read and written.
    """
    rows = sum(own + n for own, n in zip(part.own[1:-1], part.remote[:-1], strict=True))
    rate = machine.table(MachineTable.COPY).at(readers=float(ranks_here(candidate)))
    return 2 * rows * hidden * FLOAT_BYTES / rate


def _imbalance(part: Part, num_ranks: int) -> float:
    """Return the relative standard deviation of a rank's share of the inputs."""
    if part.counted is not None:
        return part.counted.deviation
    return ((1 - 1 / num_ranks) / part.own[-1]) ** 0.5 if part.own[-1] > 0 else 0.0
