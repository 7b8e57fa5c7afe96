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
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.report import RunReport

IMPORTED = ["numba", "pytest", "torch.distributed", "gnnplan.runtime.worker", "triton"]
IMPORTED += ["gnnplan.runtime.emulation.threads", "tests.support.emulated_ranks"]
"""What the server has imported when it forks; it pulls in torch, torch_geometric and the planner,
which ranks on emulated GPUs take."""


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


def train_on_ranks(plan_folder: Path, **options: Any) -> RunReport:
    """Train under a plan as `launch.train` does, but on ranks that are forked, without torchrun.

    Args:
        plan_folder: the run's folder is `run` in it.
        **options: fields of `RunConfig`.
    """
    from gnnplan.runtime.plan.io import load_plan
    from gnnplan.runtime.report import load_report

    folder, size = plan_folder / "run", load_plan(plan_folder).num_ranks
    folder.mkdir(exist_ok=options.get("resume", False))
    config = RunConfig(
        plan_folder=str(plan_folder), run_folder=str(folder), pin=False, collective_seconds=120.0,
        **options,
    )  # fmt: skip
    run_on_ranks(_train, (size, free_port(), config), size)
    return load_report(folder)


def train_under_torchrun(plan_folder: Path, **options: Any) -> RunReport:
    """Train as `train_on_ranks` does, by the product's launcher: each rank imports for itself."""
    from gnnplan.runtime.launch import launch

    return launch.train(plan_folder, oversubscribe=True, **options)


def _train(rank: int, size: int, port: int, config: RunConfig) -> None:
    from gnnplan.runtime import worker

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    worker.run(config)


def _on_rank(
    rank: int, environment: dict[str, str], body: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    body(rank, *arguments)
