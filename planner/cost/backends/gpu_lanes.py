"""The step of a rank whose GPU makes batches on lanes of their own, ahead of the training thread.

Sampling has a stream, gathering and what follows it has one, and training has one. What they use
binds them besides: links carry one read or exchange at a time, and whatever needs the GPU's own
memory or processors is taken to hide nothing of each other. Kernels of all lanes are started by one
process, whose threads share the interpreter's lock (DEC-55). An exchange between ranks needs links
and GPU, but for the share that compute was measured to hide (docs/modelling.md 5). Where a probe
measured how a gather and compute slow each other down, that is applied too, and said.
"""

from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.pipeline_time import period, slow_each_other, stochastic_period
from gnnplan.planner.cost.rank_times import RankTimes
from gnnplan.planner.cost.rates import MachineTable, rate_per_rank
from gnnplan.planner.cost.request import Request, seeds_per_rank
from gnnplan.planner.cost.stages.exchange import measured_eta
from gnnplan.planner.cost.stages.gather_gpu import memory_seconds_per_byte
from gnnplan.planner.cost.stages.sample import batch_launches
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import GpuTiming
from gnnplan.runtime.sampling.memory import capture_bytes, may_capture
from gnnplan.runtime.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Seconds of one batch on each lane, beside the others."""

    sample: float
    gather: float
    """With the copies of labels and the edge weights, which follow on the same stream."""
    training: float
    on_gpu: float
    """Of all three: what keeps the GPU's own memory or processors busy; of an exchange what
    compute does not hide."""
    on_links: float
    """What keeps the links to other memories busy, an exchange among it."""
    on_host: float = 0.0
    """Of all three: in which kernels are started."""

    @property
    def loader(self) -> float:
        """Seconds of both loader lanes."""
        return self.sample + self.gather

    @property
    def bottleneck(self) -> str:
        """The lane, or what lanes share, that is busiest."""
        found = {
            "sample": self.sample,
            "gather": self.gather,
            "training": self.training,
            "GPU": self.on_gpu,
            "links": self.on_links,
            "host": self.on_host,
        }
        return max(found, key=lambda name: found[name])


def has_lanes(candidate: Candidate) -> bool:
    """Whether the candidate's batches are made on lanes, ahead of the training thread."""
    return candidate.kind == "cuda" and candidate.threads.sample > 0


def lanes_of(candidate: Candidate, machine: MachineModel, rank: RankTimes) -> Lanes:
    """A rank's lanes, each slowed by the others as far as that was measured."""
    sample = rank.seconds(Stage.SAMPLE)
    exchange = rank.seconds(Stage.HALO_EXCHANGE) + rank.seconds(Stage.ALL_REDUCE)
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
    """Say what lanes were taken to do beside each other, and which of it was measured."""
    slowed, eta = MachineTable.GPU_BESIDE in machine.tables, measured_eta(machine, candidate)
    words = "lanes hide nothing of each other on the GPU itself; links are read beside compute, "
    words += "each slowed as measured" if slowed else "how that slows either was not measured"
    if candidate.num_ranks == 1:
        return words
    hidden = "nothing, which was not measured" if eta is None else f"{eta:.0%}, as measured"
    return f"{words}; of an exchange compute hides {hidden}"


def slowdowns(machine: MachineModel) -> tuple[float, float]:
    """Slowdowns of a gather, with its measured grid, and of compute beside each other."""
    cap = machine.tables.get(MachineTable.GPU_UVA_PROGRAMS)
    programs = 1.0 if cap is None else cap.at(ranks=1.0)
    found: list[float] = []
    for name in (MachineTable.GPU_BESIDE_GATHER, MachineTable.GPU_BESIDE):
        table = machine.tables.get(name)
        found.append(1.0 if table is None or cap is None else table.at(programs=programs))
    return max(1.0, found[0]), max(1.0, found[1])


def lanes_period(candidate: Candidate, rank: RankTimes, lanes: Lanes) -> float:
    """Seconds between two steps: the busiest lane or shared part, batches in flight, and chance.

    max( lanes, on_gpu, on_links, on_host, (s + g + t) / (d + 1) ), d batches ahead, and the stalls
    of varying batches

    Source: docs/formulas.md 8.2 [A2], with the GPU, its links and the host's interpreter shared.
    """
    three = [lanes.sample, lanes.gather, lanes.training]
    stalled = stochastic_period(
        max(lanes.sample, lanes.gather),
        lanes.training,
        variation=rank.variation,
        depth=candidate.prefetch_depth,
    )
    # Claimed at most d ahead of the consumer, whose own batch is one more.
    regular = period(three, in_flight=candidate.prefetch_depth + 1)
    return max(regular, stalled, lanes.on_gpu, lanes.on_links, lanes.on_host)


MOST_OF_MEMORY = 0.01
"""Share of a GPU's memory that the graph's buffers may take."""


def captured_bytes(request: Request, candidate: Candidate) -> int:
    """Bytes of a graph's buffers on each GPU; 0 where the candidate samples kernel by kernel."""
    return buffer_bytes(request, candidate) if candidate.threads.capture else 0


def buffer_bytes(request: Request, candidate: Candidate) -> int:
    """Bytes that a graph's buffers would take; 0 where a batch has no bound."""
    work = request.workload
    seeds = seeds_per_rank(work.batch_size, candidate.num_ranks)
    if not may_capture(work.fanouts, seeds):
        return 0
    nodes = request.graph.num_nodes
    return capture_bytes(seeds, work.fanouts, nodes, every_hop=request.every_hop)


def capture_gain(request: Request, candidate: Candidate, num_bytes: int) -> float:
    """Seconds that one launch saves of a batch, less what going through the buffers takes.

    (K - 1) t_k - bytes / B: K kernels start a batch otherwise.
    """
    machine, hops = request.machine, len(request.workload.fanouts)
    launch = rate_per_rank(machine, MachineTable.GPU_KERNEL, candidate)
    swept = num_bytes * memory_seconds_per_byte(machine, candidate)
    single = replace(candidate, threads=replace(candidate.threads, capture=0))
    kernels = batch_launches(single, hops, sampler=request.sampler, every_hop=request.every_hop)
    return (kernels - 1) * launch - swept


def timed_gain(timed: GpuTiming, candidate: Candidate) -> float:
    """Seconds of a step that one launch saves where both ways were timed; 0: it cannot be."""
    single, captured = (timed.loop(captured=c, ahead=has_lanes(candidate)) for c in (False, True))
    return single.step_seconds - captured.step_seconds
