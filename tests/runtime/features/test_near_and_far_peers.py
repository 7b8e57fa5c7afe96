"""Four processes whose peers are partly near, partly far: each is read the way it can be.

A rank's device is cores with a GPU's number, and the ways between devices are the test's.
"""

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
from gnnplan.runtime.features.location import SOURCE_BITS, SOURCE_MASK
from gnnplan.runtime.features.peer import DeviceExchange
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan, Source
from tests.support.ranks import free_port, run_on_ranks

pytest.importorskip("triton")

RANKS = 4
SOURCES = [Source(kind="own"), *(Source(kind="peer", rank=r) for r in range(RANKS)),
           Source(kind="host")]  # fmt: skip
HOST = len(SOURCES) - 1
BLOCKED = {(0, 3), (3, 0)}
MAPPED = {
    "hosts": {0: [1], 1: [0], 2: [3], 3: [2]},
    "cliques": {0: [1], 1: [0], 2: [3], 3: [2]},
    "blocked": {0: [1, 2], 1: [0, 2, 3], 2: [0, 1, 3], 3: [1, 2]},
}
"""Peers that each rank maps, by plan."""
EXCHANGED = {
    "hosts": {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]},
    "blocked": {0: [3], 1: [], 2: [], 3: [0]},
}
"""Peers whose rows each rank exchanges, by plan; of cliques no rank exchanges anything."""


def _has_way(name: str, reader: int, owner: int) -> bool:
    if name == "cliques":
        return reader // 2 == owner // 2
    return name == "hosts" or (reader, owner) not in BLOCKED


def _on_rank(rank: int, port: int, graph_folder: Path, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    graph = open_graph(graph_folder, validate=False)
    for name in MAPPED:
        _hold_plan(name, rank, graph, folder / name)
    dist.destroy_process_group()
    (folder / f"done-{rank}").touch()


def _hold_plan(name: str, rank: int, graph: Graph, folder: Path) -> None:
    from gnnplan.runtime import processor
    from gnnplan.runtime.features.device_open import open_device_store

    cores: Any = processor.CoresProcessor
    cores.index = rank
    cores.can_map = lambda self, owner: _has_way(name, rank, owner)
    plan = load_plan(folder)
    store = open_device_store(
        graph, plan, folder, rank, torch.device("cpu"), comm=Communicator(), threads=1
    )
    sources = plan.strategy.features.sources
    mapped = [sources[n].rank for n, each in store._table.sources.items() if each.kind == "peer"]
    assert sorted(mapped) == MAPPED[name][rank]
    assert store.exchanges == (name in EXCHANGED)
    for exchange in store._others:
        assert isinstance(exchange, DeviceExchange)
        ranks = exchange._ranks.tolist()
        asked = {owner for owner in ranks if owner != RANKS}
        assert sorted(asked) == EXCHANGED[name][rank]
    _hold_rows(store, rank, graph, folder, plan)
    dist.barrier()
    store.close()


def _hold_rows(store: Any, rank: int, graph: Graph, folder: Path, plan: Plan) -> None:
    x = np.array(graph.x).astype(np.float32)
    codes = np.load(folder / plan.arrays[f"feature_location_{rank}"].file)
    numbers = codes & SOURCE_MASK
    kinds = np.array([source.kind for source in plan.strategy.features.sources])[numbers]
    kinds[numbers == 1 + rank] = "own"
    rng = np.random.default_rng(rank)
    for step in range(RANKS + 1):
        # In every step but the last one rank reads nothing.
        ids = rng.integers(0, graph.num_nodes, 0 if step == rank else 40)
        out = np.full((ids.size, graph.feature_dim), np.nan, np.float32)
        counters = store.read(ids, out)
        np.testing.assert_array_equal(out, x[ids])
        for kind in ("own", "peer", "host"):
            assert counters.rows.get(kind, 0) == int((kinds[ids] == kind).sum()), kind


def _keep_cliques(arrays: dict[str, Any]) -> None:
    """Let ranks read what lies in the other clique from the host."""
    for rank in range(RANKS):
        codes = arrays[f"feature_location_{rank}"]
        owners = (codes & SOURCE_MASK).astype(np.int64) - 1
        apart = (owners >= 0) & (owners < RANKS) & (owners // 2 != rank // 2)
        nodes = np.flatnonzero(apart)
        codes[nodes] = (nodes << SOURCE_BITS) | HOST


@pytest.mark.distributed
def test_near_peers_are_mapped_and_far_ones_exchanged_in_one_store(
    make_graph: Callable[..., Graph], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    graph = make_graph(num_nodes=240, dim=5)
    shape: dict[str, Any] = {"num_ranks": RANKS, "dealt": "dealt"}
    make_plan(graph, SOURCES, name="hosts", hosts=[0, 0, 1, 1], **shape)
    make_plan(graph, SOURCES, name="cliques", change=_keep_cliques, **shape)
    make_plan(graph, SOURCES, name="blocked", **shape)
    run_on_ranks(_on_rank, (free_port(), graph.path, tmp_path), RANKS)
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(RANKS))
