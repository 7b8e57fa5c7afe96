import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from runtime.errors import InputError
from runtime.models.metrics import metric_of, roc_auc


def streamed(task: str, logits: torch.Tensor, y: torch.Tensor) -> tuple[float, int]:
    metric = metric_of(task)
    for rows in torch.arange(len(y)).split(7):
        metric.update(logits[rows], y[rows])
    return metric.compute()


def test_accuracy_equals_scikit_learn_over_known_labels():
    torch.manual_seed(0)
    logits, y = torch.randn(100, 4), torch.randint(-1, 4, (100,))
    known = y >= 0
    expected = accuracy_score(y[known], logits.argmax(1)[known])
    assert streamed("multiclass", logits, y) == (pytest.approx(expected), int(known.sum()))


def test_micro_f1_equals_scikit_learn():
    torch.manual_seed(0)
    logits, y = torch.randn(100, 4), torch.randint(0, 2, (100, 4))
    expected = f1_score(y, logits > 0, average="micro")
    assert streamed("multilabel", logits, y) == (pytest.approx(expected), 100)


def test_roc_auc_equals_scikit_learn_with_ties():
    torch.manual_seed(0)
    logits, y = torch.randint(0, 9, (100, 1)).float(), torch.randint(0, 2, (100,))
    expected = roc_auc_score(y, logits)
    assert streamed("binary", logits, y) == (pytest.approx(expected), 100)


def test_metrics_without_vertices_or_of_one_class_are_nan():
    assert np.isnan(metric_of("multiclass").compute()[0])
    assert np.isnan(metric_of("multilabel").compute()[0])
    assert np.isnan(roc_auc(np.array([1.0, 2.0]), np.array([True, True])))


def test_mrr_is_the_mean_over_all_chunks_of_the_reciprocal_ranks():
    """Scores by hand: h = 1, 2, 3, 4 on a line; link 1 -> 3 scores 3, its negatives 2 and 4."""
    h = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    metric = metric_of("link")
    metric.update(h, torch.tensor([[0, 2, 1, 3]]))  # rank 2
    metric.update(h, torch.tensor([[1, 3, 0, 2], [3, 0, 1, 2]]))  # ranks 1 and 3
    assert metric.compute() == (pytest.approx((1 / 2 + 1 + 1 / 3) / 3), 3)
    assert np.isnan(metric_of("link").compute()[0])


def test_a_task_without_a_metric_is_refused():
    with pytest.raises(InputError, match="task"):
        metric_of("other")
