"""Two ranks train on one device, each reading the other's rows, with the losses of CPU ranks.

Where there is a GPU both processes use it (their rows by CUDA IPC, control and gradients by gloo);
else CPU tensors stand for the device's and kernels run in Triton's interpreter.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.mesh import Mesh, open_mesh
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.worker import make_loop
from tests.support.plans import make_plan
from tests.support.ranks import free_port, run_on_ranks

pytest.importorskip("triton")

RANKS, STEPS = 2, 4


def _losses(plan: Path, graph: Graph, mesh: Mesh, *, on_device: bool) -> tuple[list[float], Any]:
    """Losses of some steps, and every vertex that their batches read, in order."""
    loader = PlannedLoader(
        plan, graph, rank=mesh.rank, size=mesh.size, device=mesh.device, comm=mesh.comm,
        on_device=on_device,
    )  # fmt: skip
    loop = make_loop(loader.plan, graph, mesh, loader)
    found, ids = list[float](), list[Any]()
    for step in range(STEPS):
        batch = next(iter(loader.batches(1)))
        ids.append(np.array(batch.n_id))
        found.append(loop.step(batch, step))
    # The numbers of rows by source are the plan's, whoever reads them.
    rows = {k: n for k, n in loader.meter.totals()[0].items() if n}
    dist.barrier()
    loader.close()
    return found, (np.concatenate(ids), rows)


def _on_rank(rank: int, port: int, graph_folder: Path, folder: Path, ways: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
    }  # fmt: skip
    graph = open_graph(graph_folder, validate=False)
    mesh = open_mesh(load_plan(folder / ways[0]), timeout_seconds=120)
    assert dist.get_backend() == "gloo"
    assert mesh.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    on_cores = replace(mesh, device=torch.device("cpu"))
    plain, _ = _losses(folder / "cores", graph, on_cores, on_device=False)
    parts, _ = _losses(folder / "parts", graph, on_cores, on_device=False)
    assert parts == plain  # of two numbers a sum has one order
    for way in ways:
        found, read = _losses(folder / way, graph, mesh, on_device=True)
        expected, expected_read = _losses(folder / "cores", graph, on_cores, on_device=False)
        np.testing.assert_array_equal(read[0], expected_read[0])
        assert read[1] == expected_read[1]
        assert read[1]["peer"] > 20
        # The same kernels on the CPU: the same bits. On a GPU sums are taken in another order.
        tolerance = 1e-5 if mesh.device.type == "cuda" else 0.0
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=0.0)
        np.save(folder / f"losses-{way}-{rank}.npy", found)
    mesh.close()


def _plan(graph: Graph, folder: Path, kind: Literal["cpu", "cuda"], **changes: Any) -> Plan:
    """Both ranks on the one device of their kind, own rows on each, the other's read from it."""
    plan = make_plan(
        graph, folder, ranks=RANKS, peers=True, own_rows=120, fanouts=[3, 2], batch_size=24,
        model="gcn", sample_threads=1,
    )  # fmt: skip
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    strategy = plan.strategy
    if kind == "cuda":
        gpus = [replace(d, kind=kind, index=0, memory="gpu0.memory") for d in strategy.devices]
        strategy = replace(strategy, devices=gpus)
    features = replace(strategy.features, peer_way=changes.get("peer_way", "mapped"))
    threads = replace(strategy.threads, comm=changes.get("comm", 0))
    strategy = replace(strategy, features=features, threads=threads)
    return save_plan(replace(plan, strategy=strategy), arrays, folder)


@pytest.mark.distributed
def test_two_ranks_on_one_device_have_the_losses_of_cpu_ranks(tmp_path: Path) -> None:
    graph = generate_sbm(
        tmp_path / "graph", num_nodes=300, degree=6.0, feature_dim=5, num_classes=3, seed=5
    )
    kind: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    _plan(graph, tmp_path / "cores", "cpu")
    _plan(graph, tmp_path / "parts", "cpu", comm=1)
    _plan(graph, tmp_path / "mapped", kind)
    _plan(graph, tmp_path / "exchange", kind, peer_way="exchange", comm=1)
    arguments = (free_port(), graph.path, tmp_path, ["mapped", "exchange"])
    run_on_ranks(_on_rank, arguments, RANKS)
    found = [np.load(path) for path in sorted(tmp_path.glob("losses-*.npy"))]
    assert len(found) == 4
    assert all(len(each) == STEPS for each in found)
    # The loss is that of the global batch: the same on both ranks.
    assert all(np.allclose(each, found[0], rtol=1e-5) for each in found)
