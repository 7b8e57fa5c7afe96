"""What starting ranks costs a host besides the ranks: the command that launches, and torchrun."""

import functools
import subprocess
import sys

MODULES = ("planner.cli", "torch.distributed.run")
"""What the two have imported while ranks run."""
_MEASURE = """
import importlib, sys
from planner.profiling.serving import private_bytes
importlib.import_module(sys.argv[1])
print(private_bytes())
"""
WAIT_SECONDS = 120.0


@functools.cache
def launcher_bytes() -> int:
    """Private bytes of both; 0, which stands for not measured, where one cannot be started.

    Measured once in a process of the planner: the libraries do not change under it.
    """
    total = 0
    for module in MODULES:
        words = [sys.executable, "-c", _MEASURE, module]
        try:
            ended = subprocess.run(
                words, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
            )
            total += int(ended.stdout.split()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return 0
    return total
