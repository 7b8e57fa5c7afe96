"""Faults are drawn by seed, planted where their lines stand, and judged by the nearest tests."""

from pathlib import Path

import pytest

from tests.mutation.draw import Mutant, draw_mutants, list_lines, plant, read_list
from tests.mutation.nearest import nearest_tests, read_imports
from tests.mutation.operators import apply_edit, compiles, find_edits
from tests.mutation.trial import Tree, judge_mutant

SOURCE = b'''"""Words."""

def scale(value: float = 2, *, by: float = 1.5) -> float:
    """Words: 3."""
    if value <= 0 and by:
        raise ValueError(f"{value + 1}")
    return min(value * by, LIMITS[value])
'''


def edits(source: bytes) -> set[tuple[str, bytes]]:
    """Operator and changed line of every edit."""
    old = source.splitlines()
    return {
        (edit.operator, line)
        for edit in find_edits(source, {})
        for line in apply_edit(source, edit).splitlines()
        if line not in old
    }


def test_every_operator_changes_the_program_and_no_message_or_annotation() -> None:
    found = edits(SOURCE)
    assert found == {
        ("constant", b"def scale(value: float = (3), *, by: float = 1.5) -> float:"),
        ("constant", b"def scale(value: float = (1), *, by: float = 1.5) -> float:"),
        ("constant", b"def scale(value: float = 2, *, by: float = (3.0)) -> float:"),
        ("constant", b"def scale(value: float = 2, *, by: float = (0.75)) -> float:"),
        ("comparison", b"    if value > 0 and by:"),
        ("boundary", b"    if value < 0 and by:"),
        ("logic", b"    if value <= 0 or by:"),
        ("constant", b"    if value <= (1) and by:"),
        ("constant", b"    if value <= (-1) and by:"),
        ("negation", b"    if (not (value <= 0 and by)):"),
        ("guard removed", b"    if False:"),
        ("extreme", b"    return max(value * by, LIMITS[value])"),
        ("arithmetic", b"    return min(value / by, LIMITS[value])"),
    }


@pytest.mark.parametrize(
    ("line", "operator", "planted"),
    [
        (b"x.y = f(a, b)", "statement dropped", b"pass"),
        (b"x.y = f(a, b)", "arguments swapped", b"x.y = f(b, a)"),
        (b"x[a:b] += 1", "arithmetic", b"x[a:b] -= 1"),
        (b"x[a:b] += 1", "off by one", b"x[a:(b - 1)] += 1"),
        (b"y = -x if not z else z // 2", "sign", b"y = (x) if not z else z // 2"),
        (b"y = -x if not z else z // 2", "negation", b"y = -x if (z) else z // 2"),
        (b"y = [v for v in x if v]", "guard removed", b"y = [v for v in x if True]"),
        (b"y = f(a, key=True, more=b)", "argument dropped", b"y = f(a, more=b)"),
        (b"y = f(a, key=True, more=b)", "flag", b"y = f(a, key=False, more=b)"),
    ],
)
def test_an_operator_gives(line: bytes, operator: str, planted: bytes) -> None:
    assert (operator, planted) in edits(line + b"\n")


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A product of two modules, and three test files that reach one of them or none."""
    root = tmp_path / "tree"
    files = {
        "gnnplan/__init__.py": "from pathlib import Path\n\n"
        "__path__.append(str(Path(__file__).parents[1]))\n",
        "planner/low.py": "def double(n):\n    if n > 9:\n        return 18\n    return n * 2\n",
        "planner/__init__.py": "",
        "planner/high.py": "from gnnplan.planner.low import double\n\n\n"
        "def four(n):\n    return double(n)\n",
        "tests/planner/test_high.py": "from gnnplan.planner.high import four\n\n\n"
        "def test_it():\n    assert four(9) == 18\n",
        "tests/planner/test_low.py": "from gnnplan.planner.low import double\n\n\n"
        "def test_it():\n    assert double(1) == 2\n",
        "tests/test_other.py": "def test_it():\n    assert True\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_draw_is_repeatable_and_its_list_is_read_back(small_tree: Path, tmp_path: Path) -> None:
    drawn, lines = draw_mutants(small_tree, 5, 3)
    again, _ = draw_mutants(small_tree, 5, 3)
    assert drawn == again
    assert lines == 3  # each once: the guard and two returns; a function's name is no logic
    assert len({(mutant.file, mutant.line) for mutant in drawn}) == 3
    for mutant in drawn:
        planted = plant((small_tree / mutant.file).read_text(), mutant)
        assert planted != (small_tree / mutant.file).read_text()
        assert compiles(planted.encode())
    path = tmp_path / "list.jsonl"
    path.write_text(list_lines({"seed": 5}, drawn))
    assert read_list(path) == drawn


def test_a_fault_is_found_again_where_its_line_has_moved() -> None:
    mutant = Mutant(number=1, file="f", line=1, operator="o", before="x = 1", after="x = 2")
    assert plant("\n\nx = 1\n", mutant) == "\n\nx = 2\n"
    with pytest.raises(LookupError, match="fault 1"):
        plant("x = 3\n", mutant)


def test_tests_named_after_a_module_come_first_and_those_that_do_not_reach_it_never(
    small_tree: Path,
) -> None:
    imports = read_imports(small_tree)
    near = nearest_tests(imports, "gnnplan.planner.low")
    assert near == ["tests.planner.test_low", "tests.planner.test_high"]
    assert nearest_tests(imports, "gnnplan.planner.high") == ["tests.planner.test_high"]


@pytest.mark.slow
def test_a_fault_dies_by_a_farther_test_and_one_that_changes_nothing_survives(
    small_tree: Path, tmp_path: Path
) -> None:
    tree = Tree(small_tree, tmp_path / "work", names=[
        path.relative_to(small_tree).as_posix() for path in small_tree.rglob("*.py")
    ])  # fmt: skip
    fault = {"file": "planner/low.py", "line": 2, "operator": "constant", "before": "    if n > 9:"}
    seen = judge_mutant(tree, Mutant(number=1, after="    if n > 7:", **fault), 100.0)
    assert (seen.outcome, seen.how) == ("survived", "no test failed")  # 9 gives 18 either way
    fault = {**fault, "line": 4, "before": "    return n * 2"}
    killed = judge_mutant(tree, Mutant(number=2, after="    return n + 1", **fault), 100.0)
    assert (killed.outcome, killed.test) == ("killed", "tests/planner/test_high.py::test_it")
    assert killed.how == "a test failed"
    text = "    return n * 2"
    imported = Mutant(number=3, after=f"{text}\n\n\ndouble(None)", **fault)
    assert judge_mutant(tree, imported, 100.0).how == "an import failed"
    assert (small_tree / "planner/low.py").read_text().endswith(f"{text}\n")
