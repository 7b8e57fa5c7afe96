"""Plans of mode full-graph through the worker: losses, resumption, report, ranks."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime import worker
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import FullGraph, Workload
from gnnplan.runtime.report import RunReport, load_report
from tests.support.fullgraph_plans import grown_parts, make_full_graph_plan
from tests.support.ranks import free_port, run_on_ranks, train_on_ranks, train_under_torchrun

EPOCHS = 4


def train(plan: Path, run: Path, **settings: Any) -> RunReport:
    run.mkdir(exist_ok=True)
    settings = {"epochs": EPOCHS, "eval_every": 0, "pin": False} | settings
    return worker.run(RunConfig(plan_folder=str(plan), run_folder=str(run), **settings))


def pyg_losses(graph: Graph, model_name: str) -> list[float]:
    """Adam on the whole graph with PyG's layers; the same model, one step per epoch."""
    workload = Workload(model=model_name, hidden=16, fanouts=[-1, -1], learning_rate=0.01)
    model: Any = build_model(workload, graph.feature_dim, graph.num_classes, "multiclass")
    degree = np.diff(graph.indptr)
    dst = np.repeat(np.arange(graph.num_nodes), degree)
    edge_index = torch.from_numpy(np.stack([graph.indices.astype(np.int64), dst]))
    assert graph.x is not None
    assert graph.y is not None
    x, y = torch.from_numpy(np.array(graph.x)), torch.from_numpy(np.array(graph.y))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(EPOCHS):
        h = model.convs[0](x, edge_index).relu()
        logits = model.convs[1](h, edge_index)[graph.train_idx]
        loss = torch.nn.functional.cross_entropy(logits, y[graph.train_idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_one_rank_has_the_losses_of_pyg_on_the_whole_graph(
    small_graph: Graph, tmp_path: Path, model: str
) -> None:
    partition = np.zeros(small_graph.num_nodes, np.int32)
    make_full_graph_plan(small_graph, tmp_path / "plan", partition, model=model, learning_rate=0.01)
    report = train(tmp_path / "plan", tmp_path / "run", eval_every=EPOCHS)
    np.testing.assert_allclose(report.losses, pyg_losses(small_graph, model), rtol=1e-4)
    assert [e.steps for e in report.epochs] == [1] * EPOCHS
    assert report.epochs[-1].val is not None
    assert report.test_score is not None
    assert {"sample", "forward_backward", "optimizer", "step"} <= set(report.ranks[0].stages)
    assert report.ranks[0].bytes_by_source == {"halo": 0}


def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(
    small_graph: Graph, tmp_path: Path
) -> None:
    partition = np.zeros(small_graph.num_nodes, np.int32)
    settings = FullGraph(drop="edges", keep=0.5)
    make_full_graph_plan(small_graph, tmp_path / "plan", partition, settings=settings, dropout=0.5)
    through = train(tmp_path / "plan", tmp_path / "through")
    train(tmp_path / "plan", tmp_path / "stopped", max_steps=2)
    resumed = train(tmp_path / "plan", tmp_path / "stopped", resume=True)
    assert resumed.losses == through.losses[2:]
    assert [e.loss for e in resumed.epochs] == [e.loss for e in through.epochs]


def test_a_partition_for_other_ranks_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    partition = np.arange(small_graph.num_nodes, dtype=np.int32) % 2
    make_full_graph_plan(small_graph, tmp_path / "plan", partition)
    with pytest.raises(PlanError, match="expected parts 0 to 0"):
        train(tmp_path / "plan", tmp_path / "run")


def test_a_plan_without_a_partition_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    plan = make_full_graph_plan(
        small_graph, tmp_path / "plan", np.zeros(small_graph.num_nodes, np.int32)
    )
    save_plan(replace(plan, arrays={}), {}, tmp_path / "plan")
    assert load_plan(tmp_path / "plan").strategy.mode == "full-graph"
    with pytest.raises(PlanError, match="partition"):
        train(tmp_path / "plan", tmp_path / "run")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "train_two", [train_on_ranks, pytest.param(train_under_torchrun, marks=pytest.mark.slow)]
)
def test_two_ranks_have_the_losses_of_one(
    small_graph: Graph, tmp_path: Path, train_two: Callable[..., RunReport]
) -> None:
    parts = grown_parts(small_graph.indptr, small_graph.indices, 2)
    make_full_graph_plan(
        small_graph, tmp_path / "plan", parts, ranks=2, comm_threads=1, learning_rate=0.01
    )
    report = train_two(tmp_path / "plan", epochs=EPOCHS, eval_every=EPOCHS)
    np.testing.assert_allclose(report.losses, pyg_losses(small_graph, "sage"), rtol=1e-4)
    assert "halo_exchange" in report.ranks[0].stages
    waits = [rank.stages["halo_exchange"].p90 for rank in report.ranks]
    assert 0 < report.stages["halo_exchange"] <= sum(waits)
    volume = sum(rank.rows_by_source["halo"] for rank in report.ranks)
    assert volume > 0
    assert report.test_score is not None


WAYS = {
    "whole": FullGraph(),
    "p": FullGraph(keep=0.5, rounding="stochastic"),
    "DropEdge": FullGraph(keep=0.5, drop="edges"),
    "BES": FullGraph(keep=0.5, drop="boundary-edges"),
    "slices": FullGraph(exchange="broadcast"),
}
PLACES = {"one": [0, 0, 0, 0], "two": [0, 0, 1, 1]}
"""Hosts of four ranks."""


def _train_everywhere(rank: int, size: int, ports: dict[str, int], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(size)}
    for run, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        (folder / f"run {run}").mkdir(exist_ok=True)
        train(folder / run, folder / f"run {run}", epochs=2, force=True, collective_seconds=120.0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "ways", [("p", "slices"), pytest.param(("whole", "DropEdge", "BES"), marks=pytest.mark.slow)]
)
def test_ranks_on_two_hosts_have_the_losses_and_bytes_of_one(
    small_graph: Graph, tmp_path: Path, ways: tuple[str, ...]
) -> None:
    parts = grown_parts(small_graph.indptr, small_graph.indices, 4)
    runs = [f"{way} on {place}" for way in ways for place in PLACES]
    for way in ways:
        for place, hosts in PLACES.items():
            make_full_graph_plan(
                small_graph, tmp_path / f"{way} on {place}", parts, ranks=4, settings=WAYS[way],
                hosts=hosts,
            )  # fmt: skip
    ports = {run: free_port() for run in runs}
    run_on_ranks(_train_everywhere, (4, ports, tmp_path), 4)
    for way in ways:
        one, two = (load_report(tmp_path / f"run {way} on {place}") for place in PLACES)
        assert len(one.losses) == 2
        assert two.losses == one.losses, way
        assert [r.bytes_by_source for r in two.ranks] == [r.bytes_by_source for r in one.ranks]
        assert sum(rank.rows_by_source["halo"] for rank in two.ranks) > 0
