"""Seconds of each stage of one rank for one batch, before ranks and threads meet."""

from dataclasses import dataclass, field, replace

from planner.candidate import Candidate, RankRows
from planner.cost.rates import Rate, edge_rate, ranks_here, vertex_rate
from planner.cost.stages.all_reduce import all_reduce_seconds, exposed_in_parts, gradient_bytes
from planner.cost.stages.compute import compute_seconds, seconds_per_scale
from planner.cost.stages.exchange import (
    Exchanges,
    after_seconds,
    collective_table,
    early_seconds,
    hidden_share,
    hosts_all_reduce,
    placed_exchanges,
)
from planner.cost.stages.gather import (
    disk_apart,
    disk_start,
    gather_seconds,
    gather_table,
    row_rate,
)
from planner.cost.stages.sample import sample_seconds
from planner.machine.model import MachineModel
from planner.workload import BatchProfile, Interference, LoopOverhead, ModelTiming
from runtime.plan.schema import GraphRef


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSeconds:
    """One rank's stage seconds for a mean batch, each alone on its core."""

    sample: float
    gather: float
    exchange_ids: float
    exchange_rows: float
    batch: float
    """Adding edge weights and labels."""
    forward_backward: float
    all_reduce: float
    """The collective itself, without waiting for the slowest rank."""
    all_reduce_core: float
    """Core-seconds it takes on this rank."""
    optimizer: float
    loader_sigma: float
    """Standard deviation over batches of sample and gather together; of several ranks, of what one
    may do longer than the others."""
    trainer_sigma: float
    """Standard deviation over batches of forward_backward."""
    spreads: dict[str, float]
    """Relative half-width of each stage's rates."""
    provenance: dict[str, str]
    seeds: float = 0.0
    """Choosing this rank's share of the global batch."""
    between: float = 0.0
    """Of a step, on the training thread, in no stage of its own."""
    locked: float = 0.0
    """Of making a batch: the interpreter's lock is held, which a loader takes from training."""
    copy: float = 0.0
    """From the host to the device; nothing where ranks compute on cores."""
    halo_exchange: float = 0.0
    """Hidden rows and their gradients, where ranks share a batch; on the training thread."""
    on_gpu: float = 0.0
    """Of the loader's stages: seconds that a GPU's own memory is busy."""
    on_links: float = 0.0
    """Of the loader's stages: seconds that links from other memories to a GPU are busy."""
    on_host: float = 0.0
    """Of all stages: seconds in which threads of this process start kernels, one at a time."""
    computing: float | None = None
    """Of forward_backward and optimizer: seconds that a GPU is busy; None: all of them."""
    beside: dict[str, Interference] = field(default_factory=dict[str, Interference])
    """How a loader thread and the model slow each other down, by the thread's work; what was not
    measured is slowed down by the machine's rates of a gather."""
    wait_sigma: float | None = None
    """Of `trainer_sigma`, what is not in `all_reduce` already: the wait for each other that was
    measured with it is not expected a second time. None: all of it."""
    disk: float = 0.0
    """Of `gather`: seconds in which reads of a disk are in flight."""
    early: float = 0.0
    """How much before the last rank this one leaves the exchange of rows; it waits for it later."""
    apart: float = 0.0
    """Of `disk`: how much before the last rank that reads from it this one has its rows."""

    @property
    def loader(self) -> float:
        """Seconds of all loader stages of one batch."""
        exchange = self.exchange_ids + self.exchange_rows
        return self.seeds + self.sample + self.gather + exchange + self.copy + self.batch


