"""Price a step whose GPU makes batches on lanes of their own, ahead of the training thread.

Sampling, gathering (with what follows it) and training each have a stream. Shared resources bind
them: links carry one read or exchange at a time, and work on the GPU's own memory or processors
never overlaps. One process launches the kernels of all lanes under the interpreter's lock (DEC-55).
An exchange between ranks uses links and GPU, except for the measured share that compute hides
(docs/modelling.md 5). A measured slowdown of gather and compute beside each other is applied.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import tail
from gnnplan.planner.cost.pipeline_time import period, slow_each_other, stochastic_period
from gnnplan.planner.cost.rank_times import RankTimes
from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.cost.request import Request, seeds_per_rank
from gnnplan.planner.cost.stages.exchange import measured_eta
from gnnplan.planner.cost.stages.gather_gpu import memory_seconds_per_byte
from gnnplan.planner.cost.stages.host import start_seconds
from gnnplan.planner.cost.stages.sample import batch_launches
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import BatchProfile, GpuTiming, ModelTiming, Spread
from gnnplan.runtime.plan.schema import GraphRef, StepShapes
from gnnplan.runtime.sampling.memory import ID_BYTES, Envelope, capture_bytes, may_capture
from gnnplan.runtime.stages import LOOK_EVERY, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Seconds of one batch on each lane, beside the others."""

    sample: float
    gather: float
    """Seconds of gathering, copying labels and adding edge weights, on one stream."""
    training: float
    on_gpu: float
    """Seconds of all lanes on the GPU's own memory or processors, with exposed exchanges."""
    on_links: float
    """Seconds of all lanes on links to other memories, with exchanges."""
    on_host: float = 0.0
    """Seconds of all lanes in which kernels are launched."""

    @property
    def loader(self) -> float:
        """Return the seconds of both loader lanes."""
        return self.sample + self.gather

    @property
    def bottleneck(self) -> str:
        """Return the busiest lane or shared resource."""
        found = {
            "sample": self.sample,
            "gather": self.gather,
            "training": self.training,
            "GPU": self.on_gpu,
            "links": self.on_links,
            "host": self.on_host,
        }
        return max(found, key=lambda name: found[name])


EXCHANGED = (Stage.EXCHANGE_IDS, Stage.EXCHANGE_ROWS, Stage.HALO_EXCHANGE, Stage.ALL_REDUCE)
"""Stages in which GPUs hand data to each other, over links and by kernels."""


def has_lanes(candidate: Candidate) -> bool:
    """Return whether batches are made on lanes, ahead of the training thread or by its graph."""
    return candidate.kind == "cuda" and candidate.loads_ahead


def lanes_of(candidate: Candidate, machine: MachineModel, rank: RankTimes) -> Lanes:
    """Return a rank's lanes, slowed by each other as far as that was measured."""
    sample = rank.seconds(Stage.SAMPLE)
    exchange = sum(rank.seconds(stage) for stage in EXCHANGED)
    slow_gather, slow_compute = slowdowns(machine)
    gather, slowed = slow_each_other(
        rank.loader - sample,
        rank.training,
        loader_slowdown=slow_gather,
        trainer_slowdown=slow_compute,
    )
    busy = rank.device
    whole = rank.seconds(Stage.FORWARD_BACKWARD) + rank.seconds(Stage.OPTIMIZER)
    compute = whole if busy.compute is None else busy.compute
    shown = 1 - (measured_eta(machine, candidate) or 0.0)
    return Lanes(
        sample=sample,
        gather=gather,
        training=slowed,
        on_gpu=busy.memory + compute + shown * exchange,
        on_links=busy.links + exchange,
        on_host=busy.host,
    )


def lanes_words(machine: MachineModel, candidate: Candidate) -> str:
    """Say what lanes do beside each other, and which of it was measured."""
    slowed, eta = MachineTable.GPU_BESIDE in machine.tables, measured_eta(machine, candidate)
    words = "lanes hide nothing of each other on the GPU itself; links are read beside compute, "
    words += "each slowed as measured" if slowed else "how that slows either was not measured"
    if candidate.draws_ahead:
        words = f"the step's graph draws the next batch on a lane of its own; {words}"
    if candidate.num_ranks == 1:
        return words
    hidden = "nothing, which was not measured" if eta is None else f"{eta:.0%}, as measured"
    return f"{words}; of an exchange compute hides {hidden}"


