"""One process of the probe's team: waits for tasks on a pipe, runs them, sends results back.

Started as `python -m planner.probe.worker DESCRIPTOR RANK`. A task is a function of a probe module
named `module:function`; it gets the worker's `State` and keyword arguments. What it leaves in
`state.kept` lives until the team ends, so that preparation and measurement are separate tasks.
"""

import importlib
import os
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

PACKAGE = "planner.probe."


@dataclass(slots=True)
class State:
    """What a worker keeps between tasks."""

    rank: int
    kept: dict[str, Any] = field(default_factory=dict[str, Any])


def run_task(state: State, name: str, arguments: dict[str, Any]) -> Any:
    """Run one named task of the probe package.

    Raises:
        ValueError: the name is not one of a probe module.
    """
    module, _, function = name.partition(":")
    if not module.startswith(PACKAGE) or not function:
        raise ValueError(f"expected a task of {PACKAGE}*, found {name!r}")
    return getattr(importlib.import_module(module), function)(state, **arguments)


def serve(connection: Connection, rank: int) -> None:
    """Answer tasks until the other side closes or sends None."""
    state = State(rank=rank)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        try:
            answer = ("value", run_task(state, *request))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"  # noqa: PTH119
            answer = ("error", f"{type(error).__name__}: {error} ({place})")
        connection.send(answer)


def main() -> None:
    """Serve the descriptor given on the command line."""
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
