"""Captured steps against the GPU's own work in them, PyG beside, and one that overflows.

The step is the runtime's own loop under a plan that says `step: captured`, batches included.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.schema import StepShapes
from gnnplan.runtime.processor import EMULATED, emulated_gpu
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.captured import CapturedLoop
from tests.benchmarks.common import record
from tests.silicon.bars import Bars, open_bars
from tests.silicon.graphs import open_kind
from tests.silicon.queue import ROOT, parse_lines
from tests.silicon.setting import Setting
from tests.silicon.training import (
    SIZES,
    Sizes,
    Training,
    open_training,
    worst_apart,
    write_plan,
)
from tests.support.plans import change_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is trained."""

    graph: str = "nodes"
    """Kind, as in `graphs`."""
    work: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the workload that are not GraphSAGE's."""
    most_seconds: float | None = None
    """Bar of a step on an H100 or H200, where there is one."""


CASES = {
    "sage": Case(most_seconds=1.4e-3),
    "sage_tf32": Case(work={"precision": "tf32"}, most_seconds=0.9e-3),
    "sage_bfloat16": Case(work={"precision": "bfloat16"}, most_seconds=0.9e-3),
    "gcn": Case(work={"model": "gcn"}),
    "gat": Case(work={"model": "gat", "heads": 4}),
    "rgcn": Case(graph="typed", work={"model": "rgcn"}),
    "links": Case(graph="links"),
}
MOST_RATIO = 1.3
"""Bar of a step's seconds over the GPU's own work in it."""
LEAST_OVER_PYG = 12.0
"""Bar of PyG's seconds over ours."""
WARM_STEPS, COUNTED_STEPS, PROFILED_STEPS = 40, 200, 20
LAST_SECONDS = 45.0
"""Least that must be left to begin with a case: its own, those of profiles, overflow and PyG."""
DRAWN = 20
"""Batches whose largest sizes the shapes are made of."""
MARGIN = 1.1
LANES = {"captured_step_lanes": False, "captured_step_lanes_host": True}
"""Names of records of lanes, and whether rows lie on the host."""
MOST_LANES_RATIO = 1.02
"""Bar of a step with the next batch drawn beside it over draw and step in turn."""
OVERFLOW_TOLERANCE = 1e-3
"""Relative, of a loss of a step that was redone."""


def time_steps(setting: Setting, *, cases: Sequence[str]) -> None:
    """Time steps of models and tasks, a forced overflow, and PyG's step beside GraphSAGE's."""
    with open_bars(setting) as (bars, folder):
        ours = time_cases(setting, bars, cases, folder)
        graph = open_kind(setting, "nodes", folder)
        with await_pyg(setting, graph) as time_pyg:  # while nothing is timed
            with bars.attempt("captured_step_overflow"):
                force_overflow(setting, bars, graph, folder / "overflow")
            with bars.attempt("captured_beside_pyg"):
                hold_pyg(bars, time_pyg(), ours.get("sage"))


def time_cases(
    setting: Setting, bars: Bars, cases: Sequence[str], folder: Path
) -> dict[str, float]:
    """Time cases, each by its bars; returns the seconds of a step of those that were timed.

    All are timed before the first is profiled: a profiler slows what its process does later.
    """
    warm, counted = (1, 2) if setting.emulated else (WARM_STEPS, COUNTED_STEPS)
    timed: dict[str, tuple[Training, float]] = {}
    shapes: dict[str, StepShapes | None] = {}  # the batches of a graph are those of all its models
    with ExitStack() as stack:
        for name in cases:
            case = CASES[name]
            if setting.left_seconds < LAST_SECONDS:
                _hold_case(bars, name, None, {}, why="no time was left")
                continue
            with bars.attempt(f"captured_step_{name}"):
                graph, place = open_kind(setting, case.graph, folder), folder / f"plan-{name}"
                training = stack.enter_context(
                    open_captured(setting, graph, place, shapes=shapes.get(case.graph), **case.work)
                )
                shapes[case.graph] = training.loader.plan.strategy.shapes
                training.run(warm)
                timed[name] = training, training.time(counted)
        for number, (name, (training, step)) in enumerate(timed.items(), 1):
            with bars.attempt(f"captured_step_{name}"):
                profiled = 2 if setting.emulated else PROFILED_STEPS
                totals = training.profile(profiled, last=number == len(timed))
                assert all(loss > 0 for loss in training.losses)
                overflows = training.loop.overflowed
                _hold_case(bars, name, step, totals, overflows=overflows, steps=counted)
    return {name: step for name, (_, step) in timed.items()}


