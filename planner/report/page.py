"""One plan as one page: the parts of a plan put into templates that escape everything.

`sections` gathers what the templates show; the service's pages use the same sections.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from planner.cost.memory import capacity_text, size_text
from planner.explain import explain
from planner.machine import MachineModel
from planner.report.choices import choices
from planner.report.links import busiest, link_rows
from planner.report.measured import draw_measured, measured
from planner.report.memory import draw_memory, memory_bars
from planner.report.sources import device_rows, draw_sources
from planner.report.svg import element, plain
from planner.report.timeline import draw_timeline, timeline
from planner.report.topology import draw_topology
from planner.report.words import (
    certificate_sentence,
    common_beginning,
    prices,
    rate_text,
    share_text,
    stage_words,
    time_text,
)
from runtime.plan import Plan
from runtime.report import RunReport

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
        loader=PackageLoader("planner.report"),
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
