"""How-to pages name nothing that does not exist; settings and completion are documented."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from gnnplan.api.app import create_app
from gnnplan.api.serve import parse
from gnnplan.planner.cli.main import app
from tests.support.howto import Known, blocks, command_lines, unknown, verbs_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("runtime", "planner", "api")
PAGES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("HOWTO_*.md"))
PLAIN = [
    ROOT / "README.md",
    ROOT / "docs" / "cli.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "api" / "README.md",
]
OWN = {"GNNPLAN_HEARTBEAT", "GNNPLAN_ROLL"}
"""Passed from a process of ours to another; no user sets them."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        parse(["--help"])
    serve = re.findall(r"^  (--[a-z-]+)", said.getvalue(), re.MULTILINE)
    routes = create_app(tmp_path_factory.mktemp("service")).openapi()["paths"]
    verbs = verbs_of(typer.main.get_command(app))
    return Known(root=ROOT, verbs=verbs, serve=set(serve), routes=set(routes))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_how_to_page_names_only_what_exists(path: Path, known: Known):
    text = path.read_text()
    assert unknown(text, path.parent, known) == []
    assert any(block.kind != "shown" for block in blocks(text))
    assert len(text.splitlines()) <= 110


def test_the_readme_lists_every_how_to_page():
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\(([\w/]+/HOWTO_\w+\.md)\)", readme))
    assert named == {str(path.relative_to(ROOT)) for path in PAGES}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```sh\ngnnplan grow DIR\n```\n", "no such command"),
        ("```sh\ngnnplan plan DIR --colour\n```\n", "--colour"),
        ("```sh host 0\ngnnplan probe --hots 2\n```\n", "--hots"),
        ("```sh\ngnnplan-serve --prot 1\n```\n", "--prot"),
        ("Use `--colour`.\n", "--colour"),
        ("Use `gnnplan train PLAN --colour`.\n", "--colour"),
        ("See `runtime/nowhere.py`.\n", "runtime/nowhere.py"),
        ("See [there](nowhere.md).\n", "nowhere.md"),
        ("`python -m tests.benchmarks.nothing --json`\n", "tests.benchmarks.nothing"),
        ("```python\nfrom runtime.nowhere import x\n```\n", "runtime.nowhere"),
        ("`GET /v1/nothing` answers.\n", "/v1/nothing"),
        ("```sh\ncurl localhost:8000/v1/plans/$ID/colour\n```\n", "/v1/plans/$ID/colour"),
    ],
)
def test_a_page_that_names_what_does_not_exist_is_found_out(text: str, words: str, known: Known):
    found = unknown(text, ROOT, known)
    assert any(words in each for each in found)
    good = "```sh\ngnnplan plan DIR -o P --policy auto\ncurl localhost:8000/v1/plans/$ID\n```\n"
    assert unknown(good, ROOT, known) == []


def test_every_flag_of_the_service_is_documented(known: Known):
    pages = "".join((ROOT / name).read_text() for name in ("docs/cli.md", "api/README.md"))
    assert sorted(flag for flag in known.serve if flag not in pages) == []


def settings_in(folders: tuple[str, ...]) -> set[str]:
    """Environment variables of ours that the code of some folders names."""
    found: set[str] = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"(?<![A-Z_])GNNPLAN_[A-Z_]*[A-Z]", path.read_text()))
    return found


def test_every_setting_of_the_environment_is_documented_and_exists():
    pages = [*PLAIN, *PAGES, *ROOT.glob("*/*/README.md")]
    documented = {
        name
        for page in pages
        for name in re.findall(r"(?<![A-Z_])GNNPLAN_[A-Z_]*[A-Z]", page.read_text())
    }
    in_code = settings_in((*PACKAGES, "tests"))
    units = "".join(p.read_text() for p in (ROOT / "api").rglob("*.service"))
    tables = "".join((ROOT / name).read_text() for name in ("docs/cli.md", "CONTRIBUTING.md"))
    assert sorted(in_code - OWN - {n for n in in_code if n in tables}) == []
    assert sorted(n for n in documented - in_code if n not in units) == []


def test_the_readme_names_the_module_that_nvidia_ml_py_supplies():
    assert "`nvidia-ml-py` supplies the `pynvml` module" in (ROOT / "README.md").read_text()


def test_the_shell_completes_commands_and_a_page_says_how():
    assert "gnnplan --install-completion" in (ROOT / "docs" / "cli.md").read_text()
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'gnnplan'; "
               "from gnnplan.planner.cli.main import run; run()"]  # fmt: skip
    asked = {"_GNNPLAN_COMPLETE": "complete_bash", "COMP_WORDS": "gnnplan gra", "COMP_CWORD": "1"}
    done = subprocess.run(
        program, env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["graph"]
    shown = subprocess.run(
        program,
        env=os.environ | {"_GNNPLAN_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "complete" in shown.stdout
    assert "gnnplan" in shown.stdout


def test_pages_show_commands():
    assert all(command_lines(path.read_text()) for path in PAGES)
