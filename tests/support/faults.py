"""Jobs to be disturbed: one plan, a run without faults, and what a disturbed run must equal."""

import os
from pathlib import Path
from typing import Any

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.report import RunReport
from tests.support.plans import make_plan

EPOCHS = 3
STEPS = 15
"""Of those epochs: 300 training nodes in batches of 64, five steps an epoch."""
INTERVAL = 2
"""Steps between checkpoints, which are also written at the ends of epochs."""
SAVED = (2, 4, 5, 7, 9, 10, 12, 14, 15)


def plan_to_disturb(graph: Graph, folder: Path, *, ranks: int = 2, **settings: Any) -> Path:
    """A plan with dropout, a prefetch thread and peers, whose model obeys $GNNPLAN_TEST_FAULT."""
    make_plan(
        graph,
        folder,
        **{
            "ranks": ranks,
            "model": "tests.support.models:faulty",
            "batch_size": 64,
            "dropout": 0.5,
            "sample_threads": 1,
            "own_rows": 300,
            "peers": ranks > 1,
            **settings,
        },
    )
    return folder


def train(plan: Path, run: Path, fault: str = "", **settings: Any) -> RunReport:
    """Train under the plan with a fault (`tests.support.models.Faulty`)."""
    return launch.train(
        plan,
        run_folder=run,
        environment={"GNNPLAN_TEST_FAULT": fault or "-1:0:none"},
        **{
            "epochs": EPOCHS,
            "eval_every": 0,
            "checkpoint_every_steps": INTERVAL,
            "keep_checkpoints": 3,
            "hang_seconds": 4.0,
            "oversubscribe": True,
            **settings,
        },
    )


def last_saved(step: int) -> int:
    """The newest checkpoint of a run whose last whole step is `step`; 0: none."""
    return max((saved for saved in SAVED if saved <= step), default=0)


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
