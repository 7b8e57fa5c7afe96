"""The GPUs' measurements in parts: a task for each GPU and for each class of pairs.

A part has its own share of the time and its own limit, and ends alone where it fails (DEC-108): the
next one goes on in a new process. Of equal GPUs, and of pairs that are joined alike, the first is
measured in full. The others are measured at a few points; where these agree with the first one's,
its other points hold for them too, and where they do not, the GPU or pair is measured in full.
"""

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from gnnplan.planner.machine.model import GPUS_LOST
from gnnplan.planner.probe.context import AGAIN, FULL, ProbeContext
from gnnplan.planner.probe.gpu.inventory import Gpu, GpuPair, Inventory
from gnnplan.planner.probe.gpu.measure import (
    Bench,
    GpuDevice,
    GpuFindings,
    GpuSizes,
    Points,
    check_gpu,
    check_pair,
    measure_crowd,
    measure_gpu,
    measure_hidden,
    measure_pair,
)
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.team import Team
from gnnplan.planner.probe.timing import Clock, Patience, summarize
from gnnplan.runtime.device import available_ram_bytes
from gnnplan.runtime.errors import WorkerFailed

Pair = tuple[int, int]
"""Reader and owner, by torch's numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The GPUs that torch shows."""

    uuids: list[str]
    mapped: list[Pair]
    """Pairs whose first reads the second's memory directly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePart:
    """One task: points of a GPU, of pairs that are joined alike, of all GPUs, or of ranks."""

    kind: Literal["gpu", "pairs", "crowd", "hidden", "ranks"]
    gpus: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()
    mapped: bool = False
    """Whether the pairs' first ones read the second ones' memory directly."""
    like: GpuFindings | None = None
    """Findings of an equal GPU that was measured in full."""
    weight: float = 1.0
    """Share of the time, against other parts'."""

    @property
    def words(self) -> str:
        """Name of the part in notes."""
        if self.kind == "gpu":
            return f"gpu{self.gpus[0]}"
        if self.kind == "pairs":
            return f"GPU pairs like gpu{self.pairs[0][1]} to gpu{self.pairs[0][0]}"
        if self.kind == "ranks":
            return "collectives of ranks on GPUs"
        return "GPUs' copies at once" if self.kind == "crowd" else "GPUs' all-reduce beside compute"


def plan_parts(survey: Survey, inventory: Inventory | None) -> list[ProbePart]:
    """Divide the measurements; `inventory` None: the driver says nothing of links and kinds."""
    count = len(survey.uuids)
    every = tuple(range(count))
    parts = [ProbePart(kind="gpu", gpus=(g,), weight=4.0) for g in every]
    if count < 2:
        return parts
    classes: dict[Hashable, list[Pair]] = {}
    for pair in ((a, b) for a in every for b in every if a != b):
        classes.setdefault(_link_class(pair, survey, inventory), []).append(pair)
    for pairs in classes.values():
        parts.append(
            ProbePart(
                kind="pairs",
                pairs=tuple(pairs),
                gpus=tuple(sorted({g for pair in pairs for g in pair})),
                mapped=pairs[0] in survey.mapped,
                weight=1.0 + 0.1 * len(pairs),
            )
        )
    return [
        *parts,
        ProbePart(kind="crowd", gpus=every, weight=0.3 * count),
        ProbePart(kind="hidden", gpus=every, weight=1.0),
        ProbePart(kind="ranks", gpus=every, weight=2.0),
    ]


def _link_class(pair: Pair, survey: Survey, inventory: Inventory | None) -> Hashable:
    """Return what pairs that are joined alike have in common."""
    ends = [survey.uuids[g] for g in pair]
    kinds = tuple(gpu_class(uuid, inventory) for uuid in ends)
    joined = _joined(ends, inventory)
    mapped = pair in survey.mapped
    how: Hashable = None
    if joined is not None and joined.num_nvlinks and mapped:
        how = joined.num_nvlinks, joined.via_switch
    elif joined is not None:
        how = joined.common_ancestor
    return mapped, kinds, how


