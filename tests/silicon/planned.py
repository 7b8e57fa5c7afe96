"""Configurations that are planned and then run on the GPU that is here: was the plan right?

Each is planned for a GPU whose memory has room for a share of its rows, and the chosen plan and its
runners-up take steps one after the other, in this process, with as much memory as the plan fills 97
hundredths of. Timing the model happens in this process too, and is cut short: a process of its own
takes ten seconds to start. The hardest to foresee come first.
"""

import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from gnnplan.planner import pipeline
from gnnplan.planner.assemble import assemble
from gnnplan.planner.cost.memory import RESERVE
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import choose_machine
from gnnplan.planner.profile import profile
from gnnplan.planner.queries.tune import shortlist, tune
from gnnplan.planner.queries.tuned import TuneRequest
from gnnplan.planner.search.choose import PlacedCandidate, choose
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.comm.mesh import open_mesh
from gnnplan.runtime.device import use_threads
from gnnplan.runtime.errors import forget_warnings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import STEP
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.worker import open_loop
from tests.silicon.bars import Bars, open_bars
from tests.silicon.graphs import open_kind
from tests.silicon.queue import RECORDS, hash_files, parse_lines
from tests.silicon.setting import Setting
from tests.silicon.training import Training
from tests.support.emulated import emulated_machine

PROBE_SECONDS = 25.0
"""Of a quick probe, where this machine was not probed yet."""
LOOP_SECONDS = 2.0
"""Of timing the runtime's loop for one configuration."""
LAST_SECONDS = 25.0
"""Least that must be left to begin with a configuration."""
RUNNERS_UP = 5
WARM_STEPS, COUNTED_STEPS = 16, 32
TINY_SPARE = 1 << 20
"""Bytes on cores for buffers of a fixed size, which are small beside a real graph's rows."""
FILLED = 0.97
"""Share of the GPU's memory that a plan takes."""
MOST_MEDIAN, MOST_P90, MOST_REGRET = 0.08, 0.15, 0.02
MOST_TUNE_SECONDS = 180.0
"""Bars: error of the predicted step, at the median and the 90th percentile; step of the chosen plan
over the best of all that ran, less one; seconds of `gnnplan tune`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One request."""

    graph: str
    """Kind, as in `graphs`."""
    work: Workload
    room: float
    """Share of the rows that the GPU has room for."""

    @property
    def name(self) -> str:
        """What a reader sees."""
        work = self.work
        drawn = ",".join(map(str, work.fanouts))
        kind = "" if work.precision == "float32" else f" {work.precision}"
        return (
            f"{self.graph} {work.model}{kind} {work.num_layers}x{work.hidden} ({drawn}) "
            f"batch {work.batch_size}, room for {self.room:.0%}"
        )


def _of(
    graph: str, model: str, fanouts: list[int], batch: int, hidden: int, room: float, **work: Any
) -> Configuration:
    made = Workload(
        model=model, num_layers=len(fanouts), fanouts=fanouts, batch_size=batch, hidden=hidden,
        **work,
    )  # fmt: skip
    return Configuration(graph=graph, work=made, room=room)


CONFIGURATIONS = (
    _of("nodes", "sage", [15, 10, 5], 1024, 256, 0.3),
    _of("links", "sage", [10, 5], 1024, 128, 1.0),
    _of("typed", "rgcn", [10, 5], 1024, 128, 1.0),
    _of("nodes", "gat", [15, 10, 5], 512, 128, 0.3, heads=4),
    _of("nodes", "sage", [25, 10], 8000, 256, 0.1),
    _of("nodes", "sage", [5, 5], 256, 64, 1.0),
    _of("nodes", "gcn", [15, 10, 5], 512, 128, 0.5),
    _of("nodes", "sage", [15, 10, 5], 1024, 256, 1.0),
    _of("typed", "rgcn", [15, 10], 512, 64, 0.5),
    _of("nodes", "gat", [10, 10], 1024, 256, 1.0, heads=4),
    _of("links", "gcn", [15, 10], 2048, 256, 1.0),
    _of("nodes", "sage", [20], 4096, 512, 0.2),
    _of("nodes", "sage", [15, 10, 5], 1024, 256, 1.0, precision="bfloat16"),
    _of("nodes", "gcn", [10, 10], 4096, 256, 1.0),
    _of("nodes", "sage", [10, 10, 10], 256, 32, 0.2),
    _of("nodes", "sage", [15, 10], 2048, 512, 1.0, precision="tf32"),
    _of("nodes", "gcn", [5], 8000, 64, 0.5),
    _of("links", "gat", [10, 5], 512, 64, 1.0, heads=4),
    _of("nodes", "gat", [5, 5], 4096, 64, 0.5, heads=4),
    _of("typed", "rgcn", [5, 5, 5], 2048, 128, 1.0),
)
LOTS = {"hardest": (0, 8), "middle": (8, 16), "rest": (16, 20)}
"""First and end of what one run takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """How one configuration went."""

    error: float
    """Of the chosen plan's predicted step, relative to the measured one."""
    regret: float
    short: int
    """Plans that found too little memory."""


