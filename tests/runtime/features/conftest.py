"""A plan around a small graph, with any mix of sources, as the planner would write it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.features.location import encode
from gnnplan.runtime.graph.dataset import Graph, SparseFeatures, write_graph
from gnnplan.runtime.graph.format import convert_rows
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import (
    Certificate,
    Device,
    DynamicCache,
    FeaturePlacement,
    GraphRef,
    Interval,
    MachineRef,
    Plan,
    Prediction,
    Source,
    Strategy,
    Workload,
)

MakeGraph = Callable[..., Graph]
MakePlan = Callable[..., Plan]


@pytest.fixture
def make_graph(tmp_path: Path) -> MakeGraph:
    """Write a ring of n nodes with random features: dense (of any dtype) or CSR."""

    def make(
        num_nodes: int = 500, dim: int = 100, dtype: Any = np.float32, sparse: bool = False
    ) -> Graph:
        rng = np.random.default_rng(num_nodes + dim)
        x = convert_rows(rng.standard_normal((num_nodes, dim)), np.dtype(dtype))
        features: dict[str, Any] = {"x": x}
        if sparse:
            held = rng.random(x.shape) < 0.2
            indptr = np.concatenate([[0], np.cumsum(held.sum(1))])
            csr = SparseFeatures(indptr=indptr, indices=np.nonzero(held)[1], data=x[held])
            features = {"x_csr": csr, "feature_dim": dim}
        some = np.arange(3)
        return write_graph(
            tmp_path / f"graph-{num_nodes}-{dim}-{np.dtype(dtype).str}-{sparse}",
            name="ring",
            indptr=np.arange(num_nodes + 1),
            indices=(np.arange(num_nodes) + 1) % num_nodes,
            train_idx=some,
            val_idx=some + 3,
            test_idx=some + 6,
            task="multiclass",
            num_classes=2,
            y=np.arange(num_nodes) % 2,
            **features,
        )

    return make


def _own_sets(num_nodes: int, num_ranks: int, dealt: str, rng: Any) -> list[Any]:
    """Own ids per rank: drawn apart, dealt over the ranks in turns, or the same on all."""
    if dealt == "random":
        return [
            rng.permutation(num_nodes)[: rng.integers(num_nodes // 4, num_nodes // 2)]
            for _ in range(num_ranks)
        ]
    hot = rng.permutation(num_nodes)[: num_nodes // 2]
    return [hot if dealt == "replicated" else hot[r::num_ranks] for r in range(num_ranks)]


def _placement(
    graph: Graph,
    sources: list[Source],
    hosts: list[int],
    host_rows: dict[int, Any],
    dealt: str,
    seed: int,
) -> tuple[dict[str, Any], list[int]]:
    """Own sets per rank, and codes that pick any source that really holds the node."""
    rng = np.random.default_rng(seed)
    n = graph.num_nodes
    own = _own_sets(n, len(hosts), dealt, rng)
    arrays: dict[str, Any] = {f"host_rows_{h}": ids for h, ids in host_rows.items()}
    for rank in range(len(hosts)):
        numbers, slots = np.full(n, -1), np.arange(n)
        for number in rng.permutation(len(sources)):
            source = sources[int(number)]
            if source.kind in ("host", "remote", "disk"):
                host = hosts[source.rank if source.kind == "remote" else rank]
                held = host_rows.get(host, np.arange(n))
                # The last one to come may keep a node or lose it; a node without one takes it.
                numbers[held[(numbers[held] < 0) | (rng.random(held.size) < 0.5)]] = number
        assert numbers.min() >= 0, "a node is held by no source of the plan"
        for number in rng.permutation(len(sources)):
            source = sources[int(number)]
            holder = {"own": rank, "peer": source.rank}.get(source.kind)
            if holder is None or (source.kind == "peer" and holder == rank):
                continue
            taken = np.flatnonzero(rng.random(own[holder].size) < 0.7)
            numbers[own[holder][taken]] = number
            slots[own[holder][taken]] = taken
        arrays[f"feature_location_{rank}"] = encode(numbers, slots)
        arrays[f"feature_own_ids_{rank}"] = own[rank].astype(np.int64)
    return arrays, [ids.size for ids in own]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    """Write a plan whose rows lie in the given sources (host, remote, disk hold all of them)."""

    def make(
        graph: Graph,
        sources: list[Source],
        *,
        num_ranks: int = 1,
        disk_budget_bytes: int = 1 << 20,
        storage_dtype: str | None = None,
        seed: int = 0,
        hosts: list[int] | None = None,
        host_rows: dict[int, Any] | None = None,
        cliques: list[int] | None = None,
        dealt: str = "random",
        cache: DynamicCache | None = None,
        name: str = "plan",
        change: Callable[[dict[str, Any]], None] = lambda arrays: None,
    ) -> Plan:
        hosts = hosts or [0] * num_ranks
        cliques = cliques or [0] * num_ranks
        arrays, own_rows = _placement(graph, sources, hosts, host_rows or {}, dealt, seed)
        change(arrays)
        features = FeaturePlacement(
            policy="random",
            sources=sources,
            own_rows=own_rows,
            row_bytes=graph.row_bytes,
            storage_dtype=storage_dtype or graph.feature_dtype,
            disk_budget_bytes=disk_budget_bytes,
            cache=cache or DynamicCache(),
        )
        zero = Interval(value=0.0, low=0.0, high=0.0)
        plan = Plan(
            version="test",
            graph=GraphRef(
                name=graph.name,
                path=str(graph.path),
                fingerprint=graph.fingerprint,
                num_nodes=graph.num_nodes,
                num_edges=graph.num_edges,
                feature_dim=graph.feature_dim,
                feature_dtype=graph.feature_dtype,
                num_classes=graph.num_classes,
                task=str(graph.task),
                num_train=3,
            ),
            machine=MachineRef(name="m", fingerprint="f", calibration="c", provenance="preset"),
            workload=Workload(),
            strategy=Strategy(
                features=features,
                devices=[
                    Device(rank=r, kind="cpu", host=hosts[r], clique=cliques[r])
                    for r in range(num_ranks)
                ],
            ),
            prediction=Prediction(
                step_seconds=zero,
                epoch_seconds=zero,
                steps_per_epoch=1,
                startup_seconds=0.0,
                stages={},
                stage_core_seconds={},
                traffic_bytes={},
                hit_rates={},
                memory_bytes={},
                bottleneck="none",
            ),
            certificate=Certificate(
                objective=0.0, lower_bound=0.0, gap=0.0, solver="none", status="none"
            ),
        )
        return save_plan(plan, arrays, tmp_path / name)

    return make
