"""Price ranks on the cores of a host: stage times, memory and traffic."""

from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.backends.backend import (
    Backend,
    Parts,
    by_link,
    moved_rows,
    time_to_start,
    timing_of,
)
from gnnplan.planner.cost.backends.gpu_lanes import step_compute
from gnnplan.planner.cost.graph_memory import host_parts, node_parts, sampling_bytes, step_parts
from gnnplan.planner.cost.host_memory import disk_parts, gather_parts, ordered_parts
from gnnplan.planner.cost.memory import ID_BYTES, core_parts, memory_use, peer_bytes
from gnnplan.planner.cost.rank_times import DeviceTimes, RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import (
    INDEX_BYTES,
    INDPTR_BYTES,
    MachineTable,
    Rate,
    core_rates_words,
    edge_rate,
    ranks_here,
    vertex_rate,
)
from gnnplan.planner.cost.request import Request, row_bytes
from gnnplan.planner.cost.stages.all_reduce import (
    all_reduce_seconds,
    exposed_in_parts,
    gradient_bytes,
)
from gnnplan.planner.cost.stages.exchange import (
    Exchanges,
    collective_table,
    hidden_share,
    hosts_all_reduce,
    placed_exchanges,
    seconds_beside_exchange,
)
from gnnplan.planner.cost.stages.gather import (
    disk_skew,
    disk_start,
    gather_seconds,
    gather_table,
    row_rate,
)
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte
from gnnplan.planner.cost.stages.host import start_seconds
from gnnplan.planner.cost.stages.sample import sample_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import BatchProfile, LoopOverhead, ModelTiming, ProcessCost, Spread
from gnnplan.runtime.plan.schema import MemoryUse
from gnnplan.runtime.sampling.registry import is_layerwise, sampler_or_unknown
from gnnplan.runtime.stages import Stage

FLOAT_BYTES = 4
BLOCK_COPIES = 2
"""Copies of a block to a GPU: the ends of its rows, and its edges."""
NO_OVERHEAD = LoopOverhead(seeds=0.0, labels=0.0, between=0.0)