def run_lot(setting: Setting, *, lot: str) -> None:
    """Plan and run some configurations while time is left, and hold all against the bars.

    Args:
        setting: the device.
        lot: which, of `LOTS`; those that an earlier run of the same files has done are kept.
    """
    chosen = CONFIGURATIONS[slice(*LOTS[lot])]
    known = {} if setting.emulated else done_before(RECORDS / f"plans_{lot}.jsonl", lot)
    with open_bars(setting) as (bars, folder), in_this_process():
        found, left = list[Ran](), list[str]()
        if setting.emulated:
            os.environ["GNNPLAN_CACHE"] = str(folder / "cache")
            chosen = tuple(tiny(each) for each in chosen[:2])
        machine = machine_here(setting)
        for number, each in enumerate(chosen):
            if each.name in known:
                found.append(known[each.name])
                continue
            if setting.left_seconds < LAST_SECONDS:
                left.append(each.name)
                continue
            with bars.attempt(each.name):
                found.append(run_one(setting, bars, each, machine, folder / str(number)))
        judge(bars, found, len(chosen), left)


def done_before(record: Path, lot: str) -> dict[str, Ran]:
    """Read the configurations that earlier runs of these very files have measured, by name."""
    from tests.silicon.experiments import EXPERIMENTS

    (now,) = [hash_files(each) for each in EXPERIMENTS if each.name == f"plans_{lot}"]
    text = record.read_text() if record.exists() else ""
    lines = [line for line in parse_lines(text) if line.get("hash") == now]
    return {
        line["configuration"]: Ran(error=line["error"], regret=line["regret"], short=line["short"])
        for line in lines
        if line["name"] == "planned_step"
    }


def judge(bars: Bars, found: Sequence[Ran], asked: int, left: Sequence[str] = ()) -> None:
    """Hold what was found over all configurations; those `left` had no time."""
    errors, count = [each.error for each in found], len(found)
    median, p90 = (float(np.percentile(errors, at)) if errors else None for at in (50, 90))
    worst = max((each.regret for each in found), default=None)
    bars.hold("planned_step_error_median", median, "share", most=MOST_MEDIAN, configurations=count)
    bars.hold("planned_step_error_p90", p90, "share", most=MOST_P90, configurations=count)
    bars.hold("planned_choice_worst", worst, "share", most=MOST_REGRET, configurations=count)
    short = float(sum(each.short for each in found))
    bars.hold("planned_out_of_memory", short, "plans", most=0.0, configurations=count)
    bars.hold(
        "planned_configurations", float(count), "configurations", least=float(asked),
        left=list(left),
    )  # fmt: skip


def tiny(each: Configuration) -> Configuration:
    """Return a configuration for cores."""
    work = replace(each.work, batch_size=16, hidden=8, fanouts=[2] * each.work.num_layers, heads=2)
    return replace(each, work=work)


def machine_here(setting: Setting) -> MachineModel:
    """Return the machine that is here, probed once; on cores one of tests."""
    return emulated_machine() if setting.emulated else choose_machine(None, seconds=PROBE_SECONDS)


class Here:
    """Stands for the team of timing processes: this process answers."""

    def __init__(self, size: int) -> None:
        assert size == 1

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, requests: Sequence[str], threads: int) -> list[str]:
        """Answer one request (a line)."""
        del threads
        from gnnplan.planner.profile.loading import KeptLoaders
        from gnnplan.planner.profile.timing_process import build

        (line,) = requests
        return [json.dumps(codec.to_plain(build(KeptLoaders(), json.loads(line))()))]


def in_this_process() -> AbstractContextManager[object]:
    """Let GPUs be timed here, and shortly."""
    return patch.multiple(profile, Team=Here, LOOP_SECONDS=LOOP_SECONDS)


def run_one(
    setting: Setting, bars: Bars, each: Configuration, machine: MachineModel, folder: Path
) -> Ran:
    """Plan a configuration, and run the chosen plan and its runners-up."""
    graph = open_kind(setting, each.graph, folder.parent)
    search, explored, listed = plan_one(setting, graph, each, machine)
    predicted, measured, names = list[float](), list[float | None](), list[str]()
    use = None
    for number, candidate in enumerate(listed):
        plan = save_plan(*assemble(search, explored, candidate), folder / str(number))
        use = use or plan.prediction.memory_bytes["rank0"]
        predicted.append(plan.prediction.step_seconds.value)
        names.append(candidate.name)
        measured.append(measure(setting, plan, folder / str(number), graph))
    assert use is not None
    assert measured[0] is not None, f"the chosen plan found too little memory: {names[0]}"
    step, best = measured[0], min(each for each in measured if each is not None)
    error, regret = abs(predicted[0] / step - 1), step / best - 1
    short = sum(each is None for each in measured)
    bars.hold(
        "planned_step", step, "s", baseline=predicted[0], ratio=predicted[0] / step, error=error,
        regret=regret, configuration=each.name, chosen=names[0], short=short,
        filled=use.total / use.capacity,
        candidates=[list(one) for one in zip(names, predicted, measured, strict=True)],
    )  # fmt: skip
    return Ran(error=error, regret=regret, short=short)