def slowdowns(machine: MachineModel) -> tuple[float, float]:
    """Return the measured slowdowns of a gather and of compute beside each other."""
    cap = machine.tables.get(MachineTable.GPU_UVA_PROGRAMS)
    programs = 1.0 if cap is None else cap.at(ranks=1.0)
    found: list[float] = []
    for name in (MachineTable.GPU_BESIDE_GATHER, MachineTable.GPU_BESIDE):
        table = machine.tables.get(name)
        found.append(1.0 if table is None or cap is None else table.at(programs=programs))
    return max(1.0, found[0]), max(1.0, found[1])


def lanes_period(candidate: Candidate, rank: RankTimes, lanes: Lanes) -> float:
    """Return the seconds between two steps.

    max( lanes, on_gpu, on_links, on_host, (s + g + t) / (d + 1) ) with d batches ahead, and at
    least the period with the stalls of varying batches. Lanes of one graph are joined at each step:
    d is 1.

    Source: docs/formulas.md 8.2 [A2], with the GPU, its links and the host's interpreter shared.
    """
    depth = 1 if candidate.draws_ahead else candidate.prefetch_depth
    three = [lanes.sample, lanes.gather, lanes.training]
    stalled = stochastic_period(
        max(lanes.sample, lanes.gather),
        lanes.training,
        variation=rank.variation,
        depth=depth,
    )
    # Claimed at most d ahead of the consumer, whose own batch is one more.
    regular = period(three, in_flight=depth + 1)
    return max(regular, stalled, lanes.on_gpu, lanes.on_links, lanes.on_host)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCompute:
    """Seconds of one rank's forward, backward and update."""

    forward_backward: float
    optimizer: float
    """Seconds of the update; 0 where it is part of a captured step."""
    host: float
    """Seconds that the host takes to start their kernels."""
    device: float | None
    """Seconds in which the GPU works; None: the whole step."""


def step_compute(
    machine: MachineModel, candidate: Candidate, batch: BatchProfile, timing: ModelTiming
) -> StepCompute:
    """Return the seconds of a candidate's training step, replayed where it is captured.

    T_captured = p D + K_f t_s with D seconds in which the GPU works on a mean batch's own shapes, p
    rows of the padded shapes over the mean batch's, and K_f starts around the graph. All of D grows
    with p here, though kernels that sum over edges stop at the true rows: an upper bound. A share s
    of steps does not fit, and takes an eager step and the replays that wait for the host besides.

    Source: derived (DEC-170, DEC-177).
    """
    ranks, threads = candidate.num_ranks, candidate.threads.compute
    worked = timing.device_seconds if timing.gpu is None else timing.gpu.device_seconds
    eager = StepCompute(
        forward_backward=timing.compute_seconds(ranks=ranks, threads=threads),
        optimizer=timing.optimizer.at(ranks=ranks, threads=threads),
        host=timing.host_seconds,
        device=worked or None,
    )
    if candidate.shapes is None or not worked:
        return eager
    drawn = candidate.shapes.drawn
    starts = GRAPH_STARTS if drawn else captured_starts(len(batch.edges))
    host = starts * start_seconds(machine)
    device = worked * padding_ratio(candidate.shapes, batch)
    alone = eager.forward_backward + eager.optimizer
    seconds = host + device
    seconds += candidate.shapes.overflow_share * (alone + lost_replays(candidate) * seconds)
    return StepCompute(forward_backward=seconds, optimizer=0.0, host=host, device=device)


def lost_replays(candidate: Candidate) -> float:
    """Return the replays that leave parameters alone until the host sees that a batch did not fit.

    Where the host copies the batches of one rank it knows at once; else it looks every few steps.
    """
    told = candidate.shapes is not None and not candidate.shapes.drawn and candidate.num_ranks == 1
    return 0.0 if told else (LOOK_EVERY - 1) / 2


FILL_STARTS = (6, 9)
"""Number of kernels that copy a batch into a captured step's buffers: of a batch, and per block."""
GRAPH_STARTS = 1
"""Number of launches that replay a captured step."""