class CoresBackend(Backend):
    """Ranks as processes on the cores of one host."""

    def stage_times(self, work: RankWork) -> RankTimes:
        """Price every stage, each alone on its core."""
        exchanges, timing = _exchanges(work), work.timing
        sample, gather, reduced = _sample(work, exchanges), _gather(work, exchanges), _reduce(work)
        compute = _forward_backward(work, exchanges, gather.disk_seconds)
        sizes, jitter = work.size_variation, step_jitter(work.machine, ranks_here(work.candidate))
        slope = timing.slope_seconds(**_cores(work))
        alone = work.candidate.num_ranks == 1
        varying = sample.seconds + (gather.time.seconds if alone else gather.unwaited_seconds)
        overhead = timing.handing or NO_OVERHEAD
        return RankTimes(
            stages={
                **_loop_stages(work, overhead),
                Stage.SAMPLE: sample,
                Stage.EXCHANGE_IDS: StageTime.of(exchanges.asked),
                Stage.GATHER: gather.time,
                Stage.EXCHANGE_ROWS: StageTime.of(exchanges.sent),
                Stage.FORWARD_BACKWARD: compute,
                Stage.ALL_REDUCE: reduced.time,
            },
            compute_slope=slope,
            loader_sigma=varying * _join(sizes, jitter),
            trainer_sigma=_join(slope * sizes, compute.seconds * jitter),
            wait_sigma=(0.0 if timing.own_batches else slope * sizes) if reduced.waited else None,
            all_reduce_core_seconds=reduced.core_seconds,
            loop_overhead=overhead.between,
            gil_held=overhead.seeds + overhead.labels + overhead.between,
            interference=timing.beside,
            disk_seconds=gather.disk_seconds,
            disk_skew=gather.disk_skew,
            exchange_lead=_beside(work, MachineTable.ALL_TO_ALL_EARLY, exchanges),
        )

    def own_parts(
        self,
        request: Request,
        candidate: Candidate,
        batch: BatchProfile,
        rank: int,
        *,
        reads_peers: bool,
    ) -> Parts:
        """Return the bytes of a process, its sampler and cache, and its buffers for peers' rows."""
        del rank
        process = request.profile.process or ProcessCost(start_seconds=0.0, resident_bytes=0)
        parts = core_parts(candidate, request.graph, batch, process)
        parts["sampling"] = sampling_bytes(request, candidate, batch)
        parts |= node_parts(request, candidate) | ordered_parts(request, candidate)
        parts |= gather_parts(candidate, batch) | step_parts(request, batch)
        if reads_peers:
            parts["rows of peers"] = peer_bytes(candidate, batch, row_bytes(request.graph))
        return parts

    def memory_use(
        self, request: Request, candidate: Candidate, placed: PlacedRows, parts: list[Parts]
    ) -> dict[str, MemoryUse]:
        """Hold the ranks' parts against the host's memory, which they share."""
        read = disk_parts(request, candidate, placed)
        return memory_use(
            [own | more for own, more in zip(parts, read, strict=True)],
            host_parts(request, candidate),
            placed,
            row_bytes(request.graph),
            request.machine,
            request.budgets,
            launcher_bytes=request.launcher_bytes,
        )

    def link_bytes(
        self, request: Request, candidate: Candidate, placed: PlacedRows, exchanged: float
    ) -> dict[str, float]:
        """Return the bytes of feature rows, of the gradient's ring, and of other exchanges.

        All ranks of the ring together send 2 (P - 1) times the gradient.
        """
        moved = moved_rows(placed, row_bytes(request.graph))
        if candidate.num_ranks > 1:
            gradient = gradient_bytes(timing_of(request, candidate).num_parameters)
            moved.append(("all_reduce", 2.0 * (candidate.num_ranks - 1) * gradient))
            moved += [("peer", exchanged)] if exchanged else []
        return by_link(request.machine, moved)

    def startup_time(self, request: Request, candidate: Candidate, placed: PlacedRows) -> StageTime:
        """Price the start of processes that copy their rows within the host's memory."""
        table = request.machine.table(MachineTable.COPY)
        timing = timing_of(request, candidate)
        measured = _is_measured(timing)
        known = "measured: process start" if measured else "derived: process start"
        first = f"; the first steps then cost {timing.warmup_seconds:.2f} s more than steady ones"
        return time_to_start(
            request,
            candidate,
            placed,
            copy_bytes_per_second=table.at(readers=float(candidate.num_ranks)),
            words=f"{known}; derived: bytes over copy bandwidth{first if measured else ''}",
        )


def copied_times(work: RankWork) -> RankTimes:
    """Price a GPU's rank whose batches are drawn and gathered by a core, and copied to it.

    Rows of float32, blocks, seeds and labels cross the links once.
    """
    machine, candidate, batch, timing = work.machine, work.candidate, work.batch, work.timing
    here = replace(work, machine=machine.with_tables(dict(work.core_rates)))
    nothing = _exchanges(here)
    sample, gather = _sample(here, nothing), _gather(here, nothing).time
    launch, per_byte = start_seconds(machine), copy_seconds_per_byte(machine, candidate)[work.rank]
    step = step_compute(machine, candidate, batch, timing)
    rows = FLOAT_BYTES * work.graph.feature_dim * batch.vertices[-1].mean * per_byte
    blocks = INDEX_BYTES * sum(each.mean for each in batch.edges)
    blocks += INDPTR_BYTES * sum(each.mean for each in batch.vertices[:-1])
    blocks = (blocks + ID_BYTES * batch.vertices[0].mean) * per_byte
    started = launch * (1 + BLOCK_COPIES * len(batch.edges))
    over, by_roofline = "derived: copies over the machine's links", "derived: the model's roofline"
    seconds = {
        Stage.COPY: (launch + rows, over),
        Stage.BATCH: (started + blocks + timing.batch_seconds, over),
        Stage.FORWARD_BACKWARD: (step.forward_backward, by_roofline),
        Stage.OPTIMIZER: (step.optimizer, by_roofline),
    }
    spread = timing.forward_backward.spread
    derived = {
        stage: StageTime(seconds=each, spread=spread, provenance=words)
        for stage, (each, words) in seconds.items()
    }
    return RankTimes(
        stages={Stage.SAMPLE: sample, Stage.GATHER: gather, **derived},
        device=DeviceTimes(
            links=rows + blocks, host=launch + started + step.host, compute=step.device
        ),
        in_turn=True,
    )


