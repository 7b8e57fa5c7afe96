"""One rank of `cooperative`: trains a list of plans one by one and writes what it measured.

python -m tests.benchmarks.cooperative_rank RANK SIZE ADDRESS PORT JOBS.json OUT.jsonl
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator, Traffic
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.stages import Stage
from tests.support.cooperative import open_rank

STAGES = (
    Stage.SAMPLE, Stage.EXCHANGE_IDS, Stage.GATHER, Stage.EXCHANGE_ROWS, Stage.FORWARD_BACKWARD,
    Stage.HALO_EXCHANGE, Stage.ALL_REDUCE,
)  # fmt: skip


def train(job: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    """Epochs after one that warms up; every rank ends its epochs together."""
    folder = Path(job["plan"])
    plan = load_plan(folder)
    graph = open_graph(Path(plan.graph.path), validate=False)
    loader, loop = open_rank(plan, folder, graph, comm)
    seconds: list[float] = []
    losses: list[float] = []
    before, card = comm.traffic, sent_by_card()
    for epoch in range(1 + job["epochs"]):
        comm.barrier()
        before, card = comm.traffic, sent_by_card()
        start = time.perf_counter()
        losses = loop.run(loader.batches(), loader.handed_out, lambda _: None)
        comm.barrier()
        if epoch:
            seconds.append(time.perf_counter() - start)
    steps = len(losses)
    medians = {
        str(stage): report.mean
        for stage, report in loop.meter.stages(skip_steps=steps).items()
        if stage in STAGES
    }
    halo = sent(comm.traffic, Stage.HALO_EXCHANGE) - sent(before, Stage.HALO_EXCHANGE)
    loader.close()
    return {
        "job": job["name"], "rank": comm.rank, "epoch_seconds": seconds, "steps": steps,
        "stage_seconds": medians, "card_bytes": sent_by_card() - card, "hidden_bytes": halo,
        "last_loss": losses[-1],
    }  # fmt: skip


def sent(traffic: dict[Stage, Traffic], stage: Stage) -> int:
    """Bytes that this rank sent in a stage."""
    return traffic[stage].sent_bytes if stage in traffic else 0


def sent_by_card() -> int:
    """Bytes that left this host's card: what the kernel counts, with all headers."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        card, _, counts = line.strip().partition(":")
        if card == name:
            return int(counts.split()[8])
    return 0


def main(arguments: list[str]) -> None:
    rank, size, address, port, jobs, out = arguments
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    dist.init_process_group(
        "gloo", rank=int(rank), world_size=int(size), timeout=timedelta(seconds=600)
    )
    comm = Communicator()
    with Path(out).open("w") as file:
        for job in json.loads(Path(jobs).read_text()):
            file.write(json.dumps(train(job, comm)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
