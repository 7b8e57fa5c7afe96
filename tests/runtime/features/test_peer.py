"""The peer tier on real gloo ranks: every mix returns x[ids] on every rank, also with no ids."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.store import open_store
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan, Source
from tests.support.ranks import free_port, run_on_ranks

MakeGraph = Callable[..., Graph]
MakePlan = Callable[..., Plan]


def _read_on_rank(rank: int, size: int, port: int, graph_folder: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    graph, plan = open_graph(graph_folder, validate=False), load_plan(folder)
    store = open_store(graph, plan, folder, rank, comm=Communicator(), threads=rank + 1)
    x = convert_rows(np.array(graph.x), np.dtype(np.float32))
    codes = np.load(folder / plan.arrays[f"feature_location_{rank}"].file)
    kinds = np.array([source.kind for source in plan.strategy.features.sources])[codes & 0xFF]
    rng = np.random.default_rng(rank)
    for step in range(6):
        # In every step some rank reads nothing; in one step nobody does.
        num_ids = 0 if step == 5 or step % size == rank else int(rng.integers(1, 2000))
        ids = rng.integers(0, graph.num_nodes, num_ids)
        out = np.full((num_ids, graph.feature_dim), np.nan, np.float32)
        counters = store.read(ids, out)
        assert np.array_equal(out, x[ids])
        for kind in ("own", "peer", "host", "disk"):
            expected = int((kinds[ids] == kind).sum())
            assert counters.rows.get(kind, 0) == expected
            assert counters.bytes.get(kind, 0) == expected * graph.row_bytes
        assert set(counters.seconds) == {"exchange_ids", "exchange_rows"}
    assert store.resident_bytes > plan.strategy.features.own_rows[rank] * graph.row_bytes
    store.close()
    np.save(folder.parent / f"done-{rank}.npy", [(kinds == k).sum() for k in ("own", "peer")])
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "others", "dtype"),
    [
        (2, ["host"], np.float32),
        (2, ["disk"], BFLOAT16),
        (3, ["own", "host", "disk"], np.float32),
    ],
)
def test_any_mix_with_peers_returns_the_rows_on_every_rank(
    make_graph: MakeGraph,
    make_plan: MakePlan,
    tmp_path: Path,
    size: int,
    others: list[str],
    dtype: Any,
) -> None:
    graph = make_graph(num_nodes=800, dim=33, dtype=dtype)
    # Peers out of order and between the others: nothing may lean on the sources' order.
    kinds: list[Any] = others
    sources = [Source(kind=kind) for kind in kinds]
    for rank in range(size):
        sources.insert(rank % 2, Source(kind="peer", rank=rank))
    make_plan(graph, sources, num_ranks=size)
    arguments = (size, free_port(), graph.path, tmp_path / "plan")
    run_on_ranks(_read_on_rank, arguments, size)
    for rank in range(size):
        own, peer = np.load(tmp_path / f"done-{rank}.npy")
        assert peer > 100
        assert own > 0 or "own" not in others
