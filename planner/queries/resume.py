"""Refuse to go on with a run that another request began: `gnnplan train DATASET --resume`.

What the user asks for now is held against what the plan in the run's folder was asked for. How long
the training is, and how much may be measured for its plan, is free; what is left at its default is
not asked for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.probe.presets import find_machine, on_hosts
from gnnplan.planner.profile.cache import load_record, record_path
from gnnplan.planner.search.samplers import fix_placement, with_samplers
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import AUTO
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.plan.setting import flat_values, setting_fields


def check_resumed(
    out: Path, folder: Path, settings: PlanSettings, *, machine: str | None = None
) -> None:
    """Refuse a request that is not the one which the run in a plan folder is of.

    A dataset that was changed in its place, and this machine in place of another, are refused when
    the ranks start, where the user may force them.

    Args:
        out: plan folder with the run.
        folder: dataset that is asked for.
        settings: what is asked for.
        machine: a preset's name or a machine file; None: this one.

    Raises:
        SettingsError: the line names what differs, and what to do.
        DatasetError: the folder is no dataset.
        MachineError: there is no such machine.
        PlanError: the plan is damaged.
    """
    plan, graph = load_plan(out), open_graph(folder, validate=False)
    place = folder.resolve()
    if graph.fingerprint != plan.graph.fingerprint and place != Path(plan.graph.path):
        raise SettingsError(
            f"--resume: expected the dataset of the run in {out}, {plan.graph.path}, found another "
            f"one, {place}; {_ways_out(out)}"
        )
    if machine is not None:
        found = on_hosts(find_machine(machine), settings.hosts)
        if found.fingerprint != plan.machine.fingerprint:
            raise SettingsError(
                f"--resume: expected the machine of the run in {out}, {plan.machine.name}, found "
                f"--machine {machine}, which is {found.name}; {_ways_out(out)}"
            )
    if differences := find_differences(plan, graph, settings):
        raise SettingsError(
            f"--resume: expected the settings of the run in {out}, found {', '.join(differences)}; "
            f"repeat its settings, or {_ways_out(out)}"
        )


def _ways_out(out: Path) -> str:
    return (
        f"go on with it by `gnnplan train {out} --resume`, or give another --output for a new "
        "training"
    )


def find_differences(plan: Plan, graph: Graph, settings: PlanSettings) -> list[str]:
    """List the flags by which a request differs from a plan's and from defaults, with both values.

    Of a plan whose request is not kept here, only what is trained is known.
    """
    planned = replace(settings, workload=plan.workload)
    if record_path(plan.plan_id).is_file():
        planned = load_record(plan).settings
    gpus = bool(plan.strategy.gpus)
    before, default = (
        _flags_by_sampler(graph, each, gpus=gpus)[0] for each in (planned, PlanSettings())
    )
    by_sampler = [
        [
            f"{flag} {value} (planned with {before[flag]})"
            for flag, value in flags.items()
            if value not in (before[flag], default[flag])
        ]
        for flags in _flags_by_sampler(graph, settings, gpus=gpus)
    ]
    return min(by_sampler, key=len)  # the plan has the fastest of several samplers


def _flags_by_sampler(graph: Graph, settings: PlanSettings, *, gpus: bool) -> list[dict[str, str]]:
    """Return the texts of a request's flags, once for each sampler that it is planned for."""
    read = codec.decode(PlanSettings, codec.parse(codec.dumps(settings)))  # 4 is read as 4.0
    asked = replace(read, epochs=None, quick=False, thorough=False)  # in these it may differ
    requests = with_samplers(graph, asked).by_sampler()
    return [_flags_of(fix_placement(graph, each, gpus=gpus)) for each in requests]


def _flags_of(settings: PlanSettings) -> dict[str, str]:
    values, parameters = flat_values(settings), settings.sampler_parameters
    listed = ",".join(f"{name}={parameters[name]}" for name in sorted(parameters))
    values["sampler"] += f":{listed}" if listed else ""
    fields = (each for each in setting_fields(PlanSettings) if each.setting.surface != "service")
    return {each.flag: _text_of(values[each.name]) for each in fields}


def _text_of(value: Any) -> str:
    """Return the text of a setting's value, nearly as its flag takes it."""
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value).items()
        return " ".join(f"{name}={_text_of(each)}" for name, each in named) or "none"
    if isinstance(value, list):
        return ",".join(map(str, cast("list[Any]", value)))
    return AUTO if value is None else str(value)
