"""The step of a rank whose GPU makes batches on lanes of their own, ahead of the training thread.

Sampling has a stream, gathering and what follows it has one, and training has one. What they use
binds them besides: links carry one read or exchange at a time, and whatever needs the GPU's own
memory or processors is taken to hide nothing of each other. Kernels of all lanes are started by one
process, whose threads share the interpreter's lock (DEC-55). An exchange between ranks needs links
and GPU, but for the share of it that compute was measured to hide (docs/modelling.md 5). Where a
probe measured how a gather and compute slow each other down, that is applied too; the words of a
prediction say which of these were.
"""

from dataclasses import dataclass

from planner.candidate import Candidate
from planner.cost.overlap import measured_eta
from planner.cost.pipeline_time import beside, period, stochastic_period
from planner.cost.rank_seconds import RankSeconds
from planner.machine import MachineModel


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


def lanes_of(candidate: Candidate, machine: MachineModel, rank: RankSeconds) -> Lanes:
    """A rank's lanes, each slowed by the others as far as that was measured.

    Args:
        candidate: on GPUs, with a loader thread.
        machine: tables `gpu_beside`, `gpu_beside_gather` and `gpu_overlap_eta`, where they were
            measured.
        rank: seconds of each stage alone.
    """
    exchange = rank.halo_exchange + rank.all_reduce
    training = rank.forward_backward + exchange + rank.optimizer
    slow_gather, slow_compute = slowdowns(machine)
    gather, slowed = beside(
        rank.loader - rank.sample,
        training,
        loader_slowdown=slow_gather,
        trainer_slowdown=slow_compute,
    )
    whole = rank.forward_backward + rank.optimizer
    compute = whole if rank.computing is None else rank.computing
    shown = 1 - (measured_eta(machine, candidate) or 0.0)
    return Lanes(
        sample=rank.sample,
        gather=gather,
        training=slowed,
        on_gpu=rank.on_gpu + compute + shown * exchange,
        on_links=rank.on_links + exchange,
        on_host=rank.on_host,
    )


def lanes_words(machine: MachineModel, candidate: Candidate) -> str:
    """What lanes were taken to do beside each other, and which of it was measured."""
    slowed, eta = "gpu_beside" in machine.tables, measured_eta(machine, candidate)
    words = "lanes hide nothing of each other on the GPU itself; links are read beside compute, "
    words += "each slowed as measured" if slowed else "how that slows either was not measured"
    if candidate.num_ranks == 1:
        return words
    hidden = "nothing, which was not measured" if eta is None else f"{eta:.0%}, as measured"
    return f"{words}; of an exchange compute hides {hidden}"


def slowdowns(machine: MachineModel) -> tuple[float, float]:
    """(gather, compute) slowdown of running beside each other, with the gather's measured grid."""
    cap = machine.tables.get("gpu_uva_programs")
    programs = 1.0 if cap is None else cap.at(ranks=1.0)
    found: list[float] = []
    for name in ("gpu_beside_gather", "gpu_beside"):
        table = machine.tables.get(name)
        found.append(1.0 if table is None or cap is None else table.at(programs=programs))
    return max(1.0, found[0]), max(1.0, found[1])


def lanes_period(candidate: Candidate, rank: RankSeconds, lanes: Lanes) -> float:
    """Seconds between two steps: the busiest lane or shared part, batches in flight, and chance.

    max( lanes, on_gpu, on_links, on_host, (s + g + t) / (d + 1) ), and the stalls of varying
    batches

    Args:
        candidate: d batches ahead.
        rank: how much its batches vary.
        lanes: from `lanes_of`.

    Source: docs/formulas.md 8.2 [A2], with the GPU, its links and the host's interpreter shared.
    """
    three = [lanes.sample, lanes.gather, lanes.training]
    sigma, mean = max(rank.loader_sigma, rank.trainer_sigma), rank.loader + rank.forward_backward
    stalled = stochastic_period(
        max(lanes.sample, lanes.gather),
        lanes.training,
        variation=sigma / mean if mean > 0 else 0.0,
        depth=candidate.prefetch_depth,
    )
    # Claimed at most d ahead of the consumer, whose own batch is one more.
    regular = period(three, in_flight=candidate.prefetch_depth + 1)
    return max(regular, stalled, lanes.on_gpu, lanes.on_links, lanes.on_host)
