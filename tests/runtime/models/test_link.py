"""Scores, loss and ranks of links, against plain loops."""

import math
from typing import Any

import pytest
import torch

from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.metrics import link_loss_sum, loss_sum, pair_scores, reciprocal_ranks
from gnnplan.runtime.plan.schema import Workload


def random_links(num_links: int = 20, negatives: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    return h, torch.randint(0, 30, (num_links, 2 + negatives), generator=generator)


def test_scores_are_dot_products_with_the_source() -> None:
    h, links = random_links()
    scores = pair_scores(h, links)
    for row, link in zip(scores, links, strict=True):
        expected = [float(h[link[0]] @ h[v]) for v in link[1:]]
        assert row.tolist() == pytest.approx(expected)


def test_the_loss_is_the_logistic_one_with_the_mean_over_negatives() -> None:
    h, links = random_links()
    expected = 0.0
    for own, *others in pair_scores(h, links).tolist():
        expected += math.log1p(math.exp(-own))
        expected += sum(math.log1p(math.exp(s)) for s in others) / len(others)
    assert float(link_loss_sum(h, links)) == pytest.approx(expected)
    assert float(loss_sum(h, links, "link")) == pytest.approx(expected)
    parts = [link_loss_sum(h, part) for part in links.split(7)]
    assert float(sum(parts)) == pytest.approx(expected)


def test_the_loss_has_the_gradient_of_its_formula() -> None:
    h, links = random_links()
    assert torch.autograd.gradcheck(
        lambda x: link_loss_sum(x, links), (h.requires_grad_(),), fast_mode=True
    )


def test_no_links_give_a_zero_loss_with_a_gradient() -> None:
    h = torch.zeros(4, 3, requires_grad=True)
    loss = link_loss_sum(h, torch.zeros(0, 3, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0
    assert h.grad is not None


def test_ranks_are_the_middle_of_the_best_and_the_worst_among_ties() -> None:
    scores = torch.randint(0, 6, (200, 9), generator=torch.Generator().manual_seed(1)).float()
    for row, found in zip(scores.tolist(), reciprocal_ranks(scores).tolist(), strict=True):
        best = 1 + sum(s > row[0] for s in row[1:])
        worst = 1 + sum(s >= row[0] for s in row[1:])
        assert found == pytest.approx(1 / ((best + worst) / 2))


def test_an_encoder_of_equal_vectors_gets_no_credit() -> None:
    """All scores equal: rank 51 of 101, as a random order has on average."""
    ranks = reciprocal_ranks(torch.zeros(3, 101))
    assert ranks.tolist() == pytest.approx([1 / 51] * 3)


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_encoders_give_vectors_of_the_hidden_width(name: str) -> None:
    workload = Workload(model=name, num_layers=2, hidden=12, heads=4, fanouts=[3, 3])
    model: Any = build_model(workload, 7, 0, "link")
    assert model.convs[-1].out_channels == 12
