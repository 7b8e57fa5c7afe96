"""A process that has done its work ends at once, and what it printed is there."""

import subprocess
import sys

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
