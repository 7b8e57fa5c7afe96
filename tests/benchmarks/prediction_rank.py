"""One rank of `prediction`: runs a list of plans in turn, round after round, and writes seconds.

python -m tests.benchmarks.prediction_rank RANK SIZE ADDRESS PORT JOBS.json OUT.json

Every plan keeps its loader, model and pages between rounds; before each turn threads and cores are
set as the worker sets them. A plan of one rank runs on rank 0 while the others wait. A turn during
which the machine was disturbed is taken once more, as long as patience lasts. After the planned
rounds more are taken, as long as there are any and medians are not sure enough.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from gnnplan.planner.probe.quiet import Disturbance
from gnnplan.planner.probe.timing import DISTURBED
from gnnplan.planner.queries.compare import window_means
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.device import flush_denormals, use_threads
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.process import (
    batch_threads,
    keep_freed_memory,
    pin_to,
    usable_core_ids,
)
from gnnplan.runtime.train.minibatch import STEP
from tests.benchmarks.prediction_rounds import PRECISE, standard_error
from tests.support.cooperative import open_rank


class Job:
    """One plan on this rank."""

    def __init__(self, folder: Path, comm: Communicator) -> None:
        self.plan, self.comm = load_plan(folder), comm
        graph = open_graph(Path(self.plan.graph.path), validate=False)
        self.loader, self.loop = open_rank(self.plan, folder, graph, comm)

    def turn(self, steps: int, discard: int, cores: list[int]) -> dict[str, list[float]]:
        """Take steps; seconds of each after the first `discard`, whole and by stage."""
        pin_to(cores)
        use_threads(self.plan, self.comm.rank, pin=True)
        first = self.loader.handed_out
        last = first + steps
        while self.loader.handed_out < last:
            batches = self.loader.batches(last - self.loader.handed_out)
            self.loop.run(batches, self.loader.handed_out, lambda _: None)
        pin_to(cores)
        meter, skip = self.loop.meter, first + discard
        return {
            str(name): [float(each) for each in meter.seconds(str(name), skip_steps=skip)]
            for name in (STEP, *meter.stages(skip_steps=skip))
        }


def medians(
    found: dict[str, list[dict[str, list[float]]]], asked: dict[str, Any]
) -> list[list[float]]:
    """Step seconds of each plan, by turn: of its windows, where batches are drawn in stacks."""
    return [
        [float(np.median(window_means(turn[STEP], asked["jobs"][name]["stack"]))) for turn in taken]
        for name, taken in found.items()
    ]


def main(arguments: list[str]) -> None:
    rank, size, address, port, jobs, out = arguments
    keep_freed_memory()
    flush_denormals()  # as every rank does
    cores = usable_core_ids()
    asked = json.loads(Path(jobs).read_text())
    comm = alone = Communicator()
    if int(size) > 1:
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        with batch_threads():  # as the worker joins
            dist.init_process_group(
                "gloo", rank=int(rank), world_size=int(size), timeout=timedelta(seconds=900)
            )
        comm = Communicator(between_hosts=asked["between_hosts"])
        alone = comm.split([[each] for each in range(int(size))])
    opened: dict[str, Job] = {}
    for name, job in asked["jobs"].items():
        if job["ranks"] == int(size):
            opened[name] = Job(Path(job["plan"]), comm)
        elif int(rank) == 0:
            opened[name] = Job(Path(job["plan"]), alone)
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in opened}
    levels: dict[str, list[float]] = {name: [] for name in opened}
    level = Disturbance(asked["seen"]).level if int(rank) == 0 else lambda: 0.0
    patience = float(asked["patience"])
    """Seconds that are left for turns to be taken once more."""
    for number, order in enumerate(asked["rounds"]):
        if number >= asked["planned"] and number % asked["repeats"] == 0:
            sure = int(rank) == 0 and standard_error(medians(found, asked), [*levels.values()])
            if comm.broadcast_object(sure) <= PRECISE:
                break
        for name in order:
            job = asked["jobs"][name]
            discard = asked["discard"] + (asked["warm_up"] if number == 0 else 0)
            turn, worst = None, 0.0
            for attempt in range(2):
                begun, before = time.perf_counter(), level()
                comm.barrier()
                if name in opened:
                    turn = opened[name].turn(job["steps"] + discard, discard, cores)
                worst = max(before, level())
                took = time.perf_counter() - begun
                again = worst >= DISTURBED and took < patience and attempt == 0
                patience -= took if attempt else 0.0
                if not comm.broadcast_object(again):
                    break
            if turn is not None:
                found[name].append(turn)
                levels[name].append(worst)
    comm.barrier()
    for job in opened.values():
        job.loader.close()
    Path(out).write_text(json.dumps({"turns": found, "levels": levels}))
    if int(size) > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
