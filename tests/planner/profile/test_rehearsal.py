"""What loads at its first use is counted among a process's own bytes."""

import subprocess
import sys

REHEARSED = """
import importlib
from gnnplan.planner.profile.loop import rehearse
from gnnplan.planner.profile.protocol import private_bytes
for library in ("torch", "torch_geometric.nn", "gnnplan.runtime.models.build"):
    importlib.import_module(library)
for _ in range(3):
    print(private_bytes())
    rehearse()
"""


def test_a_step_loads_what_later_ones_have() -> None:
    words = [sys.executable, "-c", REHEARSED]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    imported, once, twice = map(int, ended.stdout.split())
    assert once - imported > 10e6
    assert twice - once < 2e6
