"""Whatever stands in the product is reached from where it is entered, or listed with a reason.

`tests/unreached.txt` is the list: a line is `module.name: reason`, by the module's own name without
its folders. The reason begins with the word "next" where a planned change will call it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gnnplan
from tests.support.product import PACKAGES, ROOT, product_sources
from tests.support.reachability import Key, Product

LISTED = Path(__file__).with_name("unreached.txt")
ENTRIES = {
    ("gnnplan.planner.cli.main", "run"),
    ("gnnplan.planner.__main__", ""),
    ("gnnplan.api.serve", "main"),
}
"""The commands of pyproject.toml; workers and scripts are started by the names of their modules."""
PUBLIC = {"pyg_sampler.PygSampler", "dataset.write_graph", "presets.dump_preset"}
"""For users, though no page shows how they are imported."""
MIGRATED = ("upgrade", "downgrade")
"""What alembic calls in each file of a folder named migrations."""
SHOWN = re.compile(r"^\s*from (gnnplan[\w.]*) import ([\w, ]+)$", re.MULTILINE)
SOURCES = product_sources()


def short(key: Key) -> str:
    """As it is listed: without the folders, which change more often."""
    return f"{key[0].split('.')[-1]}.{key[1]}"


def entries() -> Iterator[Key]:
    """Commands, migrations, and what the pages for users import."""
    yield from ENTRIES
    yield from (("gnnplan", name) for name in ("", "__getattr__"))
    yield from ((f"gnnplan.{module}", name) for module, name in gnnplan.PLACES.values())
    pages = [ROOT / "README.md", *(p for name in PACKAGES for p in (ROOT / name).rglob("*.md"))]
    for page in pages:
        for module, names in SHOWN.findall(page.read_text()):
            yield from ((module, name.strip()) for name in names.split(","))
    for module in SOURCES:
        if ".migrations" in module:
            yield from ((module, name) for name in ("", *MIGRATED))
    for public in PUBLIC:
        module, _, name = public.partition(".")
        yield from ((each, name) for each in SOURCES if each.split(".")[-1] == module)


def read_in_templates() -> set[str]:
    """Words of the pages' templates: attributes that they may read."""
    texts = [p.read_text() for name in PACKAGES for p in (ROOT / name).rglob("*.html")]
    return {word for text in texts for word in re.findall(r"\w+", text)}


def listed() -> dict[str, str]:
    """Reasons by name."""
    lines = [line for line in LISTED.read_text().splitlines() if line]
    pairs = [line.partition(": ") for line in lines]
    return {name: reason for name, _, reason in pairs}


def test_every_definition_is_reached_or_listed_with_a_reason():
    unreached = {short(key) for key in Product(SOURCES).unreached(entries(), read_in_templates())}
    allowed = listed()
    assert sorted(unreached - set(allowed)) == [], "call it, delete it, or list it with a reason"
    assert sorted(set(allowed) - unreached) == [], "reached, or gone: drop it from the list"


def test_reasons_are_given_and_a_name_stands_once():
    lines = LISTED.read_text().splitlines()
    assert lines == sorted(set(lines))
    assert all(len(reason.split()) >= 3 for reason in listed().values())


@pytest.mark.parametrize(
    ("source", "unreached"),
    [
        ("def f(): g()\ndef g(): pass\ndef h(): g()", ["h"]),
        ("class A:\n def used(self): pass\n def idle(self): pass\ndef f(): A().used()", ["A.idle"]),
        ("class A:\n def idle(self): pass\ndef f(): pass", ["A"]),
        ("class A:\n def idle(self): pass\ndef f(a: A) -> None: getattr(a, 'idle')", []),
        ("import x\nclass A(x.B):\n def called_there(self): pass\ndef f(): A()", []),
        ("app = make()\n@app.command\ndef verb(): pass\ndef f(): pass", []),
        ("@functools.cache\ndef kept(): pass\ndef f(): pass", ["kept"]),
        ("def f():\n def g(): h()\n return g\ndef h(): pass", []),
        ("if x:\n def g(): pass\nelse:\n def h(): pass\ndef f(): g()", ["h"]),
        ("def g(): g()\ndef f(): pass", ["g"]),
    ],
)
def test_a_definition_without_a_caller_is_found(source: str, unreached: list[str]):
    found = Product({"planner.m": source}).unreached([("planner.m", "f")])
    assert [name for _, name in found] == unreached


def test_names_are_followed_over_modules_imports_and_texts():
    sources = {
        "gnnplan.planner.a": "from gnnplan.planner.b import g as renamed\n"
        "import gnnplan.planner.c\nfrom gnnplan.planner import d\n"
        "def f():\n renamed()\n gnnplan.planner.c.h()\n d.k()\n"
        " run('gnnplan.planner.e')\n run(f'gnnplan.planner.w.{x}', 'v')",
        "gnnplan.planner.b": "from gnnplan.planner.f import g as g\ndef idle(): pass",
        "gnnplan.planner.c": "def h(): pass\ndef idle(): pass",
        "gnnplan.planner.d": "def k(): pass\ndef idle(): pass",
        "gnnplan.planner.e": "def main(): pass\nif __name__ == '__main__': main()",
        "gnnplan.planner.f": "def g(): pass\ndef idle(): pass",
        "gnnplan.planner.w.v": "def v(): pass\ndef idle(): pass",
        "gnnplan.planner.z": "f()\ndef f(): pass",
    }
    found = Product(sources).unreached([("gnnplan.planner.a", "f")])
    idle = [("b", "idle"), ("c", "idle"), ("d", "idle"), ("f", "idle"), ("w.v", "idle"), ("z", "f")]
    assert found == [(f"gnnplan.planner.{module}", name) for module, name in idle]


def test_what_a_module_runs_as_a_program_stands_last():
    early = []
    for name, text in SOURCES.items():
        for statement in ast.parse(text).body[:-1]:
            if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
                early += [name for part in statement.body if ast.unparse(part) != "gc.disable()"]
    assert early == [], "the definitions below it are not there yet when it runs"
