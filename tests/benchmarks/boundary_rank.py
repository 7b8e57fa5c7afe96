"""One rank of `boundary`: trains a list of plans one after the other and writes what it measured.

python -m tests.benchmarks.boundary_rank RANK SIZE ADDRESS PORT JOBS.json OUT.jsonl
"""

import gc
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gnnplan.planner.fullgraph.formulas import broadcast_bytes, drawn_epoch_bytes
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.process import give_back_freed_memory, keep_freed_memory
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.evaluate import evaluate
from gnnplan.runtime.train.fullgraph import FullGraphLoop, WholeEpoch
from tests.support.fullgraph_ranks import PeakMemory, join, open_rank

STAGES = (
    Stage.SAMPLE, Stage.FORWARD_BACKWARD, Stage.HALO_EXCHANGE, Stage.ALL_REDUCE, Stage.OPTIMIZER
)  # fmt: skip


def widths_of(loop: FullGraphLoop) -> list[int]:
    """d_0 .. d_L of a SAGE or GCN model."""
    outputs = [int(conv.out_channels) for conv in loop.full.model.convs]  # pyright: ignore
    return [loop.x.shape[1], *outputs]


def predicted_bytes(loop: FullGraphLoop, epoch: int, num_nodes: int, comm: Communicator) -> int:
    """Bytes this rank sends in an epoch, from its draws; collective where edges are sampled."""
    settings, widths = loop.full.settings, widths_of(loop)
    part = loop.full.part
    if comm.size == 1:
        return 0
    if settings.exchange == "broadcast":
        return broadcast_bytes(part.num_inner, num_nodes, comm.size, widths)
    drawn = loop.full.layers(epoch)
    by_edge = settings.drop != "nodes" and 0 < settings.keep < 1
    ids = [sum(c.received_counts) for c in drawn] if by_edge else []
    return drawn_epoch_bytes(
        [sum(c.send_counts) for c in drawn],
        [sum(c.received_counts) for c in drawn],
        widths,
        id_rows=ids,
        ranks=comm.size,
    )


def run_job(job: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Train one plan; the rank's figures, the score of all ranks."""
    folder = Path(job["plan"])
    plan = load_plan(folder)
    graph = open_graph(Path(plan.graph.path), validate=False)
    gc.collect()
    # Watching memory costs time, as freed blocks must go back at once to be seen: only runs whose
    # accuracy is not asked for are watched.
    with nullcontext() if job.get("evaluate") else PeakMemory() as memory:
        loop = open_rank(folder, graph, comm)
        losses: list[float] = []
        seconds: list[float] = []
        for epoch in range(job["epochs"]):
            started = time.perf_counter()
            losses.append(loop.step(WholeEpoch(epoch=epoch), epoch))
            seconds.append(time.perf_counter() - started)
    stages = loop.meter.stages(skip_steps=min(2, job["epochs"] - 1))
    _, counted = loop.meter.totals()
    sampled = min(3, job["epochs"])
    found: dict[str, Any] = {
        "job": job["name"],
        "rank": comm.rank,
        "losses": losses,
        "seconds": seconds,
        "stages": {stage: stages[stage].median for stage in STAGES if stage in stages},
        "bytes": counted["halo"],
        "memory_bytes": memory.bytes if memory else None,
        "first_epochs_bytes": _bytes_until(loop, sampled),
        "first_epochs_predicted_bytes": sum(
            predicted_bytes(loop, epoch, graph.num_nodes, comm) for epoch in range(sampled)
        ),
    }
    if job.get("evaluate"):
        for split, ids in (("val", graph.val_idx), ("test", graph.test_idx)):
            found[split] = evaluate(
                loop.model, graph, None, ids, workload=plan.workload, comm=comm
            ).value
    loop.full.close()
    return found


def _bytes_until(loop: FullGraphLoop, epochs: int) -> int:
    _, everything = loop.meter.totals()
    _, later = loop.meter.totals(skip_steps=epochs)
    return everything["halo"] - later.get("halo", 0)


def main(arguments: list[str]) -> None:
    """Run every job and write one line for each."""
    rank, size, address, port = (
        int(arguments[0]),
        int(arguments[1]),
        arguments[2],
        int(arguments[3]),
    )
    jobs, out = Path(arguments[4]), Path(arguments[5])
    todo = json.loads(jobs.read_text())
    if any(job.get("evaluate") for job in todo):
        keep_freed_memory()
    else:
        give_back_freed_memory()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    comm = join(rank, size, port, address)
    with out.open("w") as file:
        for job in todo:
            file.write(json.dumps(run_job(job, comm)) + "\n")
            file.flush()
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