def rank_seconds(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    timing: ModelTiming,
    machine: MachineModel,
    rows: RankRows,
    row_bytes: int,
    *,
    shared: Exchanges | None = None,
    sampler: str = "neighbor",
) -> RankSeconds:
    """Price every stage of one rank.

    Args:
        candidate: ranks, threads, prefetch.
        graph: sizes of the dataset.
        batch: profiled batches of this rank's share of the global batch.
        timing: the model's measured seconds for those shapes.
        machine: measured rates.
        rows: what the placement leaves this rank to read.
        row_bytes: bytes of a row as it is stored.
        shared: exchanges of a batch that ranks share, beside those for the rows.
        sampler: name; the rates are measured for neighbour sampling, and said to be borrowed
            for any other.

    Raises:
        MachineError: the machine was not measured for something the candidate needs.
    """
    edge, vertex = edge_rate(machine, graph, candidate), vertex_rate(machine, graph, candidate)
    edges, vertices = sum(e.mean for e in batch.edges), batch.vertices[-1].mean
    sample = sample_seconds(edges, vertices, edge.seconds, vertex.seconds)
    sample_spread = max(edge.spread, vertex.spread)
    if timing.sample_seconds > 0:
        crowding = _crowding(machine, graph, candidate, batch)
        sample = timing.sample_seconds * crowding
        # The rates' own uncertainty enters where they are used, for several samplers of a rank.
        borrowed = sample_spread if crowding != 1.0 else 0.0
        sample_spread = _join(timing.sample_spread, borrowed)
    by_source = {
        k: _on_this_graph(row_rate(machine, k, rows, row_bytes, candidate), k, timing)
        for k in sorted(rows.rows)
        if rows.rows[k] > 0
    }
    gather = gather_seconds(
        {k: rows.rows[k] for k in by_source},
        {k: r.seconds for k, r in by_source.items()},
        candidate.threads.gather,
    )
    disk = rows.rows.get("disk", 0.0)
    start = disk_start(machine, rows, row_bytes, timing.disk_start_seconds)
    gather += start
    exchanges = placed_exchanges(machine, candidate, rows, row_bytes)
    if shared is not None:
        exchanges = exchanges.with_more(shared)
    asked, sent = exchanges.asked, exchanges.sent
    sample, gather = sample + exchanges.around_sample, gather + exchanges.around_gather
    loader = sample + gather + asked.seconds + sent.seconds
    ranks, threads = ranks_here(candidate), candidate.threads.compute
    early = early_seconds(machine, candidate, exchanges.rows, row_bytes)
    compute = compute_seconds(timing, ranks=ranks, threads=threads)
    varying = loader
    if candidate.num_ranks > 1:
        # Ranks leave an exchange together, and the last of those that read from one disk has its
        # rows when all requests are served, whoever's they were.
        waited_for = {"disk"} if ranks > 1 else set[str]()
        alone = {k: r.seconds for k, r in by_source.items() if k not in waited_for}
        varying = sample + gather_seconds(
            {k: rows.rows[k] for k in alone}, alone, candidate.threads.gather
        )
    from_disk = start
    if disk > 0:
        from_disk += disk * by_source["disk"].seconds / candidate.threads.gather
    # Either leaves caches and cores cold, and they are not colder after both.
    compute += max(
        after_seconds(machine, candidate, exchanges.rows, row_bytes),
        _after_wait(timing, candidate, from_disk + asked.seconds + sent.seconds),
    )
    variation = _variation(batch)
    slope = seconds_per_scale(timing, ranks=ranks, threads=threads)
    reduced = _all_reduce(machine, timing, candidate)
    handing = timing.handing or LoopOverhead(seeds=0.0, labels=0.0, between=0.0)
    return RankSeconds(
        seeds=handing.seeds,
        between=handing.between,
        locked=handing.seeds + handing.labels + handing.between,
        sample=sample,
        gather=gather,
        exchange_ids=asked.seconds,
        exchange_rows=sent.seconds,
        batch=timing.batch_seconds + handing.labels,
        forward_backward=compute,
        all_reduce=reduced.seconds,
        all_reduce_core=reduced.core_seconds,
        optimizer=timing.optimizer.at(ranks=ranks, threads=threads),
        loader_sigma=varying * _join(variation, step_jitter(machine, ranks)),
        trainer_sigma=_join(slope * variation, compute * step_jitter(machine, ranks)),
        wait_sigma=(0.0 if timing.own_batches else slope * variation) if reduced.waited else None,
        beside=timing.beside,
        disk=from_disk,
        early=early,
        apart=from_disk * disk_apart(machine, rows, row_bytes, candidate) if disk > 0 else 0.0,
        spreads={
            "sample": sample_spread,
            "gather": max((r.spread for r in by_source.values()), default=0.0),
            "exchange_ids": asked.spread,
            "exchange_rows": sent.spread,
            "forward_backward": timing.forward_backward.spread,
            "all_reduce": reduced.spread,
            "optimizer": timing.optimizer.spread,
        },
        provenance={
            "sample": _sample_words(edge, vertex, sampler, timed=timing.sample_seconds > 0),
            "gather": _gather_words(by_source),
            "exchange_ids": asked.provenance,
            "exchange_rows": sent.provenance,
            "seeds": "measured: the training nodes' own shares, among the model's steps",
            "batch": "measured: edge weights of synthetic batches, labels of the graph's own",
            "forward_backward": "measured: the model on this graph's own batches (links: on blocks "
            "of the profiled sizes), each step after its sampling and gathering",
            "all_reduce": reduced.words,
            "optimizer": "measured: the optimizer on this model",
        },
    )


def _on_this_graph(rate: Rate, kind: str, timing: ModelTiming) -> Rate:
    """The machine's rate of a memory, or a disk, as this graph's rows were gathered from it."""
    factor = timing.gather_factors.get(gather_table(kind), 1.0)
    if factor == 1.0:
        return rate
    return Rate(
        seconds=rate.seconds * factor,
        spread=rate.spread,
        provenance=f"{rate.provenance} x {factor:.2f}, measured with this graph's batches",
    )


