"""Names that modules had before: each one still imports, and is the module of today."""

import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

import pytest

from gnnplan.moved import read_places

CHECK = """
import importlib
from gnnplan.moved import read_places

for old, new in read_places().items():
    present = importlib.import_module(f"gnnplan.{new}")
    for name in (old, f"gnnplan.{old}"):
        if importlib.import_module(name) is not present:
            print(name, new)
"""


def test_every_former_name_gives_the_very_module_of_today() -> None:
    found = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_no_former_name_is_a_module_of_today_or_leads_to_another_former_name() -> None:
    places = read_places()
    assert not places.keys() & set(places.values())
    for old in places:
        package, _, name = old.rpartition(".")
        parent = find_spec(f"gnnplan.{package}") if package not in places else None
        folders = [] if parent is None else parent.submodule_search_locations or []
        here = PathFinder.find_spec(name, list(folders)) if folders else None
        # A folder of data files alone has no loader.
        assert here is None or here.loader is None, (
            f"{old} is in the table of moved names and is a module again"
        )


@pytest.mark.parametrize("module", ["gnnplan.planner.cli.planning", "gnnplan.planner.cli.training"])
def test_a_module_of_a_package_with_former_names_imports_first(module: str) -> None:
    found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
    assert found.returncode == 0, found.stderr