def captured_starts(layers: int) -> float:
    """Return how many kernels and graphs the host starts for a step whose batch it copies in.

    >>> captured_starts(3)
    34.0
    """
    return float(GRAPH_STARTS + FILL_STARTS[0] + FILL_STARTS[1] * layers)


def padding_ratio(shapes: StepShapes, batch: BatchProfile) -> float:
    """Return the rows of padded shapes over those of the mean batch; at least 1."""
    return max(1.0, sum(shapes.rows) / max(1.0, sum(v.mean for v in batch.vertices)))


class Margin(NamedTuple):
    """How far padded shapes lie above the sizes of a mean batch."""

    draws: int
    """Number of batches of which one should need as much as the shapes have without `ratio`."""
    ratio: float
    """Factor by which rows and edges of the shapes exceed that need."""


USUAL_MARGIN = Margin(1000, 1.1)
"""Margin that is kept where no other is predicted to gain more than the noise (DEC-170)."""
MARGINS = (USUAL_MARGIN, Margin(1000, 1.02), Margin(100_000, 1.02), Margin(100_000, 1.1))
SHAPE_MULTIPLE = 64
"""Multiple that rows and edges are rounded up to."""


def step_shapes(
    batch: BatchProfile,
    margin: Margin = USUAL_MARGIN,
    *,
    drawn: bool = False,
    bounds: Envelope | None = None,
) -> StepShapes:
    """Return the padded shapes for batches of a profiled size, and the share that overflows them.

    Rows and edges are the margin's ratio times its sizes, within `bounds`, and a row more, which is
    padding's. The share adds up the normal tails of all of them.

    Source: docs/formulas.md 8.10 [A10] for the quantile.
    """
    sizes = (batch.vertices, list(reversed(batch.block_edges)))
    rows, edges = ([tail(each, batch.num_batches, margin.draws) for each in some] for some in sizes)
    ends = batch.vertices[0]  # of links, whose number varies
    rows[0] = margin.ratio * rows[0] if ends.std > 0 else max(batch.seeds_per_rank, ends.largest)
    found = Envelope.around(rows, edges, bounds, margin=margin.ratio, multiple=SHAPE_MULTIPLE)
    limits = ([each - 1 for each in found.rows], found.edges)
    beyond = [
        _normal_tail(size, limit)
        for some, most in zip(sizes, limits, strict=True)
        for size, limit in zip(some, most, strict=True)
    ]
    return StepShapes(
        rows=list(found.rows),
        edges=list(found.edges),
        drawn=drawn,
        ahead=int(drawn),
        overflow_share=0.0 if _within(found, bounds) else min(1.0, sum(beyond)),
        reached_by=margin.draws,
        margin=margin.ratio,
    )


def _within(found: Envelope, bounds: Envelope | None) -> bool:
    """Return whether nothing can overflow an envelope."""
    if bounds is None:
        return False
    sizes = zip((*found.rows, *found.edges), (*bounds.rows, *bounds.edges), strict=True)
    return all(size >= bound for size, bound in sizes)


def _normal_tail(size: Spread, limit: float) -> float:
    """Return the probability that a normally distributed size exceeds a limit."""
    if size.std <= 0:
        return 0.0
    return 0.5 * math.erfc((limit - size.mean) / (size.std * math.sqrt(2)))


def captured_step_bytes(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    timing: ModelTiming,
    handed_row_bytes: int,
) -> int:
    """Return the bytes that a captured step takes beside an eager one's; 0 of an eager one.

    Its buffers with rows of `handed_row_bytes`, twice where a batch is drawn ahead, what draws pass
    through, and a pool of the activations over padded shapes: a batch that does not fit is trained
    beside them.
    """
    shapes = candidate.shapes
    if shapes is None:
        return 0
    shared = 0
    edges = PADDED_EDGE_BYTES * (sum(shapes.edges) + sum(shapes.rows[:-1]))
    if shapes.drawn:  # as drawn, beside those with the model's self-loops and weights
        edges += DRAWN_EDGE_BYTES * sum(shapes.edges)
        envelope, each = Envelope(tuple(shapes.rows), tuple(shapes.edges)), seed_bytes(graph)
        shared = envelope.shared_bytes(graph.num_nodes, graph.num_train, seed_bytes=each)
    ends = max(1, len(batch.edge_types)) * sum(shapes.rows)
    rows = handed_row_bytes * shapes.rows[-1] + ROW_END_BYTES * ends
    pool = timing.activation_bytes * padding_ratio(shapes, batch)
    return round(shared + (1 + shapes.ahead) * (edges + rows) + pool)


