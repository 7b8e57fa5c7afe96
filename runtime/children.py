"""The environment of Python processes that gnnplan starts: its own packages are found first.

A module started with `-m` has the current folder before all else. A project with a folder named
runtime, planner or api would hide gnnplan's; and a model of the user's own is found there.
"""

import os
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
OURS = "gnnplan"
"""The value by which `restore_path_rule` knows that the user did not set it."""


def child_environment() -> dict[str, str]:
    """This process's variables, with gnnplan first and the current folder last to be searched."""
    root = str(Path(__file__).resolve().parents[1])
    folders = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path.cwd())]
    path = os.pathsep.join(dict.fromkeys(f for f in folders if f))
    return {**os.environ, "PYTHONPATH": path, SAFE_PATH: os.environ.get(SAFE_PATH) or OURS}


def restore_path_rule() -> None:
    """Let processes that this one starts search the folder of their script, as Python does."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]
