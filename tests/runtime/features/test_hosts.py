"""Rows dealt, replicated, in another clique, on another host and on disk, with real gloo ranks.

Each host has its own copy of the dataset, in which the rows that the plan does not give it are
poisoned: a row that is right came from where the plan says it is.
"""

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features import store as store_module
from gnnplan.runtime.features.peer import HostRows
from gnnplan.runtime.features.store import (
    OwnRows,
    load_own_rows,
    open_host_rows,
    open_store,
    read_location,
)
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import DynamicCache, Plan, Source
from tests.support.caches import SlowLru
from tests.support.inprocess import run_in_process
from tests.support.ranks import free_port, run_on_ranks

MakeGraph = Callable[..., Graph]
MakePlan = Callable[..., Plan]

KINDS = ("own", "peer", "host", "remote", "disk")
POISON = -12345.0


def _copy_for_host(graph: Graph, host: int, held: Any) -> Path:
    """A dataset folder whose rows that the host does not hold are poisoned."""
    folder = Path(f"{graph.path}-host-{host}")
    shutil.copytree(graph.path, folder, dirs_exist_ok=True)
    name = "x_data.npy" if graph.x is None else "x.npy"
    values = np.load(folder / name, mmap_mode="r+")
    lost = np.setdiff1d(np.arange(graph.num_nodes), held)
    if graph.x_csr is not None:
        lost = np.flatnonzero(np.isin(np.repeat(
            np.arange(graph.num_nodes), np.diff(graph.x_csr.indptr)), lost))  # fmt: skip
    values[lost] = POISON
    values.flush()
    return folder


def _expected_kinds(plan: Plan, folder: Path, rank: int) -> Any:
    """Kind of each node's source for one rank; what is served by the same place counts as there."""
    devices, sources = plan.strategy.devices, plan.strategy.features.sources
    names: list[str] = []
    for source in sources:
        kind: str = source.kind
        if kind == "peer" and source.rank == rank:
            kind = "own"
        if kind == "remote" and devices[source.rank].host == devices[rank].host:
            kind = "host"
        names.append(kind)
    codes = np.load(folder / plan.arrays[f"feature_location_{rank}"].file)
    return np.array(names)[codes & 0xFF]


def _rows(graph: Graph) -> Any:
    if graph.x is not None:
        return np.array(graph.x).astype(np.float32)
    csr = graph.x_csr
    assert csr is not None
    rows = np.zeros((graph.num_nodes, graph.feature_dim), np.float32)
    rows[np.repeat(np.arange(graph.num_nodes), np.diff(csr.indptr)), csr.indices] = csr.data
    return rows


def _read_all(rank: int, size: int, port: int, cases: list[tuple[Path, Path, list[Path]]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=300))
    for whole, folder, copies in cases:
        plan = load_plan(folder)
        x = _rows(open_graph(whole, validate=False))
        graph = open_graph(copies[plan.strategy.devices[rank].host], validate=False)
        store = open_store(graph, plan, folder, rank, comm=Communicator(), threads=rank + 1)
        kinds = _expected_kinds(plan, folder, rank)
        slots = plan.strategy.features.cache.rows or [0] * size
        slow = SlowLru(slots[rank])
        rng = np.random.default_rng(rank)
        for step in range(5):
            # In every step some rank reads nothing; in one step nobody does.
            num_ids = 0 if step == 4 or step % size == rank else int(rng.integers(1, 2000))
            ids = rng.integers(0, graph.num_nodes, num_ids)
            out = np.full((num_ids, graph.feature_dim), np.nan, np.float32)
            counters = store.read(ids, out)
            assert np.array_equal(out, x[ids])
            below = ids
            if slots[rank]:
                held, rest = slow.held(), ids[kinds[ids] != "own"]
                touched, hits = slow.touch(rest)
                assert counters.rows["cache"] == rest.size - touched + hits
                missing = [v for v in dict.fromkeys(rest.tolist()) if v not in held]
                below = np.append(ids[kinds[ids] == "own"], np.array(missing, np.int64))
            for kind in KINDS:
                expected = int((kinds[below] == kind).sum())
                assert counters.rows.get(kind, 0) == expected, (folder.name, kind)
                if graph.x is not None:
                    assert counters.bytes.get(kind, 0) == expected * graph.row_bytes
        store.close()
        np.save(folder / f"seen-{rank}.npy", [(kinds == k).sum() for k in KINDS])
    dist.destroy_process_group()