def seed_bytes(graph: GraphRef) -> int:
    """Return the bytes of a training seed's labels, or of a training link's two ends.

    They lie on a GPU that draws whole batches, as int64.
    """
    if graph.task == "link":
        return 2 * ID_BYTES
    return ID_BYTES * (graph.num_classes if graph.task == "multilabel" else 1)


ROW_END_BYTES = 8
"""Bytes that mark where a row's edges of one type end."""
DRAWN_EDGE_BYTES, PADDED_EDGE_BYTES = 8, 12
"""Bytes of an edge's source and destination; bytes of these and of its weight."""


def captured_words(
    machine: MachineModel, candidate: Candidate, batch: BatchProfile, timing: ModelTiming
) -> str:
    """Say what a captured step saves and what its padding costs; empty of an eager one."""
    if candidate.shapes is None:
        return ""
    plain = replace(candidate, step="eager", shapes=None)
    now, before = (step_compute(machine, each, batch, timing) for each in (candidate, plain))
    if now.device is None or before.device is None:
        return "replayed as one graph; what that saves was not measured on this machine"
    eager = before.forward_backward + before.optimizer
    more = now.device - before.device
    shapes = candidate.shapes
    share = shapes.overflow_share
    often = "no step" if share < 1e-9 else f"one step in {max(1, round(1 / share)):,}"
    sized = ""
    if shapes.reached_by:
        sized = f", {shapes.margin:g} times what one batch in {shapes.reached_by:,} needs"
    return (
        f"replayed as one graph of kernels: {1e3 * eager:.2f} ms by single starts, "
        f"{1e3 * now.forward_backward:.2f} ms so; of these, padding ("
        f"{padding_ratio(shapes, batch):.2f} times the mean batch's rows{sized}) takes "
        f"{1e3 * more:.2f} ms; {often} is predicted not to fit and to be trained kernel by kernel"
    )


MOST_OF_MEMORY = 0.01
"""Largest share of a GPU's memory for the buffers of a captured graph."""


def captured_bytes(request: Request, candidate: Candidate) -> int:
    """Return the bytes of a captured graph's buffers; 0 where kernels are launched one by one."""
    return buffer_bytes(request, candidate) if candidate.threads.capture else 0


def buffer_bytes(request: Request, candidate: Candidate) -> int:
    """Return the bytes that a captured graph's buffers would take; 0 where a batch has no bound."""
    work = request.workload
    seeds = seeds_per_rank(work.batch_size, candidate.num_ranks)
    if not may_capture(work.fanouts, seeds):
        return 0
    nodes = request.graph.num_nodes
    return capture_bytes(seeds, work.fanouts, nodes, every_hop=request.every_hop)


def capture_gain(request: Request, candidate: Candidate, num_bytes: int) -> float:
    """Return the seconds that a graph's one launch saves, less the sweeps over the buffers.

    (K - K_g) t_s - bytes / B, with K starts of a batch otherwise and K_g around the graph.
    """
    machine, hops = request.machine, len(request.workload.fanouts)
    swept = num_bytes * memory_seconds_per_byte(machine, candidate)
    single, graph = (
        batch_launches(
            replace(candidate, threads=replace(candidate.threads, capture=capture)),
            hops,
            sampler=request.sampler,
            every_hop=request.every_hop,
        )
        for capture in (0, 1)
    )
    return (single - graph) * start_seconds(machine) - swept


def timed_gain(timed: GpuTiming, candidate: Candidate) -> float:
    """Return the seconds per step that one launch saves where both ways were timed."""
    single, captured = (timed.loop(captured=c, ahead=has_lanes(candidate)) for c in (False, True))
    return single.step_seconds - captured.step_seconds