def _after_wait(timing: ModelTiming, candidate: Candidate, wait_seconds: float) -> float:
    """What a step takes longer because its thread has waited for rows, of a disk or of other ranks.

    In proportion to the wait up to the one that was measured: the caches are cold by then. 0 with
    loader threads, which wait instead, and where it was not measured.
    """
    found = timing.after_wait
    if found is None or candidate.threads.sample > 0 or found.wait_seconds <= 0.0:
        return 0.0
    return found.seconds * min(1.0, wait_seconds / found.wait_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AllReduce:
    seconds: float
    core_seconds: float
    """Of one rank."""
    spread: float
    words: str
    waited: bool = False
    """Whether the wait of equal batches for each other was measured with it."""


def _all_reduce(machine: MachineModel, timing: ModelTiming, candidate: Candidate) -> _AllReduce:
    ranks = candidate.num_ranks
    if ranks == 1:
        words = "derived: one rank has nothing to sum"
        return _AllReduce(seconds=0.0, core_seconds=0.0, spread=0.0, words=words)
    if candidate.hosts > 1:
        return _between_hosts(machine, timing, candidate)
    name = collective_table(machine, "all_reduce", candidate)
    table, size = machine.table(name), float(gradient_bytes(timing.num_parameters))
    alone = seconds = all_reduce_seconds(table, size, ranks)
    spread = table.spread
    words = f"{table.provenance}: table {name} at the gradient's bytes + expected straggler"
    threads, own = candidate.threads.compute, timing.all_reduce
    if own is not None:
        seconds, spread = own.at(ranks=float(ranks), threads=float(threads)), own.spread
        batches = "on each rank's own batches" if timing.own_batches else "+ straggler of batches"
        words = f"{own.provenance}: this model's gradients, in its steps {batches}"
    if candidate.threads.comm:
        slower = seconds / alone
        seconds = exposed_in_parts(
            lambda n: slower * all_reduce_seconds(table, n, ranks),
            size,
            compute_seconds(timing, ranks=ranks, threads=threads),
            hidden_share(machine, candidate),
        )
    busy = machine.tables.get("all_reduce_core_seconds")
    return _AllReduce(
        seconds=seconds,
        # Where it was not measured, a rank's thread is taken to be busy all the while.
        core_seconds=seconds if busy is None else all_reduce_seconds(busy, size, ranks) / ranks,
        spread=spread,
        words=words,
        waited=own is not None,
    )


def _between_hosts(machine: MachineModel, timing: ModelTiming, candidate: Candidate) -> _AllReduce:
    """Over the hosts' cards, and inside each host; a rank's thread is busy while it moves bytes."""
    size = float(gradient_bytes(timing.num_parameters))
    rate = hosts_all_reduce(machine, candidate, size)
    busy = machine.tables.get("all_reduce_core_seconds")
    core = rate.seconds if busy is None else busy.at(bytes=size, ranks=2.0) / 2.0
    return _AllReduce(
        seconds=rate.seconds,
        core_seconds=min(core, rate.seconds),
        spread=rate.spread,
        words=f"{rate.provenance}, the cards shared by a host's ranks + expected straggler",
    )


def _crowding(
    machine: MachineModel, graph: GraphRef, candidate: Candidate, batch: BatchProfile
) -> float:
    """By how much several samplers of a rank slow each other down, from their rates.

    One of each rank was timed, all of them at once.
    """
    edges, vertices = sum(e.mean for e in batch.edges), batch.vertices[-1].mean
    threads = replace(candidate.threads, sample=min(1, candidate.threads.sample))
    alone = replace(candidate, threads=threads)
    one, several = (
        sample_seconds(
            edges, vertices, edge_rate(machine, graph, c).seconds,
            vertex_rate(machine, graph, c).seconds,
        )
        for c in (alone, candidate)
    )  # fmt: skip
    return several / one if one > 0 else 1.0


def _sample_words(edge: Rate, vertex: Rate, sampler: str, *, timed: bool) -> str:
    if timed:
        return (
            f"measured: {sampler} sampling of this graph by one thread of each rank "
            "x the rates' slowdown beside others"
        )
    words = f"{edge.provenance}, {vertex.provenance} x profiled edges and vertices"
    if sampler in ("neighbor", "full"):
        return words
    return f"derived: neighbour sampling's rates, not calibrated for {sampler}; {words}"


def _gather_words(rates: dict[str, Rate]) -> str:
    if not rates:
        return "derived: no feature rows are read"
    return "; ".join(f"{kind}: {rate.provenance}" for kind, rate in rates.items())


def _variation(batch: BatchProfile) -> float:
    """Relative standard deviation of a batch's size."""
    vertices = batch.vertices[-1]
    return vertices.std / vertices.mean if vertices.mean > 0 else 0.0


def step_jitter(machine: MachineModel, ranks: int) -> float:
    """Relative deviation of equal work from step to step: of ranks side by side, if measured.

    The noise of one process alone is that of seconds apart: where a machine's speed drifts, it does
    so for all ranks, who do not wait for each other because of it.
    """
    table = machine.tables.get("step_jitter")
    return machine.noise if table is None or ranks == 1 else table.at(ranks=ranks)


def _join(a: float, b: float) -> float:
    """Independent deviations add in squares."""
    return (a * a + b * b) ** 0.5
