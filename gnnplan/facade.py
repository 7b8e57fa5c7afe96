"""Planning, explaining and training as three functions; each is a command of `gnnplan` too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnplan.planner.machine import MachineModel
from gnnplan.planner.progress import Progress
from gnnplan.planner.settings import PlanSettings, change_settings
from gnnplan.runtime.plan import Plan
from gnnplan.runtime.report import RunReport


def plan(
    graph: str | Path,
    out: str | Path,
    *,
    machine: str | Path | MachineModel | None = None,
    settings: PlanSettings | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    **choices: Any,
) -> Plan:
    """Find the plan with the lowest predicted seconds per optimiser step, and write it.

    Args:
        graph: dataset folder.
        out: plan folder to write.
        machine: a preset's name, a machine file, or a machine; None: this one, measured at first.
        settings: what is to be trained and what may be used; None: the defaults.
        progress: called with what is going on and the share done, 0 to 1.
        say: called with the first answer, which is there at once, and with what measuring changed.
        choices: fields of `PlanSettings` and of its `workload` that differ from `settings`, such as
            `devices=2, batch_size=512, fanouts=[10, 5]`; `quick=True` stops at the first answer,
            `thorough=True` measures all, and `epochs` says how long the training is, of which
            measuring takes a tenth at most.

    Returns:
        The plan as written.

    Raises:
        SettingsError: an unknown name or a value that cannot be; nothing was measured or written.
        DatasetError: the graph is missing, damaged or inconsistent.
        PlanDoesNotFit: no candidate fits the memory; the text is the sum.
        InputError: `out` cannot be written.
    """
    from gnnplan.planner.refine import plan_in_time
    from gnnplan.planner.request import check_request, refuse_unused

    graph, out = Path(graph), Path(out)
    wanted = change_settings(settings or PlanSettings(), choices)
    refuse_unused(wanted)
    if not isinstance(machine, MachineModel):
        machine = None if machine is None else str(machine)
        check_request(graph, wanted, out=out, machine=machine)
    return plan_in_time(graph, wanted, machine=machine, out=out, progress=progress, say=say)


def explain(plan: str | Path) -> str:
    """Explain where a step's time goes, where rows are kept and why the next best plan lost.

    Args:
        plan: plan folder.

    Raises:
        PlanError: the folder holds no plan, or a damaged one.
    """
    from gnnplan.planner.queries.explain import explain as find_reasons, render
    from gnnplan.runtime.plan.io import load_plan

    return render(find_reasons(load_plan(Path(plan))))


def train(plan: str | Path, *, epochs: int = 1, **options: Any) -> RunReport:
    """Train by a plan on its ranks, in processes of their own; wait until they have ended.

    Args:
        plan: plan folder.
        epochs: passes over the training nodes.
        options: further arguments of `gnnplan.runtime.launch.launch.train`, such as `resume=True`.

    Returns:
        What was measured; the run folder holds it as report.json.

    Raises:
        PlanError: the plan is damaged, or names another graph or machine.
        WorkerFailed: a rank failed or hung; the text names the cause.
    """
    from gnnplan.runtime.launch.launch import train as start_training

    return start_training(Path(plan), epochs=epochs, **options)
