"""Plans for tests, written without the planner: what the runtime needs, and no prediction."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime import codec
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.features.location import encode
from gnnplan.runtime.graph.dataset import Graph, SparseFeatures, open_graph, write_graph
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import (
    Certificate,
    Device,
    DynamicCache,
    FeaturePlacement,
    GraphRef,
    Interval,
    Links,
    MachineRef,
    Plan,
    Prediction,
    Sampler,
    Source,
    Strategy,
    Threads,
    TopologyPlacement,
    Workload,
)


def with_rows(graph: Graph, folder: Path, x: NDArray[Any] | None, **more: Any) -> Graph:
    """Write a graph of nodes anew, with other rows, and more arrays."""
    names = ("indptr", "indices", "y", "train_idx", "val_idx", "test_idx")
    arrays: dict[str, Any] = {name: np.array(getattr(graph, name)) for name in names}
    return write_graph(
        folder, name=folder.name, x=x, task="multiclass", num_classes=graph.num_classes,
        overwrite=True, **arrays, **more,
    )  # fmt: skip


def with_sparse_rows(graph: Graph, folder: Path) -> Graph:
    """Write a graph of nodes anew, with its rows in sparse form."""
    nodes, width = graph.num_nodes, graph.feature_dim
    rows = SparseFeatures(
        indptr=np.arange(nodes + 1) * width, indices=np.tile(np.arange(width), nodes),
        data=np.array(graph.x, np.float32).ravel(),
    )  # fmt: skip
    return with_rows(graph, folder, None, x_csr=rows, feature_dim=width)


def with_half_tables(graph: Graph, folder: Path) -> Graph:
    """Write a typed graph anew, with its tables of features rounded to float16."""
    shutil.copytree(graph.path, folder)
    for name, table in graph.x_by_type.items():
        np.save(folder / f"x_{name}.npy", table.astype(np.float16))
    meta = replace(graph.meta, feature_dtype="float16", fingerprint="")
    (folder / "graph.json").write_text(codec.dumps(meta))
    return open_graph(folder)


def change_strategy(plan: Plan, folder: Path, **fields: Any) -> Plan:
    """Write a plan anew into its folder, with other fields of its strategy."""
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    return save_plan(replace(plan, strategy=replace(plan.strategy, **fields)), arrays, folder)


def make_plan(
    graph: Graph,
    folder: Path,
    *,
    ranks: int = 1,
    model: str = "sage",
    fanouts: list[int] | None = None,
    batch_size: int = 256,
    hidden: int = 16,
    own_rows: int = 0,
    peers: bool = False,
    disk_budget_bytes: int = 0,
    dialect: Literal["first_seen", "every_hop"] = "first_seen",
    sample_threads: int = 0,
    prefetch_depth: int = 2,
    compute_threads: int = 1,
    capture: int = 0,
    learning_rate: float = 3e-3,
    seed: int = 0,
    pipeline: list[str] | None = None,
    links: dict[str, Any] | None = None,
    sampler: Sampler | None = None,
    cache: DynamicCache | None = None,
    topology: TopologyPlacement | None = None,
    more_arrays: dict[str, NDArray[Any]] | None = None,
    hosts: list[int] | None = None,
    **workload: Any,
) -> Plan:
    """Write a plan folder; a `sampler` comes with its own dialect.

    Rank r owns the `own_rows` nodes r, r + ranks, ... With `peers`, each rank reads the others'
    own rows from them. The rest is read from the host, or from disk where a budget is given.
    `hosts` holds each rank's host; without it there is one.
    """
    fanouts = [10, 5] if fanouts is None else fanouts
    placement, arrays = _placement(graph, ranks, own_rows, peers, disk_budget_bytes)
    placement = replace(placement, cache=cache or DynamicCache())
    arrays |= more_arrays or {}
    strategy = Strategy(
        sampler=sampler or Sampler(dialect=dialect),
        features=placement,
        topology=topology or TopologyPlacement(),
        devices=_devices([0] * ranks if hosts is None else hosts),
        threads=Threads(compute=compute_threads, sample=sample_threads, capture=capture),
        prefetch_depth=prefetch_depth,
        pipeline=pipeline or ["seeds", "sample", "gather", "batch"],
    )
    steps = -(-len(graph.train_idx) // batch_size)
    plan = Plan(
        version="test",
        graph=_graph_ref(graph),
        machine=MachineRef(
            name="here", fingerprint=machine_fingerprint(), calibration="none", provenance="preset"
        ),
        workload=Workload(
            model=model,
            num_layers=len(fanouts),
            hidden=hidden,
            fanouts=fanouts,
            batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
            links=Links(**(links or {})),
            **workload,
        ),
        strategy=strategy,
        prediction=_no_prediction(steps),
        certificate=Certificate(
            objective=0.0, lower_bound=0.0, gap=0.0, solver="none", status="none"
        ),
    )
    return save_plan(plan, arrays, folder)


def _devices(hosts: list[int]) -> list[Device]:
    return [
        Device(rank=rank, kind="cpu", host=host, clique=host, index=hosts[:rank].count(host))
        for rank, host in enumerate(hosts)
    ]


def _graph_ref(graph: Graph) -> GraphRef:
    return GraphRef(
        name=graph.name,
        path=str(graph.path),
        fingerprint=graph.fingerprint,
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        feature_dim=graph.feature_dim,
        feature_dtype=graph.feature_dtype,
        num_classes=graph.num_classes,
        task=str(graph.task),
        num_train=len(graph.train_idx),
    )


def _placement(
    graph: Graph, ranks: int, own_rows: int, peers: bool, disk_budget_bytes: int
) -> tuple[FeaturePlacement, dict[str, NDArray[Any]]]:
    sources = [Source(kind="disk" if disk_budget_bytes else "host"), Source(kind="own")]
    sources += [Source(kind="peer", rank=r) for r in range(ranks)] if peers else []
    own = [np.arange(r, graph.num_nodes, ranks, dtype=np.int64)[:own_rows] for r in range(ranks)]
    arrays: dict[str, NDArray[Any]] = {}
    for rank in range(ranks):
        numbers = np.zeros(graph.num_nodes, np.uint8)
        slots = np.arange(graph.num_nodes, dtype=np.int64)
        for owner in range(ranks):
            if owner == rank or peers:
                numbers[own[owner]] = 1 if owner == rank else 2 + owner
                slots[own[owner]] = np.arange(len(own[owner]))
        arrays[f"feature_location_{rank}"] = encode(numbers, slots)
        arrays[f"feature_own_ids_{rank}"] = own[rank]
    placement = FeaturePlacement(
        policy="test",
        sources=sources,
        own_rows=[len(ids) for ids in own],
        row_bytes=graph.row_bytes,
        storage_dtype=graph.feature_dtype,
        disk_budget_bytes=disk_budget_bytes,
    )
    return placement, arrays


def _no_prediction(steps: int) -> Prediction:
    nothing = Interval(value=0.0, low=0.0, high=0.0)
    return Prediction(
        step_seconds=nothing,
        epoch_seconds=nothing,
        steps_per_epoch=steps,
        startup_seconds=0.0,
        stages={},
        stage_core_seconds={},
        traffic_bytes={},
        hit_rates={},
        memory_bytes={},
        bottleneck="none",
    )
