"""A process that has done its work ends at once, and what it printed is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from gnnplan.runtime import process
from gnnplan.runtime.process import nodes_of

ENDS = """
import atexit, sys
from gnnplan.runtime.process import leave
atexit.register(print, "taken apart")
print("done")
print("said", file=sys.stderr)
leave({code})
"""


def test_a_process_leaves_with_its_words_and_its_code_and_is_not_taken_apart() -> None:
    for code in (0, 3):
        # Pipes are buffered: words that are not flushed would be lost.
        words = [sys.executable, "-c", ENDS.format(code=code)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (code, "done\n", "said\n")


def test_the_nodes_of_cores_are_read_from_the_system(tmp_path: Path):
    for core in range(8):
        (tmp_path / f"devices/system/cpu/cpu{core}/node{core // 4}").mkdir(parents=True)
    assert nodes_of([0, 1], tmp_path) == [0]
    assert nodes_of([1, 6], tmp_path) == [0, 1]
    assert nodes_of([9], tmp_path) == []


def test_new_memory_is_spread_over_nodes_while_asked_and_by_default_again(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[tuple[int, list[int]]] = []

    def note(mode: int, nodes: list[int]) -> bool:
        asked.append((mode, list(nodes)))
        return True

    monkeypatch.setattr(process, "_set_mempolicy", note)
    with process.memory_spread_over([0, 1]) as done:
        assert done
        assert asked == [(3, [0, 1])]
    assert asked[1:] == [(0, [])]
    with process.memory_spread_over([0]) as done:
        assert not done
    assert len(asked) == 2


SPREAD = """
from gnnplan.runtime import process
done = process._set_mempolicy(3, [0])
with open("/proc/self/numa_maps") as file:
    seen = "interleave:0" in file.read()
back = process._set_mempolicy(0, [])
with open("/proc/self/numa_maps") as file:
    left = "interleave" in file.read()
print(done, seen, back, left, process._set_mempolicy(3, [511]))
"""


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this system tells no memory policies"
)
def test_the_system_takes_the_policy_or_nothing_changes():
    """Node 0 is always there, so the call itself is made; containers may forbid it."""
    command = [sys.executable, "-c", SPREAD]
    words = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert words.split() in (["True", "True", "True", "False", "False"], ["False"] * 5)
