"""Planning, explaining and training as three functions; each is a command of `gnnplan` too."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine import MachineModel
from gnnplan.planner.settings import PlanSettings, change_settings, check_values
from gnnplan.planner.units import Progress
from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.plan import Plan
from gnnplan.runtime.plan.setting import make_from
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
    wanted = change_settings(_request(settings), choices)
    refuse_unused(wanted)
    if not isinstance(machine, MachineModel):
        machine = None if machine is None else str(machine)
        check_request(graph, wanted, out=out, machine=machine)
    return plan_in_time(graph, wanted, machine=machine, out=out, progress=progress, say=say)


def explain(plan: str | Path, *, today: str | None = None) -> str:
    """Explain where a step's time goes, where rows are kept and why the next best plan lost.

    Args:
        plan: plan folder.
        today: what you run today, such as "pyg-loader:workers=8" or "dgl-uva", whose epoch is
            estimated beside the plan's; None: PyG's loader on half of the cores.

    Raises:
        PlanError: the folder holds no plan, or a damaged one.
        SettingsError: there is no such system, or it cannot do what the plan does.
    """
    from gnnplan.planner.queries.explain import explain as find_reasons, render
    from gnnplan.runtime.plan.io import load_plan

    return render(find_reasons(load_plan(Path(plan)), today))


def train(
    plan: str | Path,
    *,
    epochs: int = 1,
    out: str | Path | None = None,
    machine: str | None = None,
    settings: PlanSettings | None = None,
    say: Callable[[str], None] = print,
    **options: Any,
) -> RunReport:
    """Train by a plan, or plan a dataset and train it; wait until all processes have ended.

    A dataset is trained under its first answer at once. A training of ten minutes or more (with
    `thorough=True` in its settings: any) tries the next candidates for some steps each, and goes on
    under the fastest; a shorter one keeps the first answer.

    Args:
        plan: plan folder, or dataset folder.
        epochs: passes over the training nodes.
        out: plan folder to write for a dataset; None: NAME-plan here.
        machine: of a dataset: a preset's name or a machine file; None: this one.
        settings: of a dataset: what is to be trained and what may be used; None: the defaults.
        say: called with lines on a dataset's plans.
        options: further arguments of `gnnplan.runtime.launch.launch.train`, such as `resume=True`,
            which goes on with a run in `out` of the same dataset, machine and settings, or with a
            plan's own run and the plans that it tries.

    Returns:
        What was measured; the run folder holds it as report.json.

    Raises:
        PlanError: the plan is damaged, or names another graph or machine.
        SettingsError: planning arguments beside a plan, values that cannot be, or a run to go on
            with that another request began.
        DatasetError: the dataset is damaged or inconsistent.
        WorkerFailed: a rank failed or hung; the text names the cause.
    """
    from gnnplan.planner.queries.tuned import train_and_keep, train_dataset
    from gnnplan.runtime.graph.format import META_FILE
    from gnnplan.runtime.launch.config import read_trials

    _check_options({"epochs": epochs, **options})
    place = Path(plan)
    watched: dict[str, Any] = {**options}
    watched["progress"] = options.get("progress") or (lambda _: None)
    if (place / META_FILE).is_file():
        if unfit := sorted({"run_folder", "trials", "early"} & options.keys()):
            raise SettingsError(
                f"{place}: expected {', '.join(unfit)} for a plan alone, found them beside a "
                "dataset, whose run is in `out`; leave them out"
            )
        wanted = Path(f"{place.resolve().name}-plan") if out is None else Path(out)
        return train_dataset(
            place, _request(settings), machine=machine, out=wanted, epochs=epochs, say=say,
            **watched,
        )  # fmt: skip
    if out is not None or machine is not None or settings is not None:
        raise SettingsError(
            f"{place}: expected out, machine and settings for a dataset alone, found them beside a "
            "plan; leave them out, or name the dataset"
        )
    if options.get("resume") and "run_folder" not in options and read_trials(place / "run"):
        return train_and_keep(place, None, say=say, epochs=epochs, **watched)
    from gnnplan.runtime.launch.launch import train as start_training

    return start_training(place, epochs=epochs, **options)


def _request(settings: object) -> PlanSettings:
    """Return the settings that were given, or the defaults; refuse what is something else."""
    if settings is not None and not isinstance(settings, PlanSettings):
        raise SettingsError(
            f"settings: expected PlanSettings, found {settings!r:.80}; give "
            "gnnplan.PlanSettings(), or single settings by name"
        )
    return settings or PlanSettings()


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a run that there are not, or whose values cannot be."""
    from gnnplan.runtime.launch.config import RunConfig, TrainOptions
    from gnnplan.runtime.launch.launch import train as start_training

    run = {each.name for each in fields(RunConfig)} - {"plan_folder", "run_folder", "launched"}
    known = run | (set(signature(start_training).parameters) - {"plan_folder", "options"})
    for name in options:
        if name not in known:
            expected = ", ".join(sorted(known))
            guess = did_you_mean(name, known)
            raise SettingsError(f"expected options among {expected}, found {name!r}{guess}")
    check_values(make_from(TrainOptions, options))
    RunConfig(plan_folder="", run_folder="", **{k: v for k, v in options.items() if k in run})