def drawn_times(work: RankWork, gathered: RankTimes) -> RankTimes:
    """Price a GPU's rank whose batches a core draws, and whose rows it gathers itself.

    Blocks, ids and labels cross the links once; `gathered` are the times without drawing.
    """
    copied = copied_times(replace(work, rows=RankRows(rows={}, working_rows={}, shares={})))
    ids = ID_BYTES * work.batch.vertices[-1].mean
    ids *= copy_seconds_per_byte(work.machine, work.candidate)[work.rank]
    moved, filled = gathered.stages[Stage.COPY], copied.stages[Stage.BATCH]
    stages = {
        Stage.SAMPLE: copied.stages[Stage.SAMPLE],
        Stage.COPY: replace(moved, seconds=moved.seconds + ids),
        Stage.BATCH: filled,
    }
    more = ids + filled.seconds - gathered.seconds(Stage.BATCH)
    device = replace(gathered.device, links=gathered.device.links + more)
    return replace(gathered.with_stages(stages), device=device, in_turn=True)


def _cores(work: RankWork) -> dict[str, int]:
    """Return the ranks that compute at once on a host, and the threads of each."""
    return {"ranks": ranks_here(work.candidate), "threads": work.candidate.threads.compute}


def _loop_stages(work: RankWork, overhead: LoopOverhead) -> dict[Stage, StageTime]:
    """Return the stages that are timed with the model: seeds, batch and optimizer."""
    timing, measured = work.timing, _is_measured(work.timing)
    return {
        Stage.SEEDS: StageTime(
            seconds=overhead.seeds,
            provenance="measured: the training nodes' own shares, among the model's steps"
            if measured
            else "derived: seconds between stages of such hardware",
        ),
        Stage.BATCH: StageTime(
            seconds=timing.batch_seconds + overhead.labels,
            provenance="measured: edge weights of synthetic batches, labels of the graph's own"
            if measured
            else "derived: seconds between stages of such hardware",
        ),
        Stage.OPTIMIZER: StageTime(
            seconds=timing.optimizer.at(**_cores(work)),
            spread=timing.optimizer.spread,
            provenance="measured: the optimizer on this model"
            if measured
            else f"derived: operations and bytes of an update at {core_rates_words(work.machine)}",
        ),
    }


def _exchanges(work: RankWork) -> Exchanges:
    """Return the exchanges for the placement's rows and for a shared batch."""
    found = placed_exchanges(work.machine, work.candidate, work.rows, work.row_bytes)
    return found if work.exchanges is None else found.with_more(work.exchanges)


def _beside(work: RankWork, name: MachineTable, exchanges: Exchanges) -> float:
    rows, width = exchanges.rows, work.row_bytes
    return seconds_beside_exchange(work.machine, work.candidate, name, rows, width)


def _sample(work: RankWork, exchanges: Exchanges) -> StageTime:
    """Price sampling as timed on this graph, else by the machine's rates."""
    edge = edge_rate(work.machine, work.graph, work.candidate)
    vertex = vertex_rate(work.machine, work.graph, work.candidate)
    spread, timing = max(edge.spread, vertex.spread), work.timing
    if timing.sample_seconds > 0:
        crowding = _crowding(work)
        seconds = timing.sample_seconds * crowding
        # The rates' own uncertainty enters where they are used, for several samplers of a rank.
        spread = _join(timing.sample_spread, spread if crowding != 1.0 else 0.0)
        words = (
            f"measured: {work.sampler} sampling of this graph by one thread of each rank "
            "x the rates' slowdown beside others"
        )
    else:
        seconds = _sample_seconds(_with_lists(work), work.candidate)
        counted = "profiled" if _is_measured(timing) else "expected"
        words = f"{edge.provenance}, {vertex.provenance} x {counted} edges and vertices"
        if not sampler_or_unknown(work.sampler).is_probed:
            words = (
                f"derived: neighbour sampling's rates, not calibrated for {work.sampler}; {words}"
            )
    seconds += exchanges.around_sample
    return StageTime(seconds=seconds, spread=spread, provenance=words)


