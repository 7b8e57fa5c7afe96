"""A process that has done its work ends at once, and what it printed is there."""

import subprocess
import sys

import pytest

from runtime import process
from runtime.plan import Threads

ENDS = """
import atexit, sys
from runtime.process import leave
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


@pytest.mark.parametrize(
    ("compute", "sample", "cores", "beside"),
    [
        (1, 1, [0, 1], [1]),
        (2, 2, [4, 5, 6, 7], [6, 7]),
        # Not pinned: whatever compute leaves. In line, or crowded: training waits for the reads.
        (1, 1, [0, 1, 2, 3], [1, 2, 3]),
        (2, 0, [0, 1], []),
        (2, 1, [0, 1], []),
    ],
)
def test_what_waits_for_a_disk_is_kept_off_the_cores_of_compute(
    monkeypatch: pytest.MonkeyPatch, compute: int, sample: int, cores: list[int], beside: list[int]
) -> None:
    monkeypatch.setattr(process, "usable_core_ids", lambda: cores)
    threads = Threads(compute=compute, sample=sample)
    assert process.cores_beside_training(threads) == beside
