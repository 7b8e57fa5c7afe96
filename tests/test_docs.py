"""The pages tell the truth: every verb, flag, route, stage, setting and table is documented."""

import json
import re
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
import typer.main

from gnnplan.api.app import create_app
from gnnplan.planner.cli.common import option_fields
from gnnplan.planner.cli.main import app
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.settings import POLICIES, PlanSettings
from gnnplan.planner.units import flag_help
from gnnplan.runtime.sampling.registry import SAMPLERS
from gnnplan.runtime.stages import Stage
from tests.support import flag_table, plan_picture

ROOT = Path(__file__).resolve().parents[1]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def verbs() -> dict[str, set[str]]:
    """Every command of the command line and its flags."""
    found: dict[str, set[str]] = {}

    def walk(command, path: str) -> None:
        children = getattr(command, "commands", None)
        if children is not None:
            for name, child in children.items():
                walk(child, f"{path} {name}".strip())
            return
        options = [p for p in command.params if p.param_type_name == "option"]
        names = (o for p in options for o in (*p.opts, *p.secondary_opts))
        found[path] = {name for name in names if name.startswith("--")}

    walk(typer.main.get_command(app), "")
    return found


def test_every_verb_is_in_the_page_of_commands():
    commands = page("docs/cli.md")
    missing = [verb for verb in verbs() if f"gnnplan {verb}" not in commands]
    assert not missing


def test_every_flag_is_in_the_page_of_commands():
    commands = page("docs/cli.md")
    known = {"--json", "--help"}
    flags = set().union(*verbs().values()) - known
    missing = sorted(flag for flag in flags if f"`{flag}" not in commands)
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "docs/cli.md"])
def test_every_flag_a_page_names_exists(name: str):
    flags = set().union(*verbs().values()) | {"--debug", "--port", "--data-dir", "--host"}
    named = set(re.findall(r"`(--[a-z-]+)", page(name)))
    assert named <= flags | {"--json", "--help"}


def test_every_route_is_in_the_api_page(tmp_path: Path):
    routes = set(create_app(tmp_path).openapi()["paths"])
    assert {r for r in routes if r not in page("api/README.md")} == set()


def test_every_stage_is_in_the_runtime_page():
    assert [s for s in Stage if f"`{s}`" not in page("runtime/README.md")] == []


def test_the_page_of_commands_is_made_of_the_commands():
    found = flag_table.committed()
    assert [path for path in verbs() if f"### `gnnplan {path}" not in found] == []
    assert found == flag_table.made(), "write it anew: python -m tests.support.flag_table"
    assert all(link in found for link in flag_table.REGISTRIES.values())


def test_the_help_of_flags_names_every_policy_and_sampler() -> None:
    words = " ".join(flag_help(field) for field in option_fields(PlanSettings))
    names = [*POLICIES, *SAMPLERS]
    assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", words)] == []


def test_every_table_of_a_machine_is_in_the_probe_page():
    text = page("planner/probe/README.md")
    assert [name for name in load_preset("cpu-2core").tables if f"`{name}`" not in text] == []


MAP = "docs/README.md"
PAGES = ["README.md", MAP, "DESIGN.md", "docs/decisions.md", "CONTRIBUTING.md", "planner/README.md"]
PAGES += [f"docs/{name}.md" for name in ("formulas", "modelling", "papers", "benchmarks", "cli")]
PAGES += ["runtime/README.md", "CHANGELOG.md"]


@pytest.mark.parametrize("name", PAGES)
def test_every_file_a_page_links_to_exists(name: str):
    folder = (ROOT / name).parent
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page(name))
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_module_the_coverage_table_names_exists():
    text = page("docs/papers.md")
    modules = re.findall(r"`([a-z_/]+(?:\.py|/))`", text)
    assert len(set(modules)) >= 40
    assert [module for module in modules if not (ROOT / module).exists()] == []
    cells = [row.count("|") for row in text.splitlines() if row.startswith("|")]
    assert set(cells) == {5}


@pytest.mark.parametrize("package", ["planner", "runtime"])
def test_every_file_and_folder_that_a_packages_page_names_exists(package: str):
    named = re.findall(r"`([\w/]+(?:\.py|/))`", page(f"{package}/README.md"))
    assert len(named) >= 15
    assert [name for name in named if not (ROOT / package / name).exists()] == []


def test_the_readme_is_a_first_page():
    assert len(page("README.md").splitlines()) <= 120


def test_the_readmes_picture_and_answer_are_of_one_plan():
    picture = plan_picture.PICTURE.read_text()
    label = fromstring(picture).attrib["aria-label"]
    answer = " ".join(plan_picture.committed().split())
    assert answer.startswith(f"{label} predicted step ")
    assert f"<!-- {plan_picture.COMMAND} -->" in picture
    assert "](docs/plan.svg)" in page("README.md")


@pytest.mark.slow
def test_the_readmes_picture_and_answer_are_what_a_plan_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    assert plan_picture.make() == (plan_picture.PICTURE.read_text(), plan_picture.committed()), (
        f"write them anew: {plan_picture.COMMAND}"
    )


def test_every_page_is_one_click_from_the_page_map():
    folders = ("docs", "planner", "runtime", "api", "notebooks", "tests")
    pages = {*ROOT.glob("*.md"), *(p for name in folders for p in (ROOT / name).rglob("*.md"))}
    pages -= {ROOT / MAP}
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page(MAP))
    found = {(ROOT / MAP).parent.joinpath(link).resolve() for link in links}
    assert len(pages) >= 30
    assert sorted(pages - found) == []
    assert f"]({MAP})" in page("README.md")


def test_notebooks_are_listed_and_hold_no_outputs():
    names = sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))
    assert names
    for name in names:
        assert name in page("notebooks/README.md")
        cells = json.loads(page(f"notebooks/{name}.ipynb"))["cells"]
        assert all(not cell.get("outputs") for cell in cells)