def _hold_case(
    bars: Bars, name: str, step: float | None, totals: Mapping[str, float], **extra: Any
) -> None:
    """Hold a step by the totals of its profile; without them it misses its bars."""
    own = totals.get("gpu_seconds")
    bars.hold(
        f"captured_step_{name}", step, "s", ratio=step / own if step and own else None,
        most=CASES[name].most_seconds, most_ratio=MOST_RATIO, baseline="the GPU's own work",
        gpu_seconds=own, launches=totals.get("launches"), kernels=totals.get("kernels"), **extra,
    )  # fmt: skip


@contextmanager
def await_pyg(setting: Setting, graph: Graph) -> Iterator[Callable[[], dict[str, Any]]]:
    """Start PyG on the same graph and sizes; what is yielded lets it train and returns its line."""
    how = ["--emulate"] if setting.emulated else []
    command = [sys.executable, "-m", "tests.silicon.beside", str(graph.path), *how]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:

        def time_pyg() -> dict[str, Any]:
            said = child.communicate("train\n")[0]
            if child.returncode:
                raise subprocess.CalledProcessError(child.returncode, command)
            (line,) = [each for each in parse_lines(said) if each["name"] == "pyg_step"]
            return line

        try:
            yield time_pyg
        finally:
            child.kill()


def hold_pyg(bars: Bars, line: dict[str, Any], ours: float | None) -> None:
    """Hold the seconds of our step against PyG's."""
    record(**line)
    bars.hold(
        "captured_beside_pyg", ours, "s", ratio=line["value"] / ours if ours else None,
        least_ratio=LEAST_OVER_PYG, baseline=line["baseline"], baseline_seconds=line["value"],
    )  # fmt: skip


def force_overflow(setting: Setting, bars: Bars, graph: Graph, folder: Path) -> None:
    """Hold losses with shapes that some batches overflow against those of eager steps."""
    steps = 4 if setting.emulated else 60
    with open_captured(setting, graph, folder, quantile=0.5, dropout=0.3) as found:
        found.run(steps)
    shapes = found.loader.plan.strategy.shapes
    with open_captured(setting, graph, folder, shapes=shapes, dropout=0.3) as plain:
        # Its own step on each batch is the eager one, with the same draws.
        plain.loop.model.train()
        device = plain.loop.gradients.flat.device
        with closing(PlannedLoader(folder, graph, device=device, on_device=True)) as eager:
            while len(plain.losses) < steps:
                for batch in eager.batches(steps - len(plain.losses)):
                    plain.losses.append(plain.loop.step(batch, len(plain.losses)))
    worst, overflows = worst_apart(found.losses, plain.losses), float(found.loop.overflowed)
    bars.hold("captured_step_overflow", overflows, "steps", least=1.0, steps=steps)
    bars.hold("captured_step_overflow_apart", worst, "relative", most=OVERFLOW_TOLERANCE)


def time_lanes(setting: Setting) -> None:
    """Time steps that draw the next batch beside them, against draw and step in turn."""
    with open_bars(setting) as (bars, folder):
        graph = open_kind(setting, "nodes", folder)
        for name, on_host in LANES.items():
            with bars.attempt(name):
                _time_lanes(setting, bars, graph, folder / name, name, on_host=on_host)


