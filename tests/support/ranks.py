"""Real processes for tests: one per rank, forked from a server that has the imports behind it.

A rank that is spawned imports torch and torch_geometric first, three seconds of one core each;
forked from a server without threads it starts in a tenth of a second, and is as much a process of
its own. With a GPU ranks are spawned all the same: CUDA does not start in what is forked from a
process that has asked for it, and some imports do.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

IMPORTED = ["numba", "pytest", "torch.distributed", "gnnplan.runtime.worker"]
"""What the server has imported when it forks; it pulls in torch and torch_geometric."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_on_ranks(body: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run body(rank, *arguments) in `ranks` processes and wait; an exception in one is raised.

    Args:
        body: a function of a module, so that it can be pickled.
        arguments: as the ranks get them; anything that can be pickled.
        ranks: processes.
    """
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(IMPORTED)
    environment = dict(os.environ)  # the server's own is that of its start
    start: Any = mp.start_processes  # type: ignore[attr-defined] # not among its stated exports
    start(_on_rank, (environment, body, arguments), nprocs=ranks, start_method=method)


def _on_rank(
    rank: int, environment: dict[str, str], body: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    body(rank, *arguments)
