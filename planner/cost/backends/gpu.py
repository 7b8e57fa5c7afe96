"""Price ranks on GPUs that sample and gather for themselves: stages, memory and traffic.

Stages of a GPU that is not here are derived from links and rates of a preset or probe, and from the
model's roofline (planner.profile.roofline). On a GPU that is here the runtime's own loop was timed
(`profile.gpu_timing`) in each way of making batches, with all rows on the GPU. Adjacency lists and
rows elsewhere are added by the machine's rates; in a stack the host launches fewer kernels per
batch. A gather takes the longer of the host's and the device's part. Without prefetching, the
device gathers while the host launches the model's kernels (DEC-128).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.backends.backend import Backend, Parts, time_to_start
from gnnplan.planner.cost.backends.cores import copied_times, drawn_times
from gnnplan.planner.cost.backends.gpu_lanes import (
    GRAPH_STARTS,
    captured_bytes,
    captured_step_bytes,
    captured_words,
    has_lanes,
    step_compute,
)
from gnnplan.planner.cost.graph_memory import draw_bytes, graph_parts, host_parts
from gnnplan.planner.cost.host_memory import passing_parts
from gnnplan.planner.cost.memory import gpu_memory_use, gpu_parts
from gnnplan.planner.cost.rank_times import DeviceTimes, RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import MachineTable, Rate
from gnnplan.planner.cost.request import Request, handed_row_bytes, held_row_bytes, row_bytes
from gnnplan.planner.cost.stages.all_reduce import exposed_in_parts, gpu_all_reduce, gradient_bytes
from gnnplan.planner.cost.stages.exchange import hidden_share
from gnnplan.planner.cost.stages.exchange_gpu import transit_parts
from gnnplan.planner.cost.stages.gather import gather_seconds
from gnnplan.planner.cost.stages.gather_gpu import (
    copy_seconds_per_byte,
    link_bytes,
    memory_seconds_per_byte,
    place_of,
    read_seconds,
)
from gnnplan.planner.cost.stages.host import (
    REDUCE_STARTS,
    Starts,
    copy_seconds,
    loader_starts,
    start_seconds,
)
from gnnplan.planner.cost.stages.sample import (
    FANOUT_STARTS,
    NEIGHBOUR_BYTES,
    OFFSETS_BYTES,
    gpu_sample_seconds,
    launch_words,
    more_fanouts,
    scan_seconds,
    unpriced_words,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import BatchProfile, GpuLoop, GpuTiming, ModelTiming
from gnnplan.runtime.plan.schema import MemoryUse
from gnnplan.runtime.sampling.registry import sampler_or_unknown
from gnnplan.runtime.stages import LOADER_STAGES, Stage, most_parts


class GpusBackend(Backend):
    """Ranks that each have a GPU."""

    def stage_times(self, work: RankWork) -> RankTimes:
        """Price every stage, as timed on the GPU if it is here."""
        timing, candidate = work.timing, work.candidate
        # Loops that were timed draw their batches on the GPU, which the host starts.
        drawn = candidate.shapes is not None and candidate.shapes.drawn
        timed = None if drawn or not work.draws_on_gpu else timing.gpu
        derived = copied_times if work.sparse else _derived_times
        found = derived(work) if timed is None else _timed_times(work, timed)
        if not (work.draws_on_gpu or work.sparse):
            found = drawn_times(work, found)
        reduced = gpu_reduced(work.machine, candidate, timing)
        slope = timing.slope_seconds(ranks=candidate.num_ranks, threads=candidate.threads.compute)
        stages = {**found.stages, Stage.ALL_REDUCE: StageTime.of(reduced)}
        if words := captured_words(work.machine, candidate, work.batch, timing):
            passes = stages[Stage.FORWARD_BACKWARD]
            slope = 0.0  # padded shapes take as long whatever was drawn
            stages[Stage.FORWARD_BACKWARD] = replace(
                passes, provenance=f"{passes.provenance}; {words}"
            )
        # What was not repeated on the machine varies with the batches' sizes alone.
        return replace(
            found,
            stages=stages,
            compute_slope=slope,
            loader_sigma=found.loader * work.size_variation,
            trainer_sigma=slope * work.size_variation,
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
        """Return the bytes of a GPU's context, reserve, sampler, graph and captured step."""
        del reads_peers
        found = gpu_parts(
            candidate, request.graph, batch, request.machine, rank, request.budgets,
            captured_bytes=captured_bytes(request, candidate),
            draw_bytes=draw_bytes(request, candidate, batch, on_gpu=True),
        ) | graph_parts(request, candidate, batch)  # fmt: skip
        timing = self.batch_and_timing(request, candidate)[1]
        handed = handed_row_bytes(request, candidate)
        more = captured_step_bytes(candidate, request.graph, batch, timing, handed)
        return found | ({"captured step": more} if more else {})

    def memory_use(
        self, request: Request, candidate: Candidate, placed: PlacedRows, parts: list[Parts]
    ) -> dict[str, MemoryUse]:
        """Hold each GPU's parts against its memory, and what hosts map against theirs."""
        held, stored = host_parts(request, candidate), held_row_bytes(request.graph, candidate)
        moving = transit_parts(request, candidate, placed)
        parts = [own | more for own, more in zip(parts, moving, strict=True)]
        return gpu_memory_use(
            parts, candidate, held, passing_parts(request, candidate, placed), placed, stored,
            request.machine, request.budgets,
        )  # fmt: skip

    def link_bytes(
        self, request: Request, candidate: Candidate, placed: PlacedRows, exchanged: float
    ) -> dict[str, float]:
        """Return the bytes of feature rows in whole transactions; exchanges are not counted."""
        del exchanged
        return gpu_traffic(request.machine, candidate, placed, row_bytes(request.graph))

    def startup_time(self, request: Request, candidate: Candidate, placed: PlacedRows) -> StageTime:
        """Price the start of processes that copy their rows over the links to the GPUs."""
        return time_to_start(
            request,
            candidate,
            placed,
            copy_bytes_per_second=1 / max(copy_seconds_per_byte(request.machine, candidate)),
            words="derived: the machine's process start, bytes over the links to the GPUs",
        )


