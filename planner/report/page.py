"""A plan as one HTML page: its parts are put into templates that escape everything.

`sections` gathers what the templates show; the service's pages use it too.
"""

import base64
import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from gnnplan.planner.cost.link_use import busiest, link_rows
from gnnplan.planner.cost.memory import size_text
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
from gnnplan.planner.report.measured import compare_run, draw_measured, off_text, ratio_text
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
    """One row of the table of candidates: the plan itself, or an alternative."""

    name: str
    seconds: float | None
    """Predicted seconds per step; None where it does not fit or cannot run."""
    why: str
    """Why it lost; empty for the plan itself."""
    chosen: bool = False
    alike: list[str] = field(default_factory=list[str])
    """Names of others with the same seconds, as shown, and the same reason."""


def choices(plan: Plan) -> list[Choice]:
    """Return the plan and its alternatives, fastest first; those that cannot run are last."""
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
    """Return whether a row and an alternative differ in their names alone, as shown."""
    if row.seconds is None or other.step_seconds is None:
        return False  # what would have to change to make each run is of interest
    return time_text(row.seconds) == time_text(other.step_seconds) and (
        _without_numbers(row.why) == _without_numbers(other.why)
    )


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+(\.[0-9]+)?", "#", text)


STATISTICS = {
    "exact": "as one process would learn it",
    "unbiased": "the same on average, with other draws",
    "approximate": "not quite what one process learns",
}
"""What the classes of a plan's statistics mean for training."""
TEMPLATES = Path(__file__).parent / "templates"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def filters() -> dict[str, Any]:
    """Return the filters of the templates by name."""
    return {
        "seconds": time_text,
        "size": size_text,
        "capacity": size_text,
        "rate": rate_text,
        "share": share_text,
        "off": off_text,
        "ratio": ratio_text,
        "plain": plain,
        "copies": copies_text,
        "stage_words": stage_words,
        "breakable": breakable,
        "sentence": sentence,
    }


def copies_text(policy: str) -> str:
    """Write a placement policy for people.

    >>> copies_text("none"), copies_text("hot")
    ('no copies', 'hot')
    """
    return "no copies" if policy == "none" else policy


def breakable(name: str) -> Markup:
    """Let a name be broken after its underscores.

    >>> breakable("all_reduce")
    Markup('all_<wbr>reduce')
    """
    return Markup("_<wbr>").join(escape(part) for part in plain(name).split("_"))


def sentence(text: str) -> Markup:
    """Keep the flags of a sentence from being broken after their hyphens.

    >>> sentence("<b> or --allow")
    Markup('&lt;b&gt; or <span class="whole">--allow</span>')
    """
    return Markup(FLAG.sub(r'<span class="whole">\g<0></span>', str(escape(plain(text)))))


@cache
def environment(*packages: str) -> Environment:
    """Return the templates of packages; all values are escaped, a missing one is an error."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(filters())  # pyright: ignore[reportUnknownMemberType] - jinja2 leaves it open
    return made


def style() -> str:
    """Return the page's style sheet."""
    return (TEMPLATES / "style.css").read_text()


def sections(
    plan: Plan, machine: MachineModel | None, report: RunReport | None, *, tried: bool = False
) -> dict[str, Any]:
    """Return everything that a plan's templates show, by name.

    Args:
        plan: the plan.
        machine: the machine that it was made for; None: no topology is drawn.
        report: what a run of it measured; None: predictions alone are shown.
        tried: whether a run was begun at all.
    """
    laid = timeline(plan)
    bars, devices = memory_bars(plan), device_rows(plan)
    run = None if report is None else compare_run(plan, report)
    links = None if machine is None else link_rows(machine, plan)
    return {
        "plan": plan,
        "statistics": STATISTICS.get(plan.statistics_class, ""),
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
    """Draw a small square in a bar's colour, to stand before words."""
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
    """Return a plan's page as one HTML document that loads nothing; arguments as of `sections`."""
    css = style()
    # The page's own policy: its style and nothing else, whatever a name in the plan says.
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return (
        environment("gnnplan.planner.report")
        .get_template("report.html")
        .render(
            **sections(plan, machine, report, tried=tried),
            style=Markup(css),
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action "
            "'none'",
        )
    )


def machine_line(machine: MachineModel) -> str:
    """Describe a machine in one line.

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
    """Return the machine kept with the plan's request, or its preset; None without either."""
    if record_path(plan.plan_id).is_file():
        return load_record(plan).machine
    if not is_preset(plan.machine.name):
        return None
    try:
        found = load_preset(plan.machine.name)
    except MachineError:
        return None
    return found if found.calibration == plan.machine.calibration else None