def plan_one(
    setting: Setting, graph: Graph, each: Configuration, machine: MachineModel
) -> tuple[Search, SearchResult, list[PlacedCandidate]]:
    """Plan for the memory that has room for the share of the rows; the chosen candidate first."""
    settings = PlanSettings(workload=each.work, devices=1, step="auto")
    plain = pipeline.search_for(graph, replace(settings, policy="none"), machine)
    least = choose(plain.explore().priced, machine.noise).prediction.memory_bytes["rank0"]
    rows = round(each.room * graph.num_nodes) * graph.row_bytes
    needed = least.total - least.parts["reserve"] + rows + TINY_SPARE * setting.emulated
    settings = replace(settings, device_memory_bytes=int(needed / (1 - RESERVE)) + 1)
    search = pipeline.search_for(graph, settings, machine)
    explored = search.explore()
    chosen = choose(explored.priced, machine.noise)
    most = 1 if setting.emulated else RUNNERS_UP
    return search, explored, shortlist(explored.priced, chosen, 1 + most)


def measure(setting: Setting, plan: Plan, folder: Path, graph: Graph) -> float | None:
    """Return the median seconds of a plan's steps; None where it finds too little memory."""
    warm, counted = (1, 2) if setting.emulated else (WARM_STEPS, COUNTED_STEPS)
    forget_warnings()
    with capped(setting, plan), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            seconds = _steps(setting, plan, folder, graph, warm, counted)
        except torch.OutOfMemoryError:
            return None
    short = [str(each.message) for each in said if "read from the host (" in str(each.message)]
    return None if short else seconds


def _steps(
    setting: Setting, plan: Plan, folder: Path, graph: Graph, warm: int, counted: int
) -> float:
    if plan.strategy.emulated:
        from gnnplan.runtime.emulation.threads import stop

        stop()
    with closing(open_mesh(plan)) as mesh:
        use_threads(plan, 0, pin=False)
        loader, loop = open_loop(load_plan(folder), folder, graph, mesh)
        assert isinstance(loader, PlannedLoader)
        with closing(loader):
            Training(setting, loader, loop).run(warm + counted)
            return float(np.median(loader.meter.seconds(STEP, skip_steps=warm)))


@contextmanager
def capped(setting: Setting, plan: Plan) -> Iterator[None]:
    """Limit torch to the memory that the plan fills `FILLED` of, its context left out."""
    if setting.emulated:  # which gives a plan its own budget and no byte more
        yield
        return
    use = plan.prediction.memory_bytes["rank0"]
    limit = use.capacity / FILLED - use.parts.get("context", 0)
    total = torch.cuda.get_device_properties(0).total_memory
    setting.release()  # loops of earlier plans and their graphs
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def tune_in_full(setting: Setting) -> None:
    """Plan, and tune as `gnnplan tune` does unless told otherwise; on cores in small."""
    work = CONFIGURATIONS[0].work
    with open_bars(setting) as (bars, folder):
        if setting.emulated:
            os.environ["GNNPLAN_CACHE"] = str(folder / "cache")
        graph = open_kind(setting, "nodes", folder)
        if setting.emulated:  # on the cores that are here: emulated GPUs are not timed
            work, asked = tiny(CONFIGURATIONS[0]).work, TuneRequest(top=2, steps=5, rounds=1)
            pipeline.first_answer(
                graph.path, PlanSettings(workload=work, devices=1), out=folder / "plan"
            )
        else:
            asked, settings = TuneRequest(), PlanSettings(workload=work, devices=1, step="auto")
            with in_this_process():
                pipeline.plan(
                    graph.path, settings, machine=machine_here(setting), out=folder / "plan"
                )
        start = time.perf_counter()
        found = tune(folder / "plan", asked, output=folder / "tuned")
        seconds = time.perf_counter() - start
        rows = [[row.name, row.predicted.value, row.measured.median] for row in found.candidates]
        bars.hold(
            "tune_full", seconds, "s", most=MOST_TUNE_SECONDS, candidates=rows,
            regret=found.model_regret, notes=found.notes,
        )  # fmt: skip
