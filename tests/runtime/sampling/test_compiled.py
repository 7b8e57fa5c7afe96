"""A kernel on disk is used again by the next process, and only while its folder is unchanged."""

import os
import subprocess
import sys
from pathlib import Path

HELPER = """
from gnnplan.runtime.sampling.compiled import inlined_kernel

@inlined_kernel
def plus(x):
    return x + {number}
"""
CALLER = """
from helper import plus
from gnnplan.runtime.sampling.compiled import kernel

@kernel
def twice(x):
    return 2 * plus(x)
"""
MAIN = "import caller; print(caller.twice(1), sum(caller.twice.stats.cache_hits.values()))"


def run(folder: Path, main: str = MAIN) -> list[int]:
    """Result of `twice`, and how often it came from the disk."""
    found = subprocess.run(
        [sys.executable, "-c", main],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in found.stdout.split()]


def test_a_change_in_a_called_file_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "helper.py").write_text(HELPER.format(number=1))
    assert run(tmp_path) == [4, 0]
    assert run(tmp_path) == [4, 1]
    (tmp_path / "helper.py").write_text(HELPER.format(number=10))
    assert run(tmp_path) == [22, 0]


ROWS = """
from typing import NamedTuple
from gnnplan.runtime.sampling.compiled import form_for, kernel

class {name}(NamedTuple):
    first: int

def pick(rows, number):
    raise NotImplementedError

@form_for(pick, {name})
def _pick(rows, number):
    return rows.first + number

@kernel
def twice(x):
    return 2 * pick(x, 1)
"""
ROWS_MAIN = (
    "import caller; print(caller.twice(caller.{name}(1)), "
    "sum(caller.twice.stats.cache_hits.values()))"
)


def test_a_kernel_compiled_for_a_named_tuple_comes_from_the_disk_until_that_is_gone(
    tmp_path: Path,
) -> None:
    for name, hits in (("Rows", 0), ("Rows", 1), ("Lists", 0)):
        source = ROWS.format(name=name)
        if not hits:
            (tmp_path / "caller.py").write_text(source)
        assert run(tmp_path, ROWS_MAIN.format(name=name)) == [4, hits]
