"""Padded batches of PyG are the batches, of one shape, and change no loss and no gradient."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

import gnnplan
from gnnplan.runtime.device import has_triton
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links, generate_sbm, generate_typed
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.planned import planned
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import StepShapes
from gnnplan.runtime.sampling.memory import HopShapes
from tests.support.howto import blocks
from tests.support.plans import make_plan
from tests.support.product import ROOT

BATCH, HOPS = 48, [4, 3]
PAGE = ROOT / "runtime" / "HOWTO_capture_your_model.md"


@pytest.fixture(scope="module")
def small_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("graphs") / "small"
    return generate_sbm(
        folder, num_nodes=600, degree=8.0, feature_dim=6, num_classes=3, train_fraction=0.5, seed=5
    )


@pytest.fixture(scope="module")
def plan(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans") / "plan"
    make_plan(small_graph, folder, fanouts=HOPS, batch_size=BATCH, own_rows=100)
    return folder


def loader_of(plan: Path, graph: Graph, **settings: Any) -> PlannedLoader:
    return PlannedLoader(plan, graph, blocks=False, **settings)


def shape_of(batch: Any) -> list[Any]:
    """Everything of a batch that a captured graph must find unchanged."""
    sizes = [batch.num_sampled_nodes, batch.num_sampled_edges, batch.batch_size]
    tensors = sorted((name, list(t.shape)) for name, t in batch if isinstance(t, Tensor))
    return [sizes, tensors]


def seeds_out(model: torch.nn.Module, batch: Any, *, trimmed: bool) -> Tensor:
    hops = {
        "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
        "num_sampled_edges_per_hop": batch.num_sampled_edges,
    }
    out = model(batch.x, batch.edge_index, **hops if trimmed else {})
    return out[: batch.batch_size]


def loss_and_gradients(model: torch.nn.Module, batch: Any, *, trimmed: bool) -> list[Tensor]:
    model.zero_grad()
    out = seeds_out(model, batch, trimmed=trimmed)
    loss = cross_entropy(out, batch.y[: batch.batch_size])
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("trimmed", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize("kind", [GraphSAGE, GCN, GAT])
def test_loss_and_gradients_of_padded_batches_are_those_of_the_batches(
    kind: Any, trimmed: bool, small_graph: Graph, plan: Path
) -> None:
    """Up to the order in which float32 sums are taken; the last batch has fewer seeds."""
    torch.manual_seed(1)
    model = kind(small_graph.feature_dim, 8, num_layers=2, out_channels=small_graph.num_classes)
    pairs = zip(
        loader_of(plan, small_graph, padded=True), loader_of(plan, small_graph), strict=True
    )
    seeds = set[int]()
    for padded, whole in pairs:
        found = loss_and_gradients(model, padded, trimmed=trimmed)
        expected = loss_and_gradients(model, whole, trimmed=trimmed)
        assert len(found) == len(expected) > 3
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        seeds.add(whole.batch_size)
    assert len(seeds) == 2


def test_padded_batches_have_one_shape_and_hold_the_batch(small_graph: Graph, plan: Path) -> None:
    further = {
        "node_data": {"pos": torch.randn(small_graph.num_nodes, 2)},
        "edge_data": {"number": torch.arange(small_graph.num_edges) + 1},
    }
    shapes = list[Any]()
    padded_loader = loader_of(plan, small_graph, padded=True, **further)
    for padded, whole in zip(padded_loader, loader_of(plan, small_graph, **further), strict=True):
        shapes.append(shape_of(padded))
        nodes, edges, count = padded.node_mask, padded.edge_mask, whole.batch_size
        assert padded.padded
        for name in ("x", "n_id", "pos"):
            assert torch.equal(padded[name][nodes], whole[name])
            assert not padded[name][~nodes].any()
        for name in ("e_id", "number"):
            assert torch.equal(padded[name][edges], whole[name])
            assert not padded[name][~edges].any()
        joined = padded.n_id[padded.edge_index]
        assert torch.equal(joined[:, edges], whole.n_id[whole.edge_index])
        assert not nodes[padded.edge_index[:, ~edges]].any()
        assert (padded.edge_index[1].diff() >= 0).all()
        assert padded.seed_mask.tolist() == [i < count for i in range(padded.batch_size)]
        assert torch.equal(padded.y[:count], whole.y[:count])
        assert (padded.y[count:] == -100).all()
        assert torch.equal(padded.input_id[:count], whole.input_id)
        assert sum(padded.num_sampled_nodes) == padded.num_nodes == len(nodes)
        assert padded.batch_size == padded_loader.batch_size == BATCH
    assert all(shape == shapes[0] for shape in shapes)
    assert padded_loader.overflowed == 0


def with_shapes(plan: Path, folder: Path, rows: list[int], edges: list[int]) -> Path:
    """The plan with the shapes of a captured step."""
    made = load_plan(plan)
    arrays = {name: np.load(plan / ref.file) for name, ref in made.arrays.items()}
    shapes = StepShapes(rows=rows, edges=edges)
    strategy = replace(made.strategy, step="captured", shapes=shapes)
    save_plan(replace(made, strategy=strategy), arrays, folder)
    return folder


def test_shapes_are_the_plans_where_it_has_some(
    small_graph: Graph, plan: Path, tmp_path: Path
) -> None:
    shaped = with_shapes(plan, tmp_path / "plan", [128, 384, 832], [256, 896])
    batch = next(iter(loader_of(shaped, small_graph, padded=True)))
    assert batch.padded
    assert batch.num_sampled_nodes == [128, 256, 448]
    assert batch.num_sampled_edges == [256, 640]


@pytest.mark.parametrize("hops", [HOPS, [8, 6], [4, 3, 2]], ids=["same", "larger", "deeper"])
def test_other_seeds_have_shapes_of_their_own_batches(
    hops: list[int], small_graph: Graph, plan: Path, tmp_path: Path
) -> None:
    shaped = with_shapes(plan, tmp_path / "plan", [128, 384, 832], [256, 896])
    asked: dict[str, Any] = {"num_neighbors": hops, "batch_size": 20, "padded": True}
    training = loader_of(shaped, small_graph)
    for loader in (
        training.over("val", **asked),
        loader_of(shaped, small_graph, input_nodes="val", **asked),
    ):
        found = list(loader)
        assert all(batch.padded for batch in found)
        assert all(shape_of(batch) == shape_of(found[0]) for batch in found)
        assert len(found[0].num_sampled_edges) == len(hops)


def test_a_batch_that_does_not_fit_comes_whole_and_is_counted(
    small_graph: Graph, plan: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = [batch.num_sampled_edges[1] for batch in loader_of(plan, small_graph)]
    edges = [256, 256 + int(np.median(drawn))]
    shaped = with_shapes(plan, tmp_path / "plan", [128, 384, 832], edges)
    loader, shapes = loader_of(shaped, small_graph, padded=True), list[Any]()
    with caplog.at_level(logging.WARNING):
        for found, whole in zip(loader, loader_of(plan, small_graph), strict=True):
            assert found.padded == (whole.num_sampled_edges[1] <= np.median(drawn))
            if found.padded:
                shapes.append(shape_of(found))
                continue
            assert found.node_mask.all() & found.edge_mask.all() & found.seed_mask.all()
            for name in ("x", "n_id", "edge_index", "batch_size", "num_sampled_nodes"):
                assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(whole[name]))
    assert loader.overflowed == len(drawn) - len(shapes) > 0
    assert all(shape == shapes[0] for shape in shapes)
    assert sum("does not fit padded shapes" in each.message for each in caplog.records) == 1


@pytest.mark.parametrize("batch_size", [400, 200, 20], ids=["one", "two, one short", "many"])
def test_shapes_know_how_batches_vary_whatever_an_epoch_has_of_them(
    batch_size: int, small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[tuple[int, ...]]] = []
    of_quantile = HopShapes.of_quantile

    def noted(counts: list[tuple[int, ...]], quantile: float, **known: int) -> HopShapes:
        made.append(counts)
        return of_quantile(counts, quantile, **known)

    monkeypatch.setattr(HopShapes, "of_quantile", staticmethod(noted))
    make_plan(small_graph, tmp_path / "plan", fanouts=HOPS, batch_size=batch_size)
    loader = loader_of(tmp_path / "plan", small_graph, padded=True)
    counts = [sizes for of_seeds in made for sizes in of_seeds]
    assert len(counts) == 32
    seeds = [{most for most, *_ in of_seeds} for of_seeds in made]
    whole, short = divmod(len(small_graph.train_idx), batch_size)
    expected = [batch_size] * (whole > 0) + [short] * (short > 0 and whole < 32)
    assert seeds == [{each} for each in expected]
    assert len({tuple(sizes) for _, *sizes in counts}) > 16
    epochs = 8 if batch_size > 20 else 1
    assert all(batch.padded for _ in range(epochs) for batch in loader)


def test_a_wrapped_model_and_other_seeds_take_padded_batches(
    small_graph: Graph, plan: Path
) -> None:
    torch.manual_seed(1)
    model = GraphSAGE(small_graph.feature_dim, 8, num_layers=2, out_channels=3)
    loader = loader_of(plan, small_graph)
    settings: dict[str, Any] = {"batch_size": 30, "num_neighbors": [5, 2]}
    pairs = zip(
        loader.over("val", padded=True, **settings), loader.over("val", **settings), strict=True
    )
    for padded, whole in pairs:
        expected = model(whole.x, whole.edge_index)[: whole.batch_size]
        found = planned(model)(padded)[: padded.batch_size]
        torch.testing.assert_close(found[padded.seed_mask], expected, rtol=1e-5, atol=1e-6)


def test_the_page_captures_while_no_thread_of_the_loader_works(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture of torch's own lets no other thread ask the GPU anything."""
    (script,) = [block.text for block in blocks(PAGE.read_text()) if block.kind == "file"]
    make_plan(
        small_graph, tmp_path, fanouts=HOPS, batch_size=BATCH, sample_threads=2, prefetch_depth=3
    )
    opened, working = list[PlannedLoader](), list[int]()

    def open_loader(**settings: Any) -> PlannedLoader:
        settings["device"] = "cpu"
        opened.append(PlannedLoader(tmp_path, small_graph, **settings))
        return opened[-1]

    def capture(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> torch.nn.Module:
        assert len(inputs) == 2
        ready = opened[-1]._ready()
        working.append(0 if ready is None else ready._working)
        return module

    monkeypatch.setattr(gnnplan, "PlannedLoader", open_loader)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    exec(compile(script, str(PAGE), "exec"), {})
    assert working == [0]
    assert (opened[-1].handed_out, opened[-1].position.epoch) == (1 + 3 * 7, 3)


def test_what_cannot_be_padded_is_refused(small_graph: Graph, plan: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="padded: expected blocks=False"):
        PlannedLoader(plan, small_graph, padded=True)
    with pytest.raises(TypeError, match=r"padded: expected True, or .* found 1\.5"):
        loader_of(plan, small_graph, padded=1.5)
    typed = generate_typed(tmp_path / "typed", num_papers=80, num_authors=30, num_classes=3)
    make_plan(typed, tmp_path / "plan", model="rgcn", fanouts=HOPS, batch_size=BATCH)
    with pytest.raises(InputError, match="padded: expected a graph without types"):
        loader_of(tmp_path / "plan", typed, padded=True)


def test_shares_without_a_seed_and_of_one_are_padded_too(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path, fanouts=HOPS, batch_size=2, ranks=3)
    torch.manual_seed(1)
    model = GraphSAGE(small_graph.feature_dim, 8, num_layers=2, out_channels=3)
    seeds = set[int]()
    for rank in range(3):
        share: dict[str, Any] = {"rank": rank, "size": 3}
        padded_loader = loader_of(tmp_path, small_graph, padded=True, **share)
        shapes = list[Any]()
        whole_loader = loader_of(tmp_path, small_graph, **share)
        pairs = zip(padded_loader.batches(8), whole_loader.batches(8), strict=True)
        for padded, whole in pairs:
            shapes.append(shape_of(padded))
            seeds.add(whole.batch_size)
            assert padded.batch_size == padded_loader.batch_size == 1
            assert padded.seed_mask.tolist() == [whole.batch_size == 1]
            found = model(padded.x, padded.edge_index)[: padded.batch_size][padded.seed_mask]
            expected = model(whole.x, whole.edge_index)[: whole.batch_size]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert all(shape == shapes[0] for shape in shapes)
        assert not padded_loader.overflowed
    assert seeds == {0, 1}


@pytest.mark.parametrize("form", ["triplet", "binary"])
def test_a_rank_that_never_has_a_link_gets_the_fields_of_links(form: str, tmp_path: Path) -> None:
    graph = generate_links(tmp_path / "links", num_nodes=300, feature_dim=6, seed=0)
    make_plan(graph, tmp_path / "plan", fanouts=HOPS, batch_size=2, ranks=3)
    share: dict[str, Any] = {"neg_sampling": form, "padded": True, "size": 3}
    fields = [
        next(iter(loader_of(tmp_path / "plan", graph, rank=rank, **share))) for rank in range(3)
    ]
    assert [int(each.link_mask.sum()) for each in fields] == [0, 1, 1]
    assert len({tuple(each.keys()) for each in fields}) == 1


@pytest.mark.parametrize("form", ["triplet", "binary"])
def test_padded_links_score_what_the_links_do(form: str, tmp_path: Path) -> None:
    graph = generate_links(tmp_path / "links", num_nodes=300, feature_dim=6, seed=0)
    make_plan(graph, tmp_path / "plan", fanouts=HOPS, batch_size=BATCH)
    settings: dict[str, Any] = {"neg_sampling": form}
    torch.manual_seed(1)
    model = GraphSAGE(graph.feature_dim, 8, num_layers=2)
    shapes = list[Any]()
    padded_loader = loader_of(tmp_path / "plan", graph, padded=True, **settings)
    whole_loader = loader_of(tmp_path / "plan", graph, **settings)
    for padded, whole in zip(padded_loader, whole_loader, strict=True):
        shapes.append(shape_of(padded))
        found, expected = (model(each.x, each.edge_index) for each in (padded, whole))
        if form == "binary":
            mask, pairs = padded.edge_label_mask, padded.edge_label_index
            assert torch.equal(padded.edge_label[mask], whole.edge_label)
            mine, theirs = found[pairs[:, mask]], expected[whole.edge_label_index]
        else:
            mask, names = padded.link_mask, ("src_index", "dst_pos_index")
            mine = torch.cat([found[padded[name][mask]] for name in names])
            theirs = torch.cat([expected[whole[name]] for name in names])
            negatives = padded.dst_neg_index
            assert torch.equal(negatives[mask], whole.dst_neg_index)
            assert not padded.node_mask[negatives[~mask]].any()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(padded.input_id[padded.link_mask], whole.input_id)
    assert all(shape == shapes[0] for shape in shapes)
    assert not padded_loader.overflowed


@pytest.mark.skipif(not has_triton(), reason="no triton, whose interpreter draws as a GPU does")
def test_batches_that_a_device_draws_are_padded_there(
    small_graph: Graph, plan: Path, kernel_device: torch.device
) -> None:
    devices = {"device": kernel_device, "on_device": True}
    drawn = loader_of(plan, small_graph, padded=True, **devices)
    host = loader_of(plan, small_graph, padded=True)
    for found, expected in zip(drawn.batches(2), host.batches(2), strict=True):
        assert {t.device.type for _, t in found if isinstance(t, Tensor)} == {kernel_device.type}
        assert shape_of(found) == shape_of(expected)
        for name, value in expected:
            assert torch.equal(torch.as_tensor(found[name]).cpu(), torch.as_tensor(value)), name
