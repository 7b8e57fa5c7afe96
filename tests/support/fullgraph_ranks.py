"""Ranks of full-graph training in processes of their own, measured: bytes, memory, stages."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gnnplan.planner.fullgraph.formulas import PartSizes
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.fullgraph.part import Part
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.process import memory_bytes
from gnnplan.runtime.train.fullgraph import FullGraphLoop, open_full_graph


def join(rank: int, size: int, port: int, address: str = "127.0.0.1") -> Communicator:
    """Enter the gloo group as a rank of its own process; one rank alone needs none."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=900))
    return Communicator()


def sizes_of(part: Part) -> PartSizes:
    """What the planner's formulas take of a part."""
    return PartSizes(
        inner=part.num_inner,
        halo=part.num_halo,
        sent=part.send.shape[0],
        inner_edges=part.inner_edges[1].shape[0],
        halo_edges=part.halo_edges[1].shape[0],
    )


class PeakMemory:
    """Largest private resident memory while a `with` block runs, above what it began with."""

    def __enter__(self) -> "PeakMemory":
        self.baseline = self.peak = memory_bytes()[1]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.is_set():
            self.peak = max(self.peak, memory_bytes()[1])
            time.sleep(0.0005)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        """Peak above the baseline."""
        return self.peak - self.baseline


def open_rank(folder: Path, graph: Graph, comm: Communicator) -> FullGraphLoop:
    """The loop of a plan folder, as the worker opens it."""
    plan = load_plan(folder)
    return open_full_graph(plan, folder, graph, torch.device("cpu"), comm)[1]
