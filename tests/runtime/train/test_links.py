"""Link evaluation equals a dense computation; training on one and two ranks is one training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime import worker
from gnnplan.runtime.errors import GnnplanError, InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.metrics import pair_scores, reciprocal_ranks
from gnnplan.runtime.plan.schema import Links, Workload
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.sampling.exclusion import NegativeSampler
from gnnplan.runtime.train.evaluate import EVALUATION_EPOCH, evaluate_links
from tests.support.plans import make_plan
from tests.support.ranks import train_on_ranks


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate_links(
        tmp_path_factory.mktemp("links") / "g",
        num_nodes=1500,
        degree=20.0,
        feature_dim=16,
        num_communities=10,
        train_fraction=0.25,
        homophily=0.9,
        seed=3,
    )


def test_mrr_is_that_of_the_models_own_layers_on_the_whole_graph(graph: Graph) -> None:
    workload = Workload(hidden=8, fanouts=[3, 3], links=Links(eval_negatives=20), seed=5)
    model = build_model(workload, graph.feature_dim, 0, "link")
    score = evaluate_links(model, graph, None, graph.val_idx, workload=workload)
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edge_index = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    h = torch.from_numpy(np.array(graph.x))
    convs: Any = model.get_submodule("convs")
    with torch.no_grad():
        h = convs[1](convs[0](h, edge_index).relu(), edge_index)
    negatives = NegativeSampler(graph.indptr, graph.indices, 20, seed=5).draw(
        graph.val_idx, np.arange(len(graph.val_idx)), epoch=EVALUATION_EPOCH, step=0
    )
    links = torch.from_numpy(np.concatenate([graph.val_idx, negatives], axis=1))
    expected = float(reciprocal_ranks(pair_scores(h, links)).mean())
    assert (score.metric, score.count) == ("mrr", len(graph.val_idx))
    assert score.value == pytest.approx(expected, rel=1e-3)  # ranks may flip by rounding
    assert model.training
    sampled = evaluate_links(model, graph, None, graph.val_idx, workload=workload, fanouts=[-1, -1])
    assert sampled.value == pytest.approx(score.value, rel=1e-3)


def test_vectors_of_another_width_are_refused(graph: Graph) -> None:
    workload = Workload(hidden=8, fanouts=[3, 3])
    model = build_model(Workload(hidden=4, fanouts=[3, 3]), graph.feature_dim, 0, "link")
    with pytest.raises(InputError, match="hidden width 8 for task link, found 4"):
        evaluate_links(model, graph, None, graph.val_idx, workload=workload)


def test_vectors_of_nan_end_the_evaluation_with_a_count(graph: Graph) -> None:
    workload = Workload(hidden=8, fanouts=[3, 3], links=Links(eval_negatives=20))
    model = build_model(workload, graph.feature_dim, 0, "link")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    scores = 10 * 21
    with pytest.raises(GnnplanError, match=rf"^epoch 7, test: .* found {scores} of {scores} that"):
        evaluate_links(
            model, graph, None, graph.val_idx[:10], workload=workload, where="epoch 7, test"
        )


SETTINGS: dict[str, Any] = {
    "fanouts": [8, 4],
    "dialect": "every_hop",
    "batch_size": 512,
    "hidden": 32,
    "learning_rate": 0.01,
    "links": {"num_negatives": 2, "eval_negatives": 100},
}


def train_alone(graph: Graph, folder: Path, **settings: Any) -> RunReport:
    make_plan(graph, folder / "one", **(SETTINGS | settings))
    (folder / "run").mkdir()
    return worker.run(
        RunConfig(
            plan_folder=str(folder / "one"), run_folder=str(folder / "run"), epochs=3, pin=False
        )
    )


def test_a_trained_encoder_ranks_true_links_above_random_ones(graph: Graph, tmp_path: Path) -> None:
    """MRR among 100 negatives: a random order has sum_{r=1}^{101} 1/r / 101 = 0.0515.

    A model that only tells communities apart (10 of them, 0.9 + 0.1/10 of the links inside) would
    place a link at random among the about 10 negatives of its community: above 0.2.
    """
    report = train_alone(graph, tmp_path)
    assert report.metric == "mrr"
    assert report.test_score is not None
    assert report.test_score > 0.15
    assert report.epochs[-1].loss < report.epochs[0].first_loss
    assert report.epochs[0].val is not None


@pytest.mark.distributed
def test_two_ranks_train_and_score_as_one(graph: Graph, tmp_path: Path) -> None:
    links: Any = {"num_negatives": 2, "eval_negatives": 50, "negatives": "in-batch"}
    single = train_alone(graph, tmp_path, links=links)
    settings = SETTINGS | {"links": links}
    make_plan(graph, tmp_path / "two", ranks=2, **settings)
    report = train_on_ranks(tmp_path / "two", epochs=3)
    np.testing.assert_allclose(report.losses, single.losses, rtol=1e-3)
    assert report.test_score == pytest.approx(single.test_score, rel=0.02)
    assert [e.val for e in report.epochs] == pytest.approx([e.val for e in single.epochs], rel=0.02)
