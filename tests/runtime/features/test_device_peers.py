"""Two processes read each other's rows: in place, or by exchange; on one GPU where there is one."""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import DynamicCache, Plan, Source
from tests.support.ranks import free_port, run_on_ranks

pytest.importorskip("triton")

MakeGraph = Callable[..., Graph]
MakePlan = Callable[..., Plan]
SOURCES = [
    Source(kind="own"), Source(kind="peer", rank=1), Source(kind="host"),
    Source(kind="peer", rank=0), Source(kind="disk"),
]  # fmt: skip


def _on_rank(rank: int, port: int, graph_folder: Path, folder: Path, device_type: str) -> None:
    from gnnplan.runtime.features.device_open import open_device_store
    from gnnplan.runtime.features.peer import DeviceExchange
    from gnnplan.runtime.loader.loader import PlannedLoader

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    graph, saved = open_graph(graph_folder, validate=False), load_plan(folder / "plan")
    device = torch.device(device_type)
    x = np.array(graph.x).astype(np.float32)
    codes = np.load(folder / "plan" / saved.arrays[f"feature_location_{rank}"].file)
    kinds = np.array([source.kind for source in SOURCES])[codes & 0xFF]
    for way in ("mapped", "exchange"):
        features = replace(saved.strategy.features, peer_way=way)
        plan = replace(saved, strategy=replace(saved.strategy, features=features))
        store = open_device_store(
            graph, plan, folder / "plan", rank, device, comm=Communicator(), threads=1
        )
        exchanged = any(isinstance(each, DeviceExchange) for each in store._others)
        assert exchanged == (way == "exchange")
        rng = np.random.default_rng(rank)
        for step in range(4):
            # In every step but the last some rank reads nothing.
            ids = rng.integers(0, graph.num_nodes, 0 if step == rank else 60)
            out = np.full((ids.size, graph.feature_dim), np.nan, np.float32)
            counters = store.read(ids, out)
            np.testing.assert_array_equal(out, x[ids])
            for kind in ("own", "peer", "host", "disk"):
                assert counters.rows.get(kind, 0) == int((kinds[ids] == kind).sum()), kind
        dist.barrier()
        store.close()
    loaders = [
        PlannedLoader(folder / "cached", graph, device=device_type, on_device=on_device)
        for on_device in (True, False)
    ]
    for found, expected in zip(*(each.batches(2) for each in loaders), strict=True):
        np.testing.assert_array_equal(found.n_id, expected.n_id)
        assert torch.equal(found.x.cpu(), expected.x.cpu())
    counts = [{k: n for k, n in each.meter.totals()[0].items() if n} for each in loaders]
    assert counts[0] == counts[1]
    dist.barrier()
    for each in loaders:
        each.close()
    np.save(folder / f"done-{rank}.npy", [(kinds == "peer").sum()])
    dist.destroy_process_group()


def _start(make_graph: MakeGraph, make_plan: MakePlan, folder: Path, device: str) -> None:
    graph = make_graph(num_nodes=300, dim=9)
    plan: dict[str, Any] = {"num_ranks": 2, "dealt": "dealt"}
    make_plan(graph, SOURCES, **plan)
    cache = DynamicCache(policy="lru", rows=[40, 40])
    make_plan(graph, SOURCES, name="cached", cache=cache, **plan)
    arguments = (free_port(), graph.path, folder, device)
    run_on_ranks(_on_rank, arguments, 2)
    for rank in range(2):
        assert np.load(folder / f"done-{rank}.npy")[0] > 20


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its memory is shared instead")
def test_two_processes_read_each_others_rows_in_shared_memory_and_by_exchange(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    _start(make_graph, make_plan, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of a GPU is shared by CUDA IPC")
def test_two_processes_on_one_gpu_read_each_others_rows_by_cuda_ipc_and_by_exchange(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    _start(make_graph, make_plan, tmp_path, "cuda:0")
