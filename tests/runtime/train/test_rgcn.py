"""R-GCN learns from both node types, and trains on two ranks as on one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime import worker
from gnnplan.runtime.graph.dataset import Graph, types_of
from gnnplan.runtime.graph.generate import generate_typed
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.loader.topology import sort_lists
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.sampling.typed import SortedByType, typed_sampler
from gnnplan.runtime.train.evaluate import evaluate
from tests.support.plans import make_plan

SETTINGS: dict[str, Any] = {
    "model": "rgcn",
    "fanouts": [6, 4],
    "dialect": "every_hop",
    "batch_size": 128,
    "hidden": 32,
    "learning_rate": 0.01,
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate_typed(
        tmp_path_factory.mktemp("typed") / "g",
        num_papers=1500,
        num_authors=500,
        num_classes=5,
        train_fraction=0.4,
        seed=2,
    )


def train_alone(graph: Graph, folder: Path, epochs: int) -> RunReport:
    make_plan(graph, folder / "one", **SETTINGS)
    (folder / "run").mkdir()
    return worker.run(
        RunConfig(
            plan_folder=str(folder / "one"),
            run_folder=str(folder / "run"),
            epochs=epochs,
            eval_every=epochs,
            pin=False,
        )
    )


def test_training_beats_what_papers_tell_alone(graph: Graph, tmp_path: Path) -> None:
    """A paper's own features classify it with 0.28 = 1/5 + 0.1 (1 - 1/5), labels right in 0.95."""
    report = train_alone(graph, tmp_path, epochs=6)
    assert report.metric == "accuracy"
    assert report.test_score is not None
    assert report.test_score > 0.6
    assert report.epochs[-1].loss < report.epochs[0].loss


def test_exact_evaluation_uses_all_neighbours_of_every_type(graph: Graph) -> None:
    workload = Workload(model="rgcn", hidden=8, fanouts=[2, 2], seed=1)
    model = build_model(
        workload, graph.feature_dim, graph.num_classes, "multiclass", types=types_of(graph)
    )
    ids = graph.val_idx
    score = evaluate(model, graph, None, ids, workload=workload)
    batch = typed_sampler(graph, workload, [-1, -1]).sample(ids, epoch=0, step=0)
    x = np.zeros((len(batch.n_id), 32), np.float32)
    assert graph.node_type is not None
    for number, name in enumerate(graph.meta.node_types):
        members = np.flatnonzero(graph.node_type == number)
        own = graph.node_type[batch.n_id] == number
        table = graph.x_by_type[name]
        x[own, : table.shape[1]] = table[np.searchsorted(members, batch.n_id[own])]
    with torch.no_grad():
        logits = model(torch.from_numpy(x), torch_blocks(batch))
    assert graph.y is not None
    expected = float((logits.argmax(1).numpy() == graph.y[ids]).mean())
    assert score.value == pytest.approx(expected)
    assert score.count == len(ids)


def test_an_evaluation_takes_lists_that_are_sorted_already(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(model="rgcn", hidden=8, fanouts=[2, 2], seed=1)
    model = build_model(
        workload, graph.feature_dim, graph.num_classes, "multiclass", types=types_of(graph)
    )
    ids, lists = graph.val_idx, sort_lists(graph, keep_order=False)
    expected = evaluate(model, graph, None, ids, workload=workload, fanouts=[3, 2])
    monkeypatch.setattr(SortedByType, "of", lambda *_, **__: pytest.fail("sorted again"))
    found = evaluate(model, graph, None, ids, workload=workload, fanouts=[3, 2], lists=lists)
    assert found == expected


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_train_and_score_as_one(graph: Graph, tmp_path: Path) -> None:
    single = train_alone(graph, tmp_path, epochs=2)
    make_plan(graph, tmp_path / "two", ranks=2, **SETTINGS)
    report = launch.train(tmp_path / "two", epochs=2, eval_every=2, oversubscribe=True)
    np.testing.assert_allclose(report.losses, single.losses, rtol=1e-3)
    assert report.test_score == pytest.approx(single.test_score, abs=0.01)
