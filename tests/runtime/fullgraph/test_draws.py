"""Draws: both sides agree, the law is the one named, and sampled training is unbiased."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gnnplan.planner.fullgraph.formulas import bernoulli_variance, drawn_epoch_bytes
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.fullgraph.draws import (
    AbstractMasks,
    SeededMasks,
    kept_edges,
    kept_nodes,
    rounded_size,
)
from gnnplan.runtime.fullgraph.forward import FullGraphModel
from gnnplan.runtime.models.build import BlockModel
from gnnplan.runtime.plan.schema import FullGraph
from gnnplan.runtime.sampling.rng import Purpose, stream
from gnnplan.runtime.sampling.statistics import full_graph_class
from gnnplan.runtime.stages import Stage
from tests.runtime.fullgraph.cases import (
    B1_EDGES,
    B1_PARTS,
    csc,
    full_graph_gradient,
    new_model,
    random_case,
)
from tests.support.inprocess import run_in_process

FLOAT32 = 1e-6
"""Edge weights are float32, of relative precision 6e-8; the sums here have at most 1024 terms."""
PAIR: dict[str, Any] = {"owner": 0, "receiver": 1, "size": 2}


@pytest.mark.parametrize("rounding", ["bernoulli", "stochastic"])
@pytest.mark.parametrize("keep", [0.01, 0.3])
def test_each_node_is_kept_with_probability_p(rounding: Any, keep: float) -> None:
    """z-tests over 4000 epochs: the mean over all nodes, and the largest of nine nodes."""
    ids, epochs = np.arange(100, 109), 4000
    kept = np.stack([
        kept_nodes(
            stream(3, e, 0, 0, Purpose.BOUNDARY), ids, keep=keep, rounding=rounding, **PAIR
        )
        for e in range(epochs)
    ])  # fmt: skip
    deviation = np.sqrt(keep * (1 - keep) / epochs)
    assert np.abs(kept.mean(0) - keep).max() < 4.5 * deviation
    sizes = kept.sum(1)
    if rounding == "stochastic":
        assert set(sizes) <= {int(keep * 9), int(keep * 9) + 1}
        assert sizes.mean() == pytest.approx(keep * 9, abs=4.5 * 0.5 / np.sqrt(epochs))
    else:
        assert sizes.var() == pytest.approx(9 * keep * (1 - keep), rel=0.2)


@pytest.mark.parametrize("rounding", ["bernoulli", "stochastic"])
def test_a_trainings_masks_follow_its_settings_and_nothing_else(rounding: Any) -> None:
    ids = np.arange(50, 100)
    masks = SeededMasks(7, 3, 0.3, rounding)
    for epoch, layer, owner, receiver in itertools.product((0, 3), (0, 1), (0, 2), (1,)):
        numbers = stream(7, epoch, 0, layer, Purpose.BOUNDARY)
        expected = kept_nodes(
            numbers, ids, owner=owner, receiver=receiver, size=3, keep=0.3, rounding=rounding
        )
        assert (masks.nodes(epoch, layer, ids, owner, receiver) == expected).all()
        edges = stream(7, epoch, 0, layer, Purpose.EDGE)
        assert (masks.edges(epoch, layer, ids) == kept_edges(edges, ids, 0.3)).all()


@pytest.mark.parametrize("rounding", ["bernoulli", "stochastic"])
def test_receivers_draw_independently_of_each_other(rounding: Any) -> None:
    """Both receivers of a node keep it with probability p squared: z-tests over 10000 nodes."""
    ids, keep, size = np.arange(10000), 0.3, 4
    numbers = stream(5, 0, 0, 0, Purpose.BOUNDARY)
    kept = np.stack([
        kept_nodes(
            numbers, ids, owner=0, receiver=r, size=size, keep=keep, rounding=rounding
        )
        for r in range(1, size)
    ])  # fmt: skip
    deviation = np.sqrt(keep**2 * (1 - keep**2) / ids.size)
    for a, b in itertools.combinations(kept, 2):
        assert (a & b).mean() == pytest.approx(keep**2, abs=4 * deviation)


def test_p_of_0_and_1_need_no_draws_and_sizes_hit_whole_numbers() -> None:
    numbers, ids = stream(0, 0, 0, 0, Purpose.BOUNDARY), np.arange(8)
    assert not kept_nodes(numbers, ids, keep=0.0, **PAIR).any()
    assert kept_nodes(numbers, ids, keep=1.0, rounding="stochastic", **PAIR).all()
    assert {rounded_size(numbers + np.uint64(k), 8, keep=0.5, **PAIR) for k in range(50)} == {4}
    assert kept_edges(numbers, np.array([-1, 4, -1]), 0.0).tolist() == [True, False, True]


@pytest.mark.parametrize("drop", ["nodes", "edges", "boundary-edges"])
@pytest.mark.parametrize("draws", ["layer", "shared"])
def test_counted_bytes_are_the_predicted_ones(drop: Any, draws: Any) -> None:
    """Exactly, for the rows that each epoch draws; no id is sent where nodes are sampled."""
    case, size, layers = random_case(), 3, 3
    partition = np.random.default_rng(1).integers(0, size, len(case.y)).astype(np.int32)
    settings = FullGraph(keep=0.4, drop=drop, draws=draws)

    def body(comm: Communicator) -> tuple[int, int]:
        *_, full = full_graph_gradient(case, "sage", partition, settings, comm, epoch=5)
        counted = full.exchange.sent_bytes
        drawn = full.layers(5)
        ids = [sum(c.received_counts) for c in drawn] if drop != "nodes" else []
        predicted = drawn_epoch_bytes(
            [sum(c.send_counts) for c in drawn],
            [sum(c.received_counts) for c in drawn],
            [7, 8, 8, 4],
            id_rows=ids[:1] if draws == "shared" else ids,
            ranks=size,
        )
        assert len(drawn) == layers
        return counted, predicted

    for counted, predicted in run_in_process(size, body):
        assert counted == predicted > 0


@pytest.mark.parametrize("rounding", ["bernoulli", "stochastic"])
def test_fresh_draws_per_layer_and_epoch_and_one_per_epoch_when_shared(rounding: Any) -> None:
    case = random_case()
    partition = (np.arange(len(case.y)) % 2).astype(np.int32)

    def sends(comm: Communicator, draws: Any, epoch: int) -> list[list[int]]:
        model = new_model("gcn", 7)
        settings = FullGraph(keep=0.5, draws=draws, rounding=rounding)
        full = FullGraphModel(
            model, "gcn", case.indptr, case.indices, partition, settings, comm=comm
        )
        return [c.send.tolist() for c in full.layers(epoch)]

    for first, again, shared in run_in_process(
        2, lambda c: (sends(c, "layer", 0), sends(c, "layer", 1), sends(c, "shared", 0))
    ):
        assert len({tuple(s) for s in (*first, *again)}) == 6
        assert len({tuple(s) for s in shared}) == 1


class Enumerated(AbstractMasks):
    """The epoch's number is the draw: bit k of it decides node (owner, receiver, id) or edge k."""

    def __init__(self, keys: list[tuple[int, ...]], layers: int) -> None:
        self.place = {key: k for k, key in enumerate(keys)}
        self.layers = layers

    def bit(self, epoch: int, layer: int, key: tuple[int, ...]) -> bool:
        return bool(epoch >> (min(layer, self.layers - 1) * len(self.place) + self.place[key]) & 1)

    def nodes(
        self, epoch: int, layer: int, ids: NDArray[np.int64], owner: int, receiver: int
    ) -> NDArray[np.bool_]:
        found = [self.bit(epoch, layer, (owner, receiver, int(v))) for v in ids]
        return np.array(found, np.bool_)

    def edges(self, epoch: int, layer: int, edges: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = [e < 0 or self.bit(epoch, layer, (int(e),)) for e in edges]
        return np.array(found, np.bool_)


def mean_over_all_draws(
    indptr: Any, indices: Any, parts: list[int], name: str, settings: FullGraph,
    keys: list[tuple[int, ...]], *, layers: int, drawn_layers: int, law: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of a loss linear in the output: expected over every draw, and without sampling."""
    num_nodes = len(parts)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_nodes, 2, generator=generator, dtype=torch.float64)
    chance = settings.keep if law is None else law
    slope = torch.randn(num_nodes, 4, generator=generator, dtype=torch.float64)

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        def gradients(used: FullGraph, masks: AbstractMasks | None, draws: range) -> torch.Tensor:
            model = new_model(name, 2, layers=layers, hidden=2).double()
            with torch.no_grad():
                for p in model.parameters():
                    p.abs_()  # positive weights and inputs: the rectifier is linear here
            full = FullGraphModel(
                model, name, indptr, indices, np.array(parts, np.int32), used, comm=comm,
                masks=masks,
            )  # fmt: skip
            inner = torch.from_numpy(full.part.inner)
            total: torch.Tensor | None = None
            bits = len(draws).bit_length() - 1
            for number in draws:
                kept = number.bit_count()
                weight = chance**kept * (1 - chance) ** (bits - kept)
                rows = x[inner].clone().requires_grad_()
                model.zero_grad()
                (full.forward(rows, full.layers(number)) * slope[inner]).sum().backward()
                assert rows.grad is not None
                around = torch.zeros_like(x).index_add_(0, inner, rows.grad)
                flat = torch.cat([
                    *(p.grad.flatten() for p in model.parameters() if p.grad is not None),
                    around.flatten(),
                ])  # fmt: skip
                factor = weight if masks is not None else 1.0
                total = flat * factor if total is None else total + flat * factor
            assert total is not None
            return comm.all_reduce_sum(total)

        masks = Enumerated(keys, drawn_layers)
        count = 1 << (len(keys) * drawn_layers)
        return gradients(settings, masks, range(count)), gradients(FullGraph(), None, range(1))

    return run_in_process(2, body)[0]


B1_KEYS = [(1, 0, 3), (1, 0, 4), (0, 1, 0), (0, 1, 1), (0, 1, 2)]
"""Owner, receiver and node of each boundary pair of [B1]."""


def test_a_draw_per_layer_leaves_gradients_of_a_linear_loss_unbiased() -> None:
    """[B2] with all 1024 draws of two layers: gradients of weights and of inputs."""
    indptr, indices = csc(5, B1_EDGES)
    expected, full = mean_over_all_draws(
        indptr, indices, B1_PARTS, "sage", FullGraph(keep=0.3), B1_KEYS, layers=2, drawn_layers=2
    )
    torch.testing.assert_close(expected, full, rtol=FLOAT32, atol=FLOAT32)


def test_so_does_it_over_three_layers_of_gcn_and_a_wrong_p_is_seen() -> None:
    indptr, indices = csc(3, [(0, 1), (1, 2)])
    keys = [(1, 0, 2), (0, 1, 1)]
    for keep, weighted_by in ((0.3, 0.3), (0.3, 0.4)):
        expected, full = mean_over_all_draws(
            indptr, indices, [0, 0, 1], "gcn", FullGraph(keep=keep), keys, layers=3,
            drawn_layers=3, law=weighted_by,
        )  # fmt: skip
        right = torch.allclose(expected, full, rtol=FLOAT32, atol=FLOAT32)
        assert right == (keep == weighted_by)


def test_one_shared_draw_is_unbiased_over_two_layers() -> None:
    indptr, indices = csc(5, B1_EDGES)
    settings = FullGraph(keep=0.3, draws="shared")
    expected, full = mean_over_all_draws(
        indptr, indices, B1_PARTS, "gcn", settings, B1_KEYS, layers=2, drawn_layers=1
    )
    inputs = slice(-10, None)  # gradients of the inputs: the product of the layers' sums
    torch.testing.assert_close(expected[inputs], full[inputs], rtol=FLOAT32, atol=FLOAT32)


def averaging_model(layers: int) -> BlockModel:
    """SAGE of weight 1 on the neighbours' mean and 0 on the node itself."""
    model = new_model("sage", 1, layers=layers, hidden=1)
    with torch.no_grad():
        for conv in model.convs:
            conv.lin_l.weight.fill_(1)  # pyright: ignore
            conv.lin_l.bias.zero_()  # pyright: ignore
            conv.lin_r.weight.zero_()  # pyright: ignore
    return model


def _node_1_of_every_draw(keep: float) -> list[float]:
    """z_1 of [B2] under each of the 32 draws of one layer, h = (1, 2, 3, 6, 8)."""
    indptr, indices = csc(5, B1_EDGES)
    partition = np.array(B1_PARTS, np.int32)
    settings, masks = FullGraph(keep=keep), Enumerated(B1_KEYS, 1)
    h = torch.tensor([[1.0], [2.0], [3.0], [6.0], [8.0]])

    def body(comm: Communicator) -> list[float]:
        full = FullGraphModel(
            averaging_model(1), "sage", indptr, indices, partition, settings, comm=comm,
            masks=masks,
        )  # fmt: skip
        x = h[torch.from_numpy(full.part.inner)]
        row = int(np.searchsorted(full.part.inner, 1))
        with torch.no_grad():
            return [float(full.forward(x, full.layers(n))[row, 0]) for n in range(1 << 5)]

    return run_in_process(2, body)[0]  # node 1 is rank 0's


@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_a_sampled_sum_has_the_full_mean_and_a_square_that_is_too_large(keep: float) -> None:
    """[B2]: mean 10/3 and variance 4 (1 - p) / p; [C10]: at p = .5 E[z^2] is 15.11, not 11.11."""
    kept = np.array([number.bit_count() for number in range(1 << 5)])
    weight = keep**kept * (1 - keep) ** (5 - kept)
    z = np.array(_node_1_of_every_draw(keep))
    mean, second = float(weight @ z), float(weight @ z**2)
    assert mean == pytest.approx(10 / 3, rel=FLOAT32)
    assert second - mean**2 == pytest.approx(4 * (1 - keep) / keep, rel=1e-5)
    assert second - mean**2 == pytest.approx(bernoulli_variance([(6 / 3) ** 2], keep), rel=1e-5)
    if keep == 0.5:
        assert second == pytest.approx(15.11, abs=0.005)
        assert _node_1_of_every_draw(1.0)[0] ** 2 == pytest.approx(11.11, abs=0.005)


@pytest.mark.parametrize(("draws", "factor"), [("shared", 10.0), ("layer", 1.0)])
def test_over_three_layers_a_shared_draw_counts_a_returning_path_tenfold(
    draws: Any, factor: float
) -> None:
    """[C11]: two nodes, each the other's one neighbour; v -> u -> v -> u, p = .1."""
    indptr, indices = csc(2, [(0, 1)])
    keys = [(0, 1, 0), (1, 0, 1)]
    settings = FullGraph(keep=0.1, draws=draws)
    found: list[torch.Tensor] = []
    drawn = 3 if draws == "layer" else 1
    for number in range(2):
        found.append(_returning_path(indptr, indices, settings, keys, drawn)[number])
    assert float(found[0] / found[1]) == pytest.approx(factor)


def _returning_path(
    indptr: Any, indices: Any, settings: FullGraph, keys: list[tuple[int, ...]], drawn: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of node 1 for input 1 at node 0 after three sums, expected and unsampled."""

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        results: list[torch.Tensor] = []
        for used, masks in ((settings, Enumerated(keys, drawn)), (FullGraph(), None)):
            model = averaging_model(3)
            full = FullGraphModel(
                model, "sage", indptr, indices, np.array([0, 1], np.int32), used, comm=comm,
                masks=masks,
            )  # fmt: skip
            x = torch.tensor([[1.0 - comm.rank]])
            bits = len(keys) * drawn
            total = torch.zeros(1)
            for number in range(1 << bits if masks else 1):
                kept = number.bit_count()
                weight = settings.keep**kept * (1 - settings.keep) ** (bits - kept)
                out = full.forward(x, full.layers(number))[0, 0].detach()
                total += out * (weight if masks else 1.0) * comm.rank
            results.append(comm.all_reduce_sum(total))
        return results[0], results[1]

    return run_in_process(2, body)[0]


@pytest.mark.parametrize("drop", ["edges", "boundary-edges"])
def test_kept_edges_are_scaled_so_that_the_mean_is_right(drop: Any) -> None:
    """All draws of one layer over a directed triangle and a pair, two parts."""
    indptr, indices = csc(4, [(0, 1), (1, 2), (2, 3)])
    parts = [0, 0, 1, 1]
    owner = np.array(parts)
    rows = np.repeat(np.arange(4), np.diff(indptr))
    crossing = owner[rows] != owner[indices]
    keys = [(int(e),) for e in np.flatnonzero(crossing | (drop == "edges"))]
    settings = FullGraph(keep=0.4, drop=drop)
    for name in ("sage", "gcn"):
        expected, full = mean_over_all_draws(
            indptr, indices, parts, name, settings, keys, layers=1, drawn_layers=1
        )
        torch.testing.assert_close(expected, full, rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize(
    ("settings", "model", "layers", "expected"),
    [
        (FullGraph(), "gat", 3, "exact"),
        (FullGraph(keep=0.1), "sage", 3, "unbiased"),
        (FullGraph(keep=0.1, draws="shared"), "gcn", 2, "unbiased"),
        (FullGraph(keep=0.1, draws="shared"), "gcn", 3, "approximate"),
        (FullGraph(keep=0.1, draws="shared", precompute_first_layer=True), "gcn", 3, "unbiased"),
        (FullGraph(keep=0.0), "sage", 2, "approximate"),
        (FullGraph(keep=0.1), "gat", 2, "approximate"),
    ],
)
def test_class_of_the_settings(settings: FullGraph, model: str, layers: int, expected: str) -> None:
    assert full_graph_class(settings, model, layers) == expected


def test_only_nodes_are_sampled_without_ids_and_set_up_sends_each_halo_id_once() -> None:
    case = random_case()
    partition = (np.arange(len(case.y)) % 3).astype(np.int32)

    def body(comm: Communicator) -> tuple[int, int]:
        model = new_model("sage", 7)
        full = FullGraphModel(
            model, "sage", case.indptr, case.indices, partition, FullGraph(keep=0.5), comm=comm
        )
        return comm.traffic[Stage.EXCHANGE_IDS].sent_bytes, full.part.num_halo

    for sent, halo in run_in_process(3, body):
        assert sent == 8 * halo + 8 * 2


def test_enumeration_covers_what_the_model_draws() -> None:
    masks = Enumerated(B1_KEYS, 2)
    patterns = {
        tuple(masks.bit(number, layer, key) for layer in range(2) for key in B1_KEYS)
        for number in range(1 << 10)
    }
    assert patterns == set(itertools.product((False, True), repeat=10))
