"""Commands and flags in docs/cli.md: `python -m tests.support.flag_table` writes them anew."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from gnnplan.planner.cli.common import option_fields
from gnnplan.planner.cli.main import app
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import flag_help
from gnnplan.runtime.sampling.registry import SAMPLERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BEGIN, END = "<!-- flags: begin -->\n", "<!-- flags: end -->"
REGISTRIES = {
    ", ".join(SAMPLERS): "those of [the samplers](../runtime/sampling/registry.py)",
    ", ".join(policy.name for policy in PLACEMENT_POLICIES): (
        "those of [the policies](../planner/placement/policies/registry.py)"
    ),
}
"""What the tables say in place of a registry's names: a new entry changes no page."""
SHARED = ("--server", "--json")
"""Flags that many commands have, and that the page explains once."""


def made() -> str:
    """Each command with its help and the table of its flags."""
    return "".join(_section(path, each) for path, each in commands())


def committed() -> str:
    """What the page has of them."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of the command line by its words."""

    def walk(each: Any, path: str) -> Iterator[tuple[str, Any]]:
        children = getattr(each, "commands", None)
        if children is None:
            yield path, each
            return
        for name, child in children.items():
            yield from walk(child, f"{path} {name}".strip())

    return walk(typer.main.get_command(app), "")


def _section(path: str, command: Any) -> str:
    taken = [(p.name or "").upper() for p in command.params if p.param_type_name != "option"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    shared = [f"`{p.opts[0]}`" for p in options if p.opts[0] in SHARED]
    rows = [_row(p) for p in options if p.opts[0] not in SHARED]
    words = " ".join(command.help.split())
    also = f" Also {' and '.join(shared)}." if shared else ""
    table = f"| flag | default | meaning |\n|---|---|---|\n{''.join(rows)}\n" if rows else ""
    return f"### `{' '.join(['gnnplan', path, *taken])}`\n\n{words}{also}\n\n{table}"


def _row(option: Any) -> str:
    flag = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.default
    default = "" if default is None or isinstance(default, bool) else str(default)
    words = option.help
    for field in option_fields(PlanSettings):
        if (field.flag, flag_help(field)) == (option.opts[0], words):
            one_of = f"One of {', '.join(field.choices)}." if field.choices else ""
            words = " ".join(part for part in (words, one_of, field.setting.more) if part)
    for names, link in REGISTRIES.items():
        words = words.replace(names, link)
    text = words.replace("|", "\\|")
    return f"| {flag} | {'required' if option.required else default} | {text} |\n"


def write() -> None:
    """Write the commands into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write()