def gpu_class(uuid: str, inventory: Inventory | None) -> Hashable:
    """Return what equal GPUs have in common: model, memory and slot."""
    gpu = _gpu_of(uuid, inventory)
    if gpu is None:
        return None
    slot = gpu.pcie_max_generation, gpu.pcie_width, gpu.pcie_max_width
    return gpu.name, gpu.memory_bytes, slot, bool(gpu.slice_of)


def _gpu_of(uuid: str, inventory: Inventory | None) -> Gpu | None:
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    gpus = [] if inventory is None else inventory.gpus
    return next((gpu for gpu in gpus if gpu.uuid.endswith(bare)), None)


def _joined(uuids: Sequence[str], inventory: Inventory | None) -> GpuPair | None:
    gpus = [_gpu_of(uuid, inventory) for uuid in uuids]
    wanted = {None if gpu is None else gpu.index for gpu in gpus}
    pairs = [] if inventory is None else inventory.pairs
    return next((pair for pair in pairs if {pair.first, pair.second} == wanted), None)


def measure_part(
    device: GpuDevice,
    sizes: GpuSizes,
    part: ProbePart,
    *,
    seconds: float = math.inf,
    clock: Clock = time.perf_counter,
) -> list[GpuFindings]:
    """Measure one part: findings of each GPU that has some.

    No point is begun after `seconds`. A GPU that is spoiled before or after keeps nothing of the
    part but its notes.
    """
    budget = Budget(seconds, clock)
    found = {
        gpu: GpuFindings(gpu=gpu, uuid=device.uuid(gpu), processors=device.processors)
        for gpu in part.gpus
    }
    reasons = {gpu: device.spoiled(gpu) for gpu in part.gpus}
    usable = [gpu for gpu in part.gpus if not reasons[gpu]]
    benches = {
        gpu: Bench(
            device,
            sizes,
            gpu,
            Patience(lambda: 0.0, left=lambda: budget.left, clock=clock),
            found[gpu],
            is_late=lambda: budget.left <= 0,
        )
        for gpu in usable
    }
    if len(usable) == len(part.gpus) or part.kind == "pairs":
        _measure(benches, part)
    for gpu in usable:
        late = benches[gpu].late
        if late:
            words = f"time: gpu{gpu}: not reached in time: {'; '.join(late)}; {AGAIN}"
            found[gpu].notes.append(words)
        reasons[gpu] = device.spoiled(gpu)
    return [_unless_spoiled(found[gpu], reasons[gpu]) for gpu in part.gpus]


def _measure(benches: Mapping[int, Bench], part: ProbePart) -> None:
    """Fill the findings of the benches of one part."""
    if part.kind == "gpu":
        bench = benches[part.gpus[0]]
        if part.like is None:
            measure_gpu(bench)
        else:
            check_gpu(bench, part.like)
    elif part.kind == "crowd":
        for bench in benches.values():
            measure_crowd(bench, part.gpus)
    elif part.kind == "hidden":
        measure_hidden(benches[part.gpus[0]], len(part.gpus))
    elif part.kind == "pairs":
        first: tuple[GpuFindings, int] | None = None
        for reader, owner in part.pairs:
            if reader not in benches or owner not in benches:
                continue
            bench = benches[reader]
            if first is None:
                measure_pair(bench, owner, mapped=part.mapped)
                whole = bench.found.peer_gather if part.mapped else bench.found.peer_message
                first = (bench.found, owner) if whole else None
            else:
                check_pair(bench, owner, first, mapped=part.mapped)


def _unless_spoiled(found: GpuFindings, reasons: Sequence[str]) -> GpuFindings:
    if not reasons:
        return found
    words = f"gpu{found.gpu}: refused, nothing of it counts: {', '.join(reasons)}"
    return replace(_nothing_of(found), notes=[words])


def _nothing_of(found: GpuFindings) -> GpuFindings:
    return GpuFindings(gpu=found.gpu, uuid=found.uuid, processors=found.processors)


def merge_findings(found: Sequence[GpuFindings]) -> list[GpuFindings]:
    """Join the parts' findings of each GPU, GPUs in torch's order."""
    merged: dict[int, GpuFindings] = {}
    for each in found:
        known = merged.setdefault(each.gpu, _nothing_of(each))
        for one in fields(GpuFindings):
            old, new = getattr(known, one.name), getattr(each, one.name)
            if isinstance(new, dict):
                setattr(known, one.name, {**old, **new})
            elif one.name == "notes":
                known.notes = [*dict.fromkeys([*old, *new])]
            elif one.name.endswith("_bytes"):
                setattr(known, one.name, max(old, new))
    return [merged[gpu] for gpu in sorted(merged)]