def _run(size: int, cases: list[tuple[Path, Path, list[Path]]]) -> dict[str, Any]:
    """Read under every plan on `size` ranks; rows by kind (in KINDS' order), over ranks."""
    port = free_port()
    run_on_ranks(_read_all, (size, port, cases), size)
    return {
        folder.name: np.array([np.load(folder / f"seen-{r}.npy") for r in range(size)])
        for _, folder, _ in cases
    }


def _sources(*names: str) -> list[Source]:
    """For example `peer1` for the rows of rank 1."""
    found: list[Source] = []
    for name in names:
        kind: Any = name.rstrip("0123456789")
        found.append(Source(kind=kind, rank=int(name[len(kind) :] or -1)))
    return found


@pytest.mark.distributed
def test_dealt_replicated_and_split_hosts_on_two_ranks(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    n = 600
    graph, half = make_graph(n, 33), make_graph(n, 24, np.float16)
    sparse = make_graph(n, 12, sparse=True)
    parts = {0: np.arange(0, n, 2), 1: np.arange(1, n, 2)}
    overlap = {0: np.arange(400), 1: np.arange(200, n)}
    cases: list[Any] = []

    def add(g: Graph, name: str, sources: list[Source], **settings: Any) -> None:
        make_plan(g, sources, num_ranks=2, name=name, **settings)
        held = settings.get("host_rows", {})
        copies = [_copy_for_host(g, h, held[h]) if h in held else g.path for h in (0, 1)]
        cases.append((g.path, tmp_path / name, copies))

    two = {"hosts": [0, 1]}
    add(graph, "dealt", _sources("own", "peer0", "peer1", "host"), dealt="dealt")
    add(graph, "replicated", _sources("host", "own"), dealt="replicated")
    add(graph, "cliques", _sources("peer1", "peer0", "disk"), cliques=[0, 1])
    add(graph, "remote", _sources("own", "host", "remote0", "remote1"), **two)
    remote = _sources("host", "remote1", "own", "remote0")
    add(half, "split", remote, host_rows=parts, seed=3, **two)
    everything = _sources("disk", "peer0", "remote1", "peer1", "host", "remote0", "own")
    add(graph, "everything", everything, host_rows=overlap, **two)
    add(sparse, "sparse", remote, host_rows=parts, **two)
    lru = DynamicCache(policy="lru", rows=[0, 150])  # rank 1 alone: the exchanges stay in step
    add(graph, "cached", everything, host_rows=overlap, cache=lru, **two)
    seen = _run(2, cases)
    own, peer, host, other, disk = range(5)
    assert (seen["dealt"][:, [own, peer, host]] > 50).all()
    assert (seen["replicated"][:, own] > 150).all()
    assert (seen["cliques"][:, [peer, disk]] > 100).all()
    assert (seen["remote"][:, [own, host, other]] > 50).all()
    assert (seen["split"][:, [own, host, other]] > 30).all()
    assert (seen["everything"] > 10).all()
    assert (seen["sparse"][:, [own, host, other]] > 30).all()


@pytest.mark.distributed
def test_three_ranks_on_two_hosts_read_each_others_memory(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    n = 600
    graph = make_graph(n, 33)
    held = {0: np.arange(0, 350), 1: np.arange(250, n)}
    # Ranks 0 and 2 share host 0, where remote0 is the shared mapping and not another host.
    sources = _sources("remote1", "own", "peer2", "host", "remote0", "peer0", "disk", "peer1")
    make_plan(graph, sources, num_ranks=3, hosts=[0, 1, 0], host_rows=held, name="three")
    copies = [_copy_for_host(graph, h, held[h]) for h in (0, 1)]
    seen = _run(3, [(graph.path, tmp_path / "three", copies)])["three"]
    assert (seen[:, :4] > 10).all()


def test_own_rows_come_part_by_part_on_ranks_that_keep_unlike_numbers_of_them(
    make_graph: MakeGraph,
    make_plan: MakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "_PART_BYTES", 40 * 4 * 33)  # 40 rows
    n, folder = 600, tmp_path / "parts"
    graph, held = make_graph(n, 33), {0: np.arange(0, n, 2), 1: np.arange(1, n, 2)}
    sources = _sources("host", "remote1", "own", "remote0")
    plan = make_plan(
        graph, sources, num_ranks=2, hosts=[0, 1], host_rows=held, seed=3, name="parts"
    )
    copies = [open_graph(_copy_for_host(graph, h, held[h]), validate=False) for h in (0, 1)]

    def rank(comm: Communicator) -> int:
        here = copies[comm.rank], plan, folder, comm.rank
        location, own_ids = read_location(*here)
        served, hosts = open_host_rows(*here, location, 1)
        ids = own_ids[comm.rank]
        found = load_own_rows(OwnRows(served, plan, comm.rank, ids, hosts, comm, 1))
        np.testing.assert_array_equal(found, _rows(graph)[ids])
        return -(-ids.size // 40)

    first, second = run_in_process(2, rank)
    assert first != second
    assert min(first, second) > 3


def test_a_row_that_its_host_does_not_hold_is_refused(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    graph = make_graph()

    def forget(arrays: dict[str, Any]) -> None:
        arrays["host_rows_0"] = np.setdiff1d(np.arange(500), [77])
        arrays["feature_location_0"] = np.arange(500, dtype=np.uint32) << 8

    make_plan(graph, [Source(kind="host")], change=forget)
    with pytest.raises(PlanError, match="node 77 points to host rows of host 0, which does not"):
        open_store(graph, load_plan(tmp_path / "plan"), tmp_path / "plan", 0, threads=1)
    sources = [Source(kind="host"), Source(kind="remote", rank=4)]
    make_plan(graph, sources, num_ranks=2, hosts=[0, 1, 0, 0, 1], name="far")
    with pytest.raises(PlanError, match="expected a rank from 0 to 1"):
        HostRows(plan := load_plan(tmp_path / "far"), tmp_path / "far", 500).check(
            _table(plan, tmp_path / "far"), 0
        )


def _table(plan: Plan, folder: Path) -> Any:
    from gnnplan.runtime.features.location import LocationTable

    codes = np.load(folder / plan.arrays["feature_location_0"].file)
    return LocationTable(codes, plan.strategy.features.sources)


def test_own_rows_come_from_a_host_that_holds_them(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    held = {0: np.arange(300), 1: np.arange(200, 450)}
    plan = make_plan(
        make_graph(), [Source(kind="own"), Source(kind="disk")], num_ranks=3, hosts=[1, 0, 0],
        change=lambda arrays: arrays.update({f"host_rows_{h}": ids for h, ids in held.items()}),
    )  # fmt: skip
    hosts = HostRows(plan, tmp_path / "plan", 500)
    ids = np.array([0, 1, 250, 449])
    assert hosts.lacking(ids, 0).tolist() == [0, 1]
    assert hosts.lacking(ids, 2).tolist() == [3]
    # Host 0 has ranks 1 and 2 in turns by id; only host 1, rank 0, holds node 449.
    assert hosts.server_of(ids).tolist() == [1, 2, 1, 0]
    with pytest.raises(PlanError, match="no host holds the row of node 450"):
        hosts.server_of(np.array([3, 450]))