def _sample_seconds(work: RankWork, candidate: Candidate) -> float:
    return sample_seconds(
        sum(e.mean for e in work.batch.edges),
        work.batch.vertices[-1].mean,
        edge_rate(work.machine, work.graph, candidate).seconds,
        vertex_rate(work.machine, work.graph, candidate).seconds,
    )


def _with_lists(work: RankWork) -> RankWork:
    """Count all neighbours in the lists of a batch whose layers are drawn from them all."""
    if work.batch.list_entries <= 0 or not is_layerwise(work.sampler):
        return work
    read = Spread.expected(work.batch.list_entries)
    return replace(work, batch=replace(work.batch, edges=[read]))


def _crowding(work: RankWork) -> float:
    """Return the slowdown of a rank's several samplers by the rates; one of each rank was timed."""
    threads = work.candidate.threads
    alone = replace(threads, sample=min(1, threads.sample))
    one = _sample_seconds(work, replace(work.candidate, threads=alone))
    return _sample_seconds(work, work.candidate) / one if one > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    time: StageTime
    unwaited_seconds: float
    """Seconds without the reads that a host's ranks end together."""
    disk_seconds: float
    disk_skew: float


def _gather(work: RankWork, exchanges: Exchanges) -> _Gather:
    rows, candidate, threads = work.rows, work.candidate, work.candidate.threads.gather
    rates = {kind: _on_this_graph(work, kind) for kind in sorted(rows.rows) if rows.rows[kind] > 0}
    start = disk_start(work.machine, rows, work.row_bytes, work.timing.disk_start_seconds)
    seconds = {kind: rate.seconds for kind, rate in rates.items()}
    whole = gather_seconds(rows.rows, seconds, threads) + start + exchanges.around_gather
    disk, skew = start, 0.0
    if rows.rows.get("disk", 0.0) > 0:
        disk += rows.rows["disk"] * seconds["disk"] / threads
        skew = disk * disk_skew(work.machine, rows, work.row_bytes, candidate)
    # Ranks leave an exchange together, and the last of those that read from one disk has its rows
    # when all requests are served, whoever's they were.
    apart = {k: n for k, n in rows.rows.items() if k != "disk" or ranks_here(candidate) == 1}
    return _Gather(
        time=StageTime(
            seconds=whole,
            spread=max((rate.spread for rate in rates.values()), default=0.0),
            provenance="; ".join(f"{kind}: {rate.provenance}" for kind, rate in rates.items())
            or "derived: no feature rows are read",
        ),
        unwaited_seconds=gather_seconds(apart, seconds, threads),
        disk_seconds=disk,
        disk_skew=skew,
    )


def _on_this_graph(work: RankWork, kind: str) -> Rate:
    """Look up a source's rate, scaled by what gathering this graph's rows took."""
    rate = row_rate(work.machine, kind, work.rows, work.row_bytes, work.candidate)
    factor = work.timing.gather_factors.get(gather_table(kind), 1.0)
    if factor == 1.0:
        return rate
    words = f"{rate.provenance} x {factor:.2f}, measured with this graph's batches"
    return replace(rate, seconds=rate.seconds * factor, provenance=words)


def _forward_backward(work: RankWork, exchanges: Exchanges, disk_seconds: float) -> StageTime:
    """Price the model's pass, whose caches are cold after exchanges or a wait."""
    waited = disk_seconds + exchanges.asked.seconds + exchanges.sent.seconds
    exchanged = _beside(work, MachineTable.ALL_TO_ALL_AFTER, exchanges)
    doubt = " (uncertain)" if work.timing.forward_backward.uncertain else ""
    words = (
        f"measured{doubt}: the model on this graph's own batches (links: on blocks of the profiled "
        "sizes), each step after its sampling and gathering"
    )
    if not _is_measured(work.timing):
        rates = core_rates_words(work.machine)
        words = f"derived: operations and bytes of expected batches at {rates}"
    return StageTime(
        seconds=work.timing.compute_seconds(**_cores(work))
        + max(exchanged, _cold_cache_seconds(work, waited)),
        spread=work.timing.forward_backward.spread,
        provenance=words,
    )