RunPart = Callable[[ProbePart, float], list[GpuFindings]]
"""Measures a part within some seconds; returns nothing where it failed."""


def measure_parts(
    survey: Survey,
    inventory: Inventory | None,
    budget: Budget,
    run: RunPart,
    late: Callable[[ProbePart], None] = lambda _: None,
) -> list[GpuFindings]:
    """Measure all parts in turn, each within its share of the budget; `late` gets the others."""
    parts, found = plan_parts(survey, inventory), list[GpuFindings]()
    count = len(survey.uuids)
    whole: dict[Hashable, GpuFindings] = {}
    for number, part in enumerate(parts):
        if budget.left <= 0:
            late(part)
            continue
        kind = gpu_class(survey.uuids[part.gpus[0]], inventory) if part.kind == "gpu" else None
        if kind is not None:
            part = replace(part, like=whole.get(kind))
        share = part.weight / sum(each.weight for each in parts[number:])
        with budget.within(share):
            mine = run(part, budget.left)
        if kind is not None and mine and mine[0].copy and mine[0].flops:
            whole.setdefault(kind, mine[0])
        found += mine
    reads = {g: [owner for reader, owner in survey.mapped if reader == g] for g in range(count)}
    return [replace(each, reads=reads[each.gpu]) for each in merge_findings(found)]


def survey_of(device: GpuDevice) -> Survey:
    """Ask a device for its GPUs."""
    return Survey(uuids=[device.uuid(gpu) for gpu in range(device.num_gpus)], mapped=device.peers())


POINTS_SHARE = 0.8
"""Share of the GPUs' time after which no point is begun: the last one's end is waited for."""
SURVEY_SECONDS = 60.0
"""Longest wait for torch, CUDA and the list of GPUs."""
GRACE_SECONDS = 30.0
"""Longest wait beyond a part's time: for a start, the last point and its memory."""
RANKS_CALLS = 15
"""Calls of a collective whose seconds make one point."""
RANKS_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
QUICK_RANKS_BYTES = (1 << 10, 1 << 18, 1 << 24)
SURVEY = "gnnplan.planner.probe.gpu.torch_device:survey_task"
TASK = "gnnplan.planner.probe.gpu.torch_device:part_task"
JOIN = "gnnplan.planner.probe.gpu.torch_device:join_ranks_task"
CALL = "gnnplan.planner.probe.gpu.torch_device:call_ranks_task"
CONTEXT = "gnnplan.planner.probe.gpu.torch_device:ranks_context_task"


@dataclass(slots=True)
class RankProbe:
    """Measures the collectives of ranks on a GPU each, by the runtime's own communicator."""

    team: Team
    """One process per GPU."""
    budget: Budget
    found: GpuFindings
    """Of the first GPU: what is measured goes there."""
    quick: bool
    late: list[str] = field(default_factory=list[str])

    def measure(self, folder: Path) -> None:
        """Fill the findings: fewest ranks first, and no point after the budget's end."""
        size = self.team.size
        counts = [2, size] if self.quick else [2**i for i in range(1, size.bit_length())]
        counts = sorted({*counts, size})
        self.team.run(JOIN, path=folder / "ranks", size=size, groups=counts)
        for ranks in counts:
            self._point("asked", self.found.asked, (ranks,), 0, ranks)
            for num_bytes in QUICK_RANKS_BYTES if self.quick else RANKS_BYTES:
                for name, points in (("sum", self.found.sums), ("rows", self.found.exchanges)):
                    self._point(name, points, (num_bytes, ranks), num_bytes, ranks)
        self.found.ranks_context_bytes = max(self.team.run(CONTEXT))
        if self.late:
            words = f"time: ranks on GPUs: not reached in time: {'; '.join(self.late)}; {AGAIN}"
            self.found.notes.append(words)

    def _point(
        self, operation: str, points: Points, place: tuple[int, ...], num_bytes: int, ranks: int
    ) -> None:
        """Measure the seconds from the last rank's entry to the last one's exit."""
        if self.budget.left <= 0:
            self.late.append(f"{operation} at {', '.join(map(str, place))}")
            return
        arguments = {"operation": operation, "num_bytes": num_bytes, "calls": RANKS_CALLS}
        moments = self.team.run(CALL, ranks=ranks, size=ranks, **arguments)
        entered, left = (np.max([each[way] for each in moments], axis=0) for way in (0, 1))
        points[place] = summarize([max(LEAST_CALL_SECONDS, float(s)) for s in left - entered])