WHERE = {"host": "host", "replicated": "own", "partitioned": "own"}
"""Place that a topology is read from, by its policy; a partitioned one after it was fetched."""
LOCATED_READS = 2
"""Reads of the GPU's own memory by which a list is found: its begin and end, and its address."""


def _own_part(work: RankWork) -> dict[str, float]:
    """Return the share of neighbour reads from the GPU's own memory, if any."""
    return {place: share for place, share in work.list_places.items() if place == "own"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reads:
    """Rates of what one rank's batch reads."""

    work: RankWork
    rows: dict[str, float]
    """Rows by source, of sources that are read."""
    ids: dict[str, list[float]]
    """Seconds of reading a neighbour's id, by place and rank."""
    offsets: dict[str, list[float]]
    """Seconds of reading a list's begin and end, by place and rank."""
    launch: float
    """Host's seconds of starting one kernel."""
    in_memory: float
    """Seconds per byte of copies within the GPU's memory."""

    @staticmethod
    def of(work: RankWork) -> "_Reads":
        """Look up the rates, once for all stages."""
        machine, candidate = work.machine, work.candidate
        return _Reads(
            work=work,
            rows={k: n for k, n in sorted(work.rows.rows.items()) if n > 0},
            ids=read_seconds(machine, candidate, NEIGHBOUR_BYTES),
            offsets=read_seconds(machine, candidate, OFFSETS_BYTES),
            launch=start_seconds(machine),
            in_memory=memory_seconds_per_byte(machine, candidate),
        )

    def drawing(
        self, places: Mapping[str, float], kernels: float = 0.0, *, located: bool = False
    ) -> float:
        """Return the seconds of sampling with lists at places by shares; none: relabelling alone.

        Lists that are `located` in several memories have their begins and addresses on the GPU.
        """
        if not self.work.draws_on_gpu:
            return 0.0
        rank = self.work.rank
        ids, offsets = (
            sum(share * table[place][rank] for place, share in places.items())
            for table in (self.ids, self.offsets)
        )
        if located and places:
            offsets = LOCATED_READS * self.offsets["own"][rank]
        batch = self.work.batch
        reached = [v.mean for v in batch.vertices[:-1]]
        expanded = sum(reached) if self.work.every_hop else reached[-1]
        expanded *= max(1, len(batch.edge_types))  # a vertex has a list of each type
        return gpu_sample_seconds(
            sum(e.mean for e in batch.edges),
            expanded,
            kernels,
            lists_seconds=self._scanning(places, expanded),
            neighbour_seconds=ids,
            offsets_seconds=offsets,
            hash_seconds=self.ids["own"][rank],
            kernel_seconds=self.launch,
        )

    def _scanning(self, places: Mapping[str, float], lists: float) -> float | None:
        """Return the seconds of reading whole lists; None where chosen neighbours are read."""
        work, entries = self.work, self.work.batch.list_entries
        spec = sampler_or_unknown(work.sampler)
        # A term of its own charges the lists of a preference for local neighbours.
        if spec.reads_chosen or spec.prefers_local or min(entries, lists) <= 0:
            return None
        if not places:
            return 0.0
        size = max(1, round(NEIGHBOUR_BYTES * entries / lists))
        table = read_seconds(work.machine, work.candidate, size)
        whole = sum(share * table[place][work.rank] for place, share in places.items())
        return scan_seconds(entries, lists, whole)

    def gathering(self) -> tuple[float, float]:
        """Return the seconds of moving a batch's rows, and those in the GPU's own memory."""
        work = self.work
        stored = read_seconds(work.machine, work.candidate, work.row_bytes)
        written = work.batch.vertices[-1].mean * work.row_bytes * self.in_memory
        by_source = {k: stored[place_of(k)][work.rank] for k in self.rows}
        own = sum(n for k, n in self.rows.items() if place_of(k) == "own")
        own *= stored["own"][work.rank]
        return gather_seconds(self.rows, by_source) + written, own + written

    def copying(self, launch: float) -> float:
        """Return the seconds of copying seeds and labels."""
        work = self.work
        per_byte = copy_seconds_per_byte(work.machine, work.candidate)[work.rank]
        return copy_seconds(work.batch.vertices[0].mean, per_byte, launch)

    @property
    def sources(self) -> str:
        """Return the names of the sources that rows are read from."""
        return ", ".join(self.rows) or "none"


def _starts(work: RankWork, candidate: Candidate) -> Starts:
    if candidate.shapes is not None and candidate.shapes.drawn:
        return Starts(
            draw=GRAPH_STARTS, mix=0.0, share=0.0, gather=0.0, cache=0.0, pack=0.0, copy=0.0
        )
    found = loader_starts(
        candidate, len(work.batch.edges), sampler=work.sampler, every_hop=work.every_hop
    )
    if not work.draws_on_gpu:
        return replace(found, draw=0.0, mix=0.0)
    more = FANOUT_STARTS * more_fanouts(work.workload, len(work.batch.edge_types))
    return replace(found, draw=found.draw + more)


def _without_host(timing: ModelTiming) -> ModelTiming:
    """Return the timing whose edge weights the host does not start."""
    device = timing.batch_seconds - timing.batch_host_seconds
    return replace(timing, batch_seconds=device, batch_host_seconds=0.0)


def _derived_times(work: RankWork) -> RankTimes:
    """Derive all stages but the all-reduce from rates."""
    reads, candidate, timing = _Reads.of(work), work.candidate, work.timing
    swept, located = work.captured_bytes * reads.in_memory, candidate.topology.policy == "cached"
    starts, launch = _starts(work, candidate), reads.launch
    moving, near = reads.gathering()
    near += timing.batch_seconds - timing.batch_host_seconds
    near += swept + reads.drawing(_own_part(work), located=located)
    sample = swept + reads.drawing(work.list_places, starts.draw, located=located)
    copy, step = reads.copying(launch), step_compute(work.machine, candidate, work.batch, timing)
    if candidate.shapes is not None and candidate.shapes.drawn:  # seeds and labels lie there
        copy, timing = 0.0, _without_host(timing)
    launches = launch * (starts.draw + starts.gather + starts.copy) + timing.batch_host_seconds
    loader = sample + moving + launch * starts.gather + copy + timing.batch_seconds
    seconds = {
        Stage.SAMPLE: sample,
        Stage.COPY: copy,
        Stage.BATCH: timing.batch_seconds,
        Stage.FORWARD_BACKWARD: step.forward_backward,
        Stage.OPTIMIZER: step.optimizer,
    }
    hidden = 0.0 if has_lanes(candidate) else _idle_seconds(seconds, step.device)
    seconds[Stage.GATHER] = launch * starts.gather + max(0.0, moving - hidden)
    started = work.machine.table(MachineTable.GPU_KERNEL).spread
    spreads = {
        **dict.fromkeys((Stage.SAMPLE, Stage.GATHER, Stage.COPY), started),
        Stage.FORWARD_BACKWARD: timing.forward_backward.spread,
        Stage.OPTIMIZER: timing.optimizer.spread,
    }
    return RankTimes(
        stages=_stages(seconds, spreads, _derived_words(reads)),
        device=DeviceTimes(
            memory=near,
            links=max(0.0, loader - near - launches),
            host=launches + step.host + reduce_starts(candidate, timing) * launch,
            compute=step.device,
        ),
    )


def least_seconds(work: RankWork) -> float:
    """Return a lower bound of a derived step's seconds, whatever it reads: the host's, or training.

    What the host starts and what the model takes are part of each step, in lanes or in series.
    """
    candidate, timing, launch = work.candidate, work.timing, start_seconds(work.machine)
    starts = _starts(work, candidate)
    step = step_compute(work.machine, candidate, work.batch, timing)
    started = starts.draw + starts.gather + starts.copy + reduce_starts(candidate, timing)
    host = launch * started + timing.batch_host_seconds + step.host
    return max(host, step.forward_backward + step.optimizer)


def _stages(
    seconds: Mapping[Stage, float], spreads: Mapping[Stage, float], words: Mapping[Stage, str]
) -> dict[Stage, StageTime]:
    return {
        stage: StageTime(
            seconds=each, spread=spreads.get(stage, 0.0), provenance=words.get(stage, "")
        )
        for stage, each in seconds.items()
    }


def _derived_words(reads: _Reads) -> dict[Stage, str]:
    shared, candidate = "the machine's links, shared by all who read", reads.work.candidate
    beside = "" if has_lanes(candidate) else ", while the host starts the model's kernels"
    where = WORDS[candidate.topology.policy]
    return {
        Stage.SAMPLE: f"derived: a batch's edges x transactions over {shared}; topology {where}; "
        f"{launch_words(candidate, reads.work.sampler)}"
        f"{unpriced_words(reads.work.sampler, reads.work.parameters)}",
        Stage.GATHER: f"derived: rows ({reads.sources}) x lines per row over {shared}{beside}",
        Stage.COPY: f"derived: seeds and labels over {shared}",
        Stage.BATCH: "derived: edge weights over the GPU's bandwidth",
        Stage.FORWARD_BACKWARD: "derived: roofline of a batch's shapes, "
        "the machine's flops and bandwidth",
        Stage.OPTIMIZER: "derived: parameters and moments over the GPU's bandwidth",
    }


WORDS = {
    "host": "in host memory",
    "replicated": "in GPU memory",
    "partitioned": "in GPU memory",
    "cached": "in host memory, hot lists in GPUs'",
}
"""Where topology is read, by its policy."""
MEASURED = (
    Stage.SAMPLE, Stage.GATHER, Stage.COPY, Stage.FORWARD_BACKWARD, Stage.OPTIMIZER,
)  # fmt: skip
"""Stages whose spread is that of the timed loop."""


def _timed_times(work: RankWork, timed: GpuTiming) -> RankTimes:
    """Return all stages but the all-reduce, from the loop that was timed on the GPU."""
    reads, candidate = _Reads.of(work), work.candidate
    captured, ahead = work.captured_bytes > 0, has_lanes(candidate)
    chosen = timed.captured if captured and timed.captured is not None else timed.sample
    loop = timed.loop(captured=captured, ahead=ahead)
    saved = chosen.host_seconds * (1.0 - _started_share(work))
    alone = chosen.host_seconds + timed.handing_seconds + work.timing.host_seconds
    step = step_compute(work.machine, candidate, work.batch, work.timing)
    fewer = saved + (work.timing.host_seconds - step.host)
    relabelling, located = reads.drawing({}), candidate.topology.policy == "cached"
    near_lists = reads.drawing(_own_part(work), located=located) - relabelling
    lists = reads.drawing(work.list_places, located=located) - relabelling
    elsewhere = lists - (reads.drawing({WHERE[timed.topology]: 1.0}) - relabelling)
    drawing, far_lists = relabelling + near_lists, lists - near_lists
    if WHERE.get(candidate.topology.policy) == "own":
        device = max(0.0, chosen.seconds - chosen.host_seconds + elsewhere)
        drawing = max(drawing, device)
    moving, near = reads.gathering()
    seconds = {name: loop.stages.get(name, 0.0) for name in TIMED}
    if candidate.shapes is not None:
        seconds[Stage.FORWARD_BACKWARD], seconds[Stage.OPTIMIZER] = step.forward_backward, 0.0
    hidden = 0.0 if ahead else _idle_seconds(seconds, step.device)
    slower = seconds[Stage.SAMPLE] * (1.0 - saved / chosen.seconds) + elsewhere
    seconds[Stage.SAMPLE] = max(0.0, slower)
    seconds[Stage.GATHER] = max(seconds[Stage.GATHER], moving - hidden)
    busy = loop.step_seconds * (1.0 - fewer / alone)
    return RankTimes(
        stages=_stages(seconds, dict.fromkeys(MEASURED, loop.spread), _timed_words(reads, timed)),
        loop_overhead=_overhead(loop, in_line=not ahead),
        device=DeviceTimes(
            memory=near + drawing,
            links=moving - near + reads.copying(0.0) + far_lists,
            host=busy + reduce_starts(candidate, work.timing) * reads.launch,
            host_shrinking=max(0.0, busy - (alone - fewer)),
            compute=step.device,
        ),
    )


TIMED = (Stage.SEEDS, Stage.BATCH, *MEASURED)
"""Stages of the timed loop that a price is made of."""


def _started_share(work: RankWork) -> float:
    """Return the share of a single batch's launches that a batch of a stack makes."""
    candidate = work.candidate
    if candidate.bulk_batches == 1:
        return 1.0
    alone = replace(
        candidate, bulk_batches=1, bulk_bytes=0, threads=replace(candidate.threads, capture=0)
    )
    return _starts(work, candidate).draw / _starts(work, alone).draw


def _idle_seconds(stages: Mapping[Stage, float], worked: float | None) -> float:
    """Return the seconds of a synchronous step in which the device waits for the host."""
    step = stages[Stage.FORWARD_BACKWARD] + stages[Stage.OPTIMIZER]
    return 0.0 if worked is None else max(0.0, step - worked)


def _overhead(loop: GpuLoop, *, in_line: bool) -> float:
    """Return the training thread's seconds outside stages, a synchronous loader's included."""
    own = LOADER_STAGES if in_line else (Stage.WAIT,)
    stages = (*own, Stage.FORWARD_BACKWARD, Stage.OPTIMIZER)
    return max(0.0, loop.step_seconds - sum(loop.stages.get(name, 0.0) for name in stages))


def _timed_words(reads: _Reads, timed: GpuTiming) -> dict[Stage, str]:
    loop = "measured: the runtime's own loop on this GPU, on this graph's own batches"
    captured = reads.work.captured_bytes > 0 and timed.captured is not None
    way = "by one CUDA graph" if captured else "kernel by kernel"
    sampling = f"measured: {reads.work.sampler} sampling of this graph on this GPU, {way}"
    return dict.fromkeys(TIMED, loop) | {
        Stage.SAMPLE: f"{sampling}, beside all else",
        Stage.GATHER: f"{loop}: starting its kernels; rows ({reads.sources}) by the probe's rates",
        Stage.FORWARD_BACKWARD: f"{loop}; its kernels' start, and the wait until they are done",
    }


def reduce_starts(candidate: Candidate, timing: ModelTiming) -> float:
    """Return the host's starts for the gradients' sum over ranks: of one call, or of one per part.

    In parts the loss is one more. One rank sums nothing: 0.
    """
    if candidate.num_ranks == 1:
        return 0.0
    parts = most_parts(float(gradient_bytes(timing.num_parameters))) + 1
    return float(REDUCE_STARTS * (parts if candidate.threads.comm else 1))


def gpu_reduced(machine: MachineModel, candidate: Candidate, timing: ModelTiming) -> Rate:
    """Price the gradient's all-reduce as the training thread waits for it.

    Raises:
        MachineError: no route joins two neighbours of the ring.
    """
    size = float(gradient_bytes(timing.num_parameters))
    started = REDUCE_STARTS * start_seconds(machine) if candidate.num_ranks > 1 else 0.0

    def summed(num_bytes: float) -> float:
        return gpu_all_reduce(machine, candidate, num_bytes).seconds + started

    reduced = gpu_all_reduce(machine, candidate, size)
    if not candidate.threads.comm:
        return replace(reduced, seconds=reduced.seconds + started)
    compute = timing.compute_seconds(ranks=candidate.num_ranks, threads=candidate.threads.compute)
    left = exposed_in_parts(summed, size, compute, hidden_share(machine, candidate))
    return replace(reduced, seconds=left)


def gpu_traffic(
    machine: MachineModel, candidate: Candidate, placed: PlacedRows, row_bytes: int
) -> dict[str, float]:
    """Return the bytes of feature rows per step by link, in transactions, over all GPUs."""
    total: dict[str, float] = {}
    for rank, rows in enumerate(placed.ranks):
        for place, count in sorted(rows.rows.items()):
            moved = link_bytes(machine, candidate, place, rank, count, row_bytes)
            for name, carried in moved.items():
                total[name] = total.get(name, 0.0) + carried
    return total
