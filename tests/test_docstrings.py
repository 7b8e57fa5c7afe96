"""Every example in a docstring of the product is true."""

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT)
    for package in ("planner", "runtime", "api")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>>" in path.read_text()
]


def _strings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Strings that stand alone, which document what is above or around them, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and ">>>" in text:
                yield text, node.lineno - 1


@pytest.mark.parametrize("file", FILES, ids=str)
def test_examples_in_docstrings_are_true(file: Path) -> None:
    # Read from the source: of a wrapped or compiled function doctest itself finds none.
    module = importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    runner, said = doctest.DocTestRunner(verbose=False), list[str]()
    found = 0
    for text, line in _strings(ast.parse((ROOT / file).read_text())):
        examples = doctest.DocTestParser().get_doctest(
            text, dict(vars(module)), module.__name__, str(file), line
        )
        found += len(examples.examples)
        runner.run(examples, out=said.append, clear_globs=True)
    assert found > 0
    assert runner.failures == 0, "".join(said)