LEAST_CALL_SECONDS = 1e-7


def measure_ranks(
    context: ProbeContext, part: ProbePart, uuid: str, start: Callable[[int], Team]
) -> list[GpuFindings]:
    """Measure the collectives of ranks within the budget; what fails leaves a note."""
    found = GpuFindings(gpu=part.gpus[0], uuid=uuid, processors=1)
    try:
        with start(len(part.gpus)) as team:
            team.timeout_seconds = context.budget.left + GRACE_SECONDS
            probe = RankProbe(team, context.budget, found, context.sizes.name != FULL.name)
            probe.measure(context.scratch)
    except WorkerFailed as error:
        found.notes.append(f"{part.words}: not measured: {error}")
    return [found]


@dataclass(slots=True)
class Runner:
    """Runs tasks in a process of their own, and in a new one after one that failed."""

    start: Callable[[], Team]
    notes: list[str]
    """Notes on tasks that failed."""
    until: float | None = None
    """Reading of time.monotonic after which nothing is waited for."""
    team: Team | None = field(default=None, init=False)

    def run(self, task: str, words: str, limit: float, **arguments: object) -> object:
        """Return a task's answer; None and a note where it failed or took too long."""
        try:
            if self.team is None:
                self.team = self.start().__enter__()
            left = math.inf if self.until is None else self.until - time.monotonic()
            self.team.timeout_seconds = max(1.0, min(limit, left))
            return self.team.run(task, ranks=1, **arguments)[0]
        except WorkerFailed as error:
            self.notes.append(f"{words}: not measured: {error}")
            self.close()
            return None

    def close(self) -> None:
        """End the process, whatever it is doing."""
        team, self.team = self.team, None
        if team is not None:
            team.kill()
            team.close()


def measure(
    context: ProbeContext,
    gpus: Inventory | None,
    start: Callable[[], Team] = lambda: Team(1),
    start_ranks: Callable[[int], Team] = Team,
) -> list[GpuFindings]:
    """Measure the GPUs that the driver lists; what fails leaves a note and the rest of the probe.

    `gpus` are from `inventory`, or None; `start` starts the process that measures, `start_ranks` so
    many that measure together.
    """
    if gpus is None:
        return []
    runner = Runner(start, context.notes, context.team.until)
    try:
        return _measured_by(runner, context, gpus, start_ranks)
    finally:
        runner.close()


def _measured_by(
    runner: Runner, context: ProbeContext, gpus: Inventory, start_ranks: Callable[[int], Team]
) -> list[GpuFindings]:
    survey = runner.run(SURVEY, GPUS_LOST.rstrip(": "), SURVEY_SECONDS)
    if not isinstance(survey, Survey):
        context.notes += [survey] if isinstance(survey, str) else []
        return []
    quick, room = context.sizes.name != FULL.name, available_ram_bytes()

    def run(part: ProbePart, seconds: float) -> list[GpuFindings]:
        if part.kind == "ranks":
            runner.close()  # its contexts would be counted as the ranks' own
            return measure_ranks(context, part, survey.uuids[part.gpus[0]], start_ranks)
        found = runner.run(
            TASK, part.words, seconds + GRACE_SECONDS, part=part, quick=quick, host_bytes=room,
            seconds=seconds,
        )  # fmt: skip
        return cast("list[GpuFindings]", found or [])

    def late(part: ProbePart) -> None:
        context.notes.append(f"time: {part.words}: not reached in time; {AGAIN}")

    with context.budget.within(POINTS_SHARE):
        return measure_parts(survey, gpus, context.budget, run, late)
