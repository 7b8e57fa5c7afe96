"""The table of samplers: every form can be imported, and no name stands as a literal elsewhere."""

import ast
from pathlib import Path

from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.registry import SAMPLERS, load_function

ROOT = Path(__file__).resolve().parents[3]
WORDS = {"full"}
"""Names that are words of other things too."""
CONTRACT = "runtime/plan/schema.py"
"""It states the default of plan files, and imports no sampler."""


def test_every_entry_is_found_by_its_name_and_every_form_can_be_imported() -> None:
    assert [spec.name for spec in SAMPLERS.values()] == list(SAMPLERS)
    assert Sampler().name in SAMPLERS
    forms = [path for spec in SAMPLERS.values() for path in (spec.cpu, spec.gpu) if path]
    assert all(callable(load_function(path)) for path in forms)


def test_no_samplers_name_is_a_literal_outside_sampling() -> None:
    names, found = set(SAMPLERS) - WORDS, list[str]()
    for package in ("api", "planner", "runtime"):
        for file in sorted((ROOT / package).rglob("*.py")):
            place = file.relative_to(ROOT).as_posix()
            if place.startswith("runtime/sampling/") or place == CONTRACT:
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and node.value in names:
                    found.append(f"{place}:{node.lineno}: {node.value}")
    assert found == [], "read it from runtime.sampling.registry"