def _is_measured(timing: ModelTiming) -> bool:
    return timing.forward_backward.provenance == "measured"


def _cold_cache_seconds(work: RankWork, wait_seconds: float) -> float:
    """Price the step after a wait for rows, in proportion to the wait up to the measured one.

    0 with loader threads, which wait instead, and where it was not measured.
    """
    found = work.timing.after_wait
    if found is None or work.candidate.threads.sample > 0 or found.wait_seconds <= 0.0:
        return 0.0
    return found.seconds * min(1.0, wait_seconds / found.wait_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reduced:
    time: StageTime
    core_seconds: float = 0.0
    """Core-seconds of one rank."""
    waited: bool = False
    """Whether the wait of equal batches for each other was measured with it."""


def _reduce(work: RankWork) -> _Reduced:
    if work.candidate.num_ranks == 1:
        words = "derived: one rank has nothing to sum"
        return _Reduced(time=StageTime(seconds=0.0, provenance=words))
    return _reduce_over_hosts(work) if work.candidate.hosts > 1 else _reduce_on_host(work)


def _reduce_on_host(work: RankWork) -> _Reduced:
    """Price the all-reduce on one host, as timed with this model or by the machine's table."""
    machine, candidate, timing = work.machine, work.candidate, work.timing
    ranks, size = candidate.num_ranks, float(gradient_bytes(timing.num_parameters))
    name = collective_table(machine, MachineTable.ALL_REDUCE, candidate)
    table, own = machine.table(name), timing.all_reduce
    alone = seconds = all_reduce_seconds(table, size, ranks)
    spread = table.spread
    words = f"{table.provenance}: table {name} at the gradient's bytes + expected straggler"
    if own is not None:
        seconds, spread = own.at(**_cores(work)), own.spread
        batches = "on each rank's own batches" if timing.own_batches else "+ straggler of batches"
        words = f"{own.provenance}: this model's gradients, in its steps {batches}"
    if candidate.threads.comm:
        slower = seconds / alone
        seconds = exposed_in_parts(
            lambda n: slower * all_reduce_seconds(table, n, ranks),
            size,
            timing.compute_seconds(**_cores(work)),
            hidden_share(machine, candidate),
        )
    busy = machine.tables.get(MachineTable.ALL_REDUCE_CORE_SECONDS)
    return _Reduced(
        time=StageTime(seconds=seconds, spread=spread, provenance=words),
        # Where it was not measured, a rank's thread is taken to be busy all the while.
        core_seconds=seconds if busy is None else all_reduce_seconds(busy, size, ranks) / ranks,
        waited=own is not None,
    )


def _reduce_over_hosts(work: RankWork) -> _Reduced:
    """Price the all-reduce over the hosts' cards and inside each host; its threads are busy."""
    size = float(gradient_bytes(work.timing.num_parameters))
    rate = hosts_all_reduce(work.machine, work.candidate, size)
    busy = work.machine.tables.get(MachineTable.ALL_REDUCE_CORE_SECONDS)
    core = rate.seconds if busy is None else busy.at(bytes=size, ranks=2.0) / 2.0
    words = f"{rate.provenance}, the cards shared by a host's ranks + expected straggler"
    return _Reduced(
        time=StageTime.of(replace(rate, provenance=words)),
        core_seconds=min(core, rate.seconds),
    )


def step_jitter(machine: MachineModel, ranks: int) -> float:
    """Return the relative deviation of equal work from step to step, of ranks side by side.

    One rank has the machine's noise. Where ranks were not measured together, so have they.
    """
    table = machine.tables.get(MachineTable.STEP_JITTER)
    return machine.noise if table is None or ranks == 1 else table.at(ranks=ranks)


def _join(a: float, b: float) -> float:
    return (a * a + b * b) ** 0.5
