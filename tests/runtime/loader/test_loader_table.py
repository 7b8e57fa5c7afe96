"""docs/loaders.md: every row is shown by a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "loaders.md"
TESTS = [
    *(ROOT / "tests" / "runtime").rglob("test_*.py"),
    *(ROOT / "tests" / "scripts").glob("*.py"),
]


def test_every_row_names_a_test_of_the_repository() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) > 25
    known = {
        name for path in TESTS for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert {row[1] for row in rows} == {"same", "other way", "no"}
    assert [row for row in rows if row[3] not in known] == []


def test_its_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(code, str(PAGE), "exec"), {})