def _time_lanes(
    setting: Setting, bars: Bars, graph: Graph, folder: Path, name: str, *, on_host: bool
) -> None:
    warm, counted = (1, 3) if setting.emulated else (WARM_STEPS, COUNTED_STEPS)
    took: list[float] = []
    losses: list[list[float]] = []
    shapes: StepShapes | None = None
    for ahead in (1, 0):
        with open_captured(setting, graph, folder, shapes=shapes, rows_on_host=on_host) as training:
            training.run(warm)
            took.append(training.time(counted))
        losses.append(training.losses)
        assert isinstance(training.loop, CapturedLoop)
        assert training.loop.shapes.ahead == ahead
        shapes = replace(training.loop.shapes, ahead=0)
    bars.hold(
        name, took[0], "s", ratio=took[0] / took[1], most_ratio=MOST_LANES_RATIO,
        baseline="draw and step in turn", baseline_seconds=took[1], steps=counted,
    )  # fmt: skip
    bars.hold(f"{name}_apart", worst_apart(*losses), "relative", most=OVERFLOW_TOLERANCE)


def device_of(setting: Setting) -> torch.device:
    """Return the device of an experiment's ranks; on cores an emulated GPU, started if need be."""
    if not setting.emulated:
        return setting.device
    if emulated_gpu() is None:
        from gnnplan.runtime.emulation.gpu import EmulatedGpu
        from gnnplan.runtime.emulation.threads import start

        start(EmulatedGpu())
    return EMULATED


@contextmanager
def open_captured(
    setting: Setting,
    graph: Graph,
    folder: Path,
    *,
    quantile: float = 1.0,
    shapes: StepShapes | None = None,
    rows_on_host: bool = False,
    sizes: Sizes = SIZES,
    **work: Any,
) -> Iterator[Training]:
    """Open a loader with the lists on the device, and the captured loop over it.

    Args:
        setting: of the experiment.
        graph: what is trained on.
        folder: of the plan.
        quantile: of the sizes of some batches, which shapes are made of; 1: with a margin.
        shapes: of an earlier loop over such batches; None draws some to find them.
        rows_on_host: whether all rows lie there; else on the device.
        sizes: batch size, hidden columns and fan-outs; on cores tiny ones in their place.
        work: further fields of the workload.
    """
    device = device_of(setting)
    plan = write_plan(setting, graph, folder, sizes=sizes, rows_on_host=rows_on_host, **work)
    if shapes is None:
        shapes = _draw_shapes(setting, graph, folder, device, quantile)
    on_gpu = replace(
        plan.strategy.devices[0], kind="cuda", emulated=setting.emulated, memory="gpu0.memory"
    )
    plan = change_strategy(plan, folder, devices=[on_gpu], step="captured", shapes=shapes)
    with open_training(setting, plan, graph, folder, device) as training:
        yield training


def _draw_shapes(
    setting: Setting, graph: Graph, folder: Path, device: torch.device, quantile: float
) -> StepShapes:
    with closing(PlannedLoader(folder, graph, device=device, on_device=True)) as eager:
        return find_shapes(list(eager.batches(3 if setting.emulated else DRAWN)), quantile)


def find_shapes(drawn: list[MiniBatch], quantile: float) -> StepShapes:
    """Return shapes a margin above a quantile of the sizes of some batches; all seeds fit."""
    rows, edges = (
        np.quantile([np.cumsum(sizes) for sizes in found], quantile, axis=0)
        for found in (
            [batch.num_sampled_nodes for batch in drawn],
            [batch.num_sampled_edges for batch in drawn],
        )
    )
    margin = MARGIN if quantile == 1 else 1.0
    seeds = [batch.num_seeds for batch in drawn]
    most = max(seeds) if min(seeds) == max(seeds) else int(max(seeds) * MARGIN)  # ends of links
    return StepShapes(
        rows=[most + 1, *(int(each * margin) + 2 for each in rows[1:])],
        edges=[int(each * margin) + 1 for each in edges],
        drawn=True,
        ahead=1,
    )
