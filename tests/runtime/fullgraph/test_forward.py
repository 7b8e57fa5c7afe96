"""Without sampling, training over parts is training in one process: losses and gradients."""

import numpy as np
import pytest
import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.fullgraph import check_settings
from gnnplan.runtime.fullgraph.forward import FullGraphModel
from gnnplan.runtime.plan.schema import FullGraph
from tests.runtime.fullgraph.cases import (
    full_graph_gradient,
    gradient_of,
    new_model,
    pyg_loss,
    random_case,
)
from tests.support.inprocess import run_in_process

BAR = 1e-5
"""Largest difference of a gradient over its largest entry (docs/formulas.md 3.4)."""
MODELS = ("sage", "gcn", "gat")


def reference(case, name: str, **options) -> tuple[float, torch.Tensor]:
    model = new_model(name, case.x.shape[1], **options)
    loss = pyg_loss(model, case)
    loss.backward()
    return float(loss.detach()), gradient_of(model)


def assert_equal_training(found, expected) -> None:
    loss, gradient, _ = found
    assert loss == pytest.approx(expected[0], rel=BAR)
    assert float((gradient - expected[1]).abs().max() / expected[1].abs().max()) < BAR


def parts(num_nodes: int, size: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(size)
    if kind == "random":
        return rng.integers(0, size, num_nodes).astype(np.int32)
    if kind == "contiguous":
        return (np.arange(num_nodes) * size // num_nodes).astype(np.int32)
    return np.zeros(num_nodes, np.int32)  # all nodes on rank 0: the others own nothing


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("size", "kind"), [(1, "one"), (2, "random"), (3, "one"), (4, "contiguous")]
)
def test_gradients_equal_those_of_pyg_on_the_whole_graph(name: str, size: int, kind: str) -> None:
    case = random_case()
    partition = parts(len(case.y), size, kind)
    expected = reference(case, name)

    def body(comm: Communicator):
        return full_graph_gradient(case, name, partition, FullGraph(), comm)

    for found in run_in_process(size, body):
        assert_equal_training(found, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", [1.0, 1 / 3])
def test_a_precomputed_first_layer_is_exact_whatever_is_sampled_behind_it(
    name: str, keep: float
) -> None:
    case = random_case()
    partition = parts(len(case.y), 3, "random")
    expected = reference(case, name, layers=1)
    settings = FullGraph(precompute_first_layer=True, keep=keep)
    for found in run_in_process(
        3, lambda comm: full_graph_gradient(case, name, partition, settings, comm, layers=1)
    ):
        assert_equal_training(found, expected)


@pytest.mark.parametrize("name", ["sage", "gcn"])
@pytest.mark.parametrize("precompute", [False, True])
def test_whole_slices_give_the_same_gradients(name: str, precompute: bool) -> None:
    case = random_case()
    partition = parts(len(case.y), 3, "random")
    expected = reference(case, name)
    settings = FullGraph(exchange="broadcast", precompute_first_layer=precompute)
    for overlap in (False, True):
        for found in run_in_process(
            3,
            lambda comm, o=overlap: full_graph_gradient(
                case, name, partition, settings, comm, overlap=o
            ),
        ):
            assert_equal_training(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_an_exchange_beside_the_inner_work_changes_nothing(name: str) -> None:
    case = random_case()
    partition = parts(len(case.y), 3, "random")
    settings = FullGraph(keep=0.5)
    found = {
        overlap: run_in_process(
            3,
            lambda comm, o=overlap: full_graph_gradient(
                case, name, partition, settings, comm, overlap=o
            )[1],
        )
        for overlap in (False, True)
    }
    for plain, overlapped in zip(found[False], found[True], strict=True):
        assert torch.equal(plain, overlapped)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drop", ["nodes", "boundary-edges"])
def test_nothing_crosses_at_p_0_and_inner_edges_keep_full_degrees(name: str, drop) -> None:
    """p = 0 is the graph without boundary edges, normalised by the whole graph's degrees."""
    case = random_case(loops=False)
    partition = parts(len(case.y), 2, "random")
    settings = FullGraph(keep=0.0, drop=drop)

    def body(comm: Communicator):
        found = full_graph_gradient(case, name, partition, settings, comm)
        return *found, found[2].exchange.sent_bytes

    for loss, gradient, full, sent in run_in_process(2, body):
        assert sent == 0
        assert np.isfinite(loss)
        assert bool(gradient.isfinite().all())
        crossing = full.layers(0)[0]
        assert crossing.outer.num_edges == 0
        if name == "sage":
            degree = np.diff(case.indptr)[full.part.inner]
            rows = crossing.inner.row_of_edge().numpy()
            assert crossing.inner.weight is not None
            np.testing.assert_allclose(crossing.inner.weight.numpy(), 1 / degree[rows], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "model", "task", "words"),
    [
        (FullGraph(), "rgcn", "multiclass", "expected model sage, gcn, gat"),
        (FullGraph(), "sage", "link", "expected a node task"),
        (FullGraph(keep=1.5), "sage", "multiclass", "expected keep in"),
        (FullGraph(exchange="broadcast"), "gat", "multiclass", "whole slices"),
        (FullGraph(exchange="broadcast", keep=0.5), "gcn", "multiclass", "whole slices"),
        (FullGraph(drop="edges", keep=0.5, precompute_first_layer=True), "gcn", "binary", "anew"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(settings, model, task, words) -> None:
    with pytest.raises(PlanError, match=words):
        check_settings(settings, model, task)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_gives_the_same_gradients(name: str) -> None:
    case, device = random_case(), torch.device("cuda", 0)
    partition = np.zeros(len(case.y), np.int32)
    expected = reference(case, name)[1]
    model = new_model(name, case.x.shape[1]).to(device)
    full = FullGraphModel(
        model, name, case.indptr, case.indices, partition, FullGraph(),
        comm=Communicator(), device=device,
    )  # fmt: skip
    logits = full.forward(case.x.to(device), full.layers(0))
    rows = torch.from_numpy(case.train).to(device)
    torch.nn.functional.cross_entropy(logits[rows], case.y.to(device)[rows]).backward()
    found = gradient_of(model).cpu()
    assert float((found - expected).abs().max() / expected.abs().max()) < BAR
