import math

import pytest
import torch

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.models.metrics import loss_sum


def test_cross_entropy_is_a_sum_and_skips_unknown_labels():
    logits = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [5.0, 1.0]], requires_grad=True)
    # By hand: log 2 for the first, -log(3/4) for the second, the third is unknown.
    loss = loss_sum(logits, torch.tensor([0, 1, -1]), "multiclass")
    assert loss.item() == pytest.approx(math.log(2) + math.log(4 / 3))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[2].count_nonzero() == 0


def test_float_labels_with_nan_are_unknown_labels():
    logits = torch.zeros(3, 2)
    loss = loss_sum(logits, torch.tensor([0.0, float("nan"), 1.0]), "multiclass")
    assert loss.item() == pytest.approx(2 * math.log(2))


def test_multilabel_is_the_mean_over_known_classes_summed_over_seeds():
    logits = torch.zeros(2, 3)
    y = torch.tensor([[1.0, 0.0, 1.0], [0.0, -1.0, float("nan")]])
    # By hand: every known pair costs log 2 at logit 0; the mean per seed is log 2.
    assert loss_sum(logits, y, "multilabel").item() == pytest.approx(2 * math.log(2))


def test_binary_takes_one_column():
    logits = torch.tensor([[math.log(3)], [0.0]])
    loss = loss_sum(logits, torch.tensor([1, 0]), "binary")
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(2))


@pytest.mark.parametrize(
    ("task", "classes", "y"),
    [
        ("multiclass", 4, torch.empty(0, dtype=torch.int64)),
        ("multilabel", 4, torch.empty(0, 4)),
        ("binary", 1, torch.empty(0)),
    ],
)
def test_no_seeds_give_a_zero_that_carries_a_gradient(task, classes, y):
    logits = torch.empty(0, classes, requires_grad=True)
    loss = loss_sum(logits, y, task)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None


def test_an_unknown_task_is_refused():
    with pytest.raises(InputError, match="multilabel, binary or link, found 'rank'"):
        loss_sum(torch.zeros(1, 1), torch.zeros(1), "rank")
