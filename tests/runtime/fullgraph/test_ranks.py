"""On real gloo ranks: gradients of one process, and bytes as counted by hand."""

import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.plan.schema import FullGraph
from tests.runtime.fullgraph.cases import (
    full_graph_gradient,
    gradient_of,
    new_model,
    pyg_loss,
    random_case,
)
from tests.support.ranks import free_port, run_on_ranks

BAR = 1e-5
SETTINGS = {
    "boundary": FullGraph(),
    "precomputed": FullGraph(precompute_first_layer=True),
    "broadcast": FullGraph(exchange="broadcast"),
}


def _on_rank(rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=300))
    try:
        comm, case = Communicator(), random_case()
        # Rank size - 1 owns nothing where there are more than two.
        owners = np.random.default_rng(0).integers(0, max(1, size - (size > 2)), len(case.y))
        partition = owners.astype(np.int32)
        for name in ("sage", "gcn", "gat"):
            model = new_model(name, case.x.shape[1])
            pyg_loss(model, case).backward()
            expected = gradient_of(model)
            for kind, settings in SETTINGS.items():
                if name == "gat" and kind == "broadcast":
                    continue
                overlap = kind == "boundary" and name == "sage"  # a process group of its own
                _, found, _ = full_graph_gradient(
                    case, name, partition, settings, comm, overlap=overlap
                )
                error = float((found - expected).abs().max() / expected.abs().max())
                assert error < BAR, (name, kind, error)
        (folder / f"done-{rank}").touch()
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_on_real_ranks_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    run_on_ranks(_on_rank, (size, free_port(), tmp_path), size)
    assert len(list(tmp_path.glob("done-*"))) == size
