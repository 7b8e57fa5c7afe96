"""Draw faults by seed: a line of the product that carries logic, then one fault on that line."""

import ast
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.operators import Edit, apply_edit, compiles, find_edits, required_keywords

PRODUCT = ("planner", "runtime", "api")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault: whole lines of a file, and those in their place."""

    number: int
    file: str
    line: int
    operator: str
    before: str
    after: str


def draw_mutants(root: Path, seed: int, count: int) -> tuple[list[Mutant], int]:
    """That many faults on as many lines, and the number of lines that could be drawn.

    Each line is as likely as another. The same tree, seed and count give the same faults.
    """
    paths = product_files(root)
    required = required_keywords(ast.parse(path.read_bytes()) for path in paths)
    places: list[tuple[Path, int, list[Edit]]] = []
    for path in paths:
        source = path.read_bytes()
        by_line: dict[int, list[Edit]] = {}
        for edit in find_edits(source, required):
            by_line.setdefault(source.count(b"\n", 0, edit.start) + 1, []).append(edit)
        places += [(path, line, by_line[line]) for line in sorted(by_line)]
    generator = random.Random(seed)
    chosen = generator.sample(places, count)
    mutants = [
        _mutant(number, root, path, _choose(path.read_bytes(), edits, generator))
        for number, (path, _, edits) in enumerate(chosen, start=1)
    ]
    return mutants, len(places)


def _choose(source: bytes, edits: list[Edit], generator: random.Random) -> Edit:
    """Any operator that the line allows, then any of its edits; the next one if it is no Python."""
    operators = sorted({edit.operator for edit in edits})
    generator.shuffle(operators)
    for operator in operators:
        for edit in generator.sample(edits, len(edits)):
            if edit.operator == operator and compiles(apply_edit(source, edit)):
                return edit
    raise ValueError("expected an edit that compiles among a line's")


def product_files(root: Path) -> list[Path]:
    """Python files of the product, in order of name."""
    return sorted(path for package in PRODUCT for path in (root / package).rglob("*.py"))


def _mutant(number: int, root: Path, path: Path, edit: Edit) -> Mutant:
    source = path.read_bytes()
    start = source.rfind(b"\n", 0, edit.start) + 1
    stop = source.find(b"\n", edit.end)
    stop = len(source) if stop < 0 else stop
    planted = apply_edit(source, edit)
    return Mutant(
        number=number,
        file=path.relative_to(root).as_posix(),
        line=source.count(b"\n", 0, start) + 1,
        operator=edit.operator,
        before=source[start:stop].decode(),
        after=planted[start : stop + len(planted) - len(source)].decode(),
    )


def plant(source: str, mutant: Mutant) -> str:
    """The file with the fault, found where its lines stand nearest to where they stood.

    Raises:
        LookupError: the file has no such lines any more.
    """
    lines, before = source.split("\n"), mutant.before.split("\n")
    found = [i for i in range(len(lines) - len(before) + 1) if lines[i : i + len(before)] == before]
    if not found:
        raise LookupError(f"expected the lines of fault {mutant.number} in {mutant.file}")
    at = min(found, key=lambda i: abs(i + 1 - mutant.line))
    return "\n".join([*lines[:at], mutant.after, *lines[at + len(before) :]])


def list_lines(head: dict[str, object], mutants: Iterable[Mutant]) -> str:
    """One JSON object a line: what was drawn, then the faults."""
    records = [head, *(asdict(mutant) for mutant in mutants)]
    return "".join(json.dumps(record) + "\n" for record in records)


def read_list(path: Path) -> list[Mutant]:
    """Faults that `list_lines` wrote."""
    return [Mutant(**json.loads(line)) for line in path.read_text().splitlines()[1:]]
