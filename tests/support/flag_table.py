"""The table of flags in docs/cli.md: `python -m tests.support.flag_table` writes it anew."""

import re
from pathlib import Path

from gnnplan.planner.cli.common import option_fields
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import AUTO, default_text, flag_help
from gnnplan.runtime.plan.setting import SettingField
from gnnplan.runtime.sampling.registry import SAMPLERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
REGISTRIES = {
    ", ".join(SAMPLERS): "those of [the samplers](../runtime/sampling/registry.py)",
    ", ".join(policy.name for policy in PLACEMENT_POLICIES): (
        "those of [the policies](../planner/placement/policies/registry.py)"
    ),
}
"""What the table says in place of a registry's names: a new entry changes no page."""
TABLE = re.compile(
    r"(?<=\| flag of a setting \| default \| meaning \|\n\|---\|---\|---\|\n)(\| .*\n)+"
)


def made() -> str:
    """The table's rows, one for each setting."""
    return "".join(_row(each) for each in option_fields(PlanSettings))


def committed() -> str:
    """The rows that the page has."""
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    return found[0]


def _row(field: SettingField) -> str:
    flag = f"`{field.flag}`"
    if field.default is True:
        flag += f", `--no-{field.flag.removeprefix('--')}`"
    default = "" if field.hint is bool else default_text(field) or (field.setting.unset and AUTO)
    text = " ".join(part for part in (flag_help(field), field.setting.more) if part)
    for names, link in REGISTRIES.items():
        text = text.replace(names, link)
    return f"| {flag} | {default} | {text} |\n"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(made(), PAGE.read_text()))
