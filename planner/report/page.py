"""One plan as one page: the parts of a plan put into templates that escape everything.

`sections` gathers what the templates show, with the machine where it can still be had; the
service's pages use the same sections.
"""

import base64
import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from gnnplan.planner.cost.memory import capacity_text, size_text
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import is_preset, load_preset
from gnnplan.planner.profile.cache import load_record, record_path
from gnnplan.planner.queries.explain import explain
from gnnplan.planner.report.charts import (
    device_rows,
    draw_memory,
    draw_sources,
    draw_timeline,
    memory_bars,
    timeline,
)
from gnnplan.planner.report.links import busiest, link_rows
from gnnplan.planner.report.measured import draw_measured, measured
from gnnplan.planner.report.svg import element, plain
from gnnplan.planner.report.topology import draw_topology
from gnnplan.planner.report.words import (
    certificate_sentence,
    common_beginning,
    prices,
    rate_text,
    share_text,
    stage_words,
    time_text,
)
from gnnplan.planner.units import counted
from gnnplan.runtime.plan.schema import Alternative, Plan
from gnnplan.runtime.report import RunReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One row of the table: the plan itself, or what lost."""

    name: str
    seconds: float | None
    """Per step, predicted; None where it does not fit or cannot run."""
    why: str
    """Why it lost; empty for the plan itself."""
    chosen: bool = False
    alike: list[str] = field(default_factory=list[str])
    """Names of others that take as long, to the digits shown, and lost for the same reason."""


def choices(plan: Plan) -> list[Choice]:
    """The plan and its alternatives, fastest first, those that cannot run last."""
    rows = list[Choice]()
    for other in plan.alternatives:
        same = next((row for row in rows if _reads_alike(row, other)), None)
        if same is not None:
            same.alike.append(other.name)
        else:
            rows.append(Choice(name=other.name, seconds=other.step_seconds, why=other.why))
    step = plan.prediction.step_seconds.value
    mine = Choice(name=explain(plan).summary, seconds=step, why="", chosen=True)
    slower = (i for i, row in enumerate(rows) if row.seconds is None or row.seconds >= step)
    rows.insert(next(slower, len(rows)), mine)
    return rows


def _reads_alike(row: Choice, other: Alternative) -> bool:
    """Whether somebody would read the same of both, their names apart."""
    if row.seconds is None or other.step_seconds is None:
        return False  # what would have to change to make each run is of interest
    return time_text(row.seconds) == time_text(other.step_seconds) and (
        _without_numbers(row.why) == _without_numbers(other.why)
    )


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+(\.[0-9]+)?", "#", text)


TEMPLATES = Path(__file__).parent / "templates"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def filters() -> dict[str, Any]:
    """Numbers for people, by the names that templates use."""
    return {
        "seconds": time_text,
        "size": size_text,
        "capacity": capacity_text,
        "rate": rate_text,
        "share": share_text,
        "plain": plain,
        "stage_words": stage_words,
        "breakable": breakable,
        "sentence": sentence,
    }


def breakable(name: str) -> Markup:
    """A name that may be broken after its underscores.

    >>> breakable("all_reduce")
    Markup('all_<wbr>reduce')
    """
    return Markup("_<wbr>").join(escape(part) for part in plain(name).split("_"))


def sentence(text: str) -> Markup:
    """A sentence in which flags are not broken after their hyphens.

    >>> sentence("<b> or --allow")
    Markup('&lt;b&gt; or <span class="whole">--allow</span>')
    """
    return Markup(FLAG.sub(r'<span class="whole">\g<0></span>', str(escape(plain(text)))))


@cache
def environment() -> Environment:
    """Templates of a plan's page; every value is escaped, a missing one is an error."""
    made = Environment(
        loader=PackageLoader("gnnplan.planner.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(filters())  # pyright: ignore[reportUnknownMemberType] - jinja2 leaves it open
    return made


def style() -> str:
    """The page's style sheet."""
    return (TEMPLATES / "style.css").read_text()


def sections(
    plan: Plan, machine: MachineModel | None, report: RunReport | None, *, tried: bool = False
) -> dict[str, Any]:
    """Everything that the sections of a plan show, by the names that templates use.

    Args:
        plan: the plan.
        machine: the machine it was made for; None draws no topology.
        report: what a run of it measured; None shows predictions alone.
        tried: whether a run was begun at all, whatever came of it.
    """
    laid = timeline(plan)
    bars, devices = memory_bars(plan), device_rows(plan)
    run = None if report is None else measured(plan, report)
    links = None if machine is None else link_rows(machine, plan)
    return {
        "plan": plan,
        "told": explain(plan),
        "timeline": laid,
        "timeline_picture": draw_timeline(laid),
        "memory": bars,
        "memory_picture": draw_memory(bars),
        "devices": devices,
        "sources_picture": draw_sources(devices),
        "machine": machine,
        "links": links,
        "busiest": None if links is None else busiest(links),
        "topology_picture": _topology(plan, machine),
        "alike": common_beginning(
            [a.name for a in plan.alternatives if a.step_seconds is not None]
        ),
        "choices": choices(plan),
        "prices": prices(plan),
        "certificate": certificate_sentence(plan.certificate),
        "run": run,
        "run_picture": None if run is None or not run.stages else draw_measured(run),
        "tried": tried,
        "swatch": swatch,
    }


def _topology(plan: Plan, machine: MachineModel | None) -> Markup | None:
    if machine is None:
        return None
    memories = {device.memory for device in plan.strategy.devices}
    used = {p.name for p in machine.gpus if p.memory in memories} if machine.gpus else None
    return draw_topology(machine, link_rows(machine, plan), used=used)


def swatch(css_class: str) -> Markup:
    """A small square in a bar's colour; the words beside it say the same."""
    return element(
        "svg",
        element("rect", class_=css_class, width=12, height=12, rx=2),
        class_="swatch",
        width=12,
        height=12,
        aria_hidden="true",
    )


def report_html(
    plan: Plan,
    machine: MachineModel | None = None,
    report: RunReport | None = None,
    *,
    tried: bool = False,
) -> str:
    """A plan's page as one HTML document that asks for nothing from outside.

    Args:
        plan: the plan.
        machine: the machine it was made for.
        report: what a run of it measured.
        tried: whether a run was begun at all, whatever came of it.
    """
    css = style()
    # The page's own policy: its style and nothing else, whatever a name in the plan says.
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return (
        environment()
        .get_template("report.html")
        .render(
            **sections(plan, machine, report, tried=tried),
            style=Markup(css),
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action "
            "'none'",
        )
    )


def machine_line(machine: MachineModel) -> str:
    """What a machine has, in a line.

    >>> machine_line(load_preset("siton"))
    '8 GPUs (NVIDIA A100-PCIE-40GB), 4 cliques, 96 cores'
    """
    parts = list[str]()
    if machine.gpus:
        models = dict.fromkeys(gpu.model for gpu in machine.gpus)
        parts.append(f"{counted(len(machine.gpus), 'GPU')} ({', '.join(models)})")
    if 0 < len(machine.cliques) < len(machine.gpus):  # else each is on its own
        parts.append(counted(len(machine.cliques), "clique"))
    return ", ".join([*parts, counted(machine.num_cores, "core")])


def machine_of(plan: Plan) -> MachineModel | None:
    """The machine kept with the planning request, or the same preset; None where neither is here.

    Raises:
        SettingsError: the kept request is damaged.
    """
    if record_path(plan.plan_id).is_file():
        return load_record(plan).machine
    if not is_preset(plan.machine.name):
        return None
    try:
        found = load_preset(plan.machine.name)
    except MachineError:
        return None
    return found if found.calibration == plan.machine.calibration else None
