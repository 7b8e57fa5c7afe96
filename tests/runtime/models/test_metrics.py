import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from gnnplan.runtime.errors import GnnplanError, InputError
from gnnplan.runtime.models.metrics import metric_of, reciprocal_ranks, roc_auc
from tests.support.inprocess import run_in_process

OUTPUTS = {
    "multiclass": (torch.eye(4), torch.tensor([0, 1, 2, -1])),
    "multilabel": (torch.eye(4) - 0.5, torch.eye(4)),
    "binary": (torch.tensor([[0.1], [0.9], [0.2], [0.8]]), torch.tensor([0, 1, 0, 1])),
    "link": (torch.eye(4) + 1, torch.tensor([[0, 1, 2], [2, 3, 1]])),
}
"""Of each task, finite outputs and what is known of them."""


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
    scores, y = np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])
    for labels in (y, y.astype(np.float32), y == 1, np.where(y == 1, 1, -1)):
        assert roc_auc(scores, labels) == roc_auc_score(y, scores) == 0.75


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("task", OUTPUTS)
def test_scores_that_are_no_numbers_are_refused_with_their_count(task: str, bad: float):
    outputs, y = OUTPUTS[task]
    scores = 2 * 2 if task == "link" else outputs.numel()
    metric = metric_of(task)
    metric.update(outputs, y)
    metric.update(torch.full_like(outputs, bad), y)
    with pytest.raises(GnnplanError, match=rf"^epoch 3, test: .* found {scores} of {2 * scores} "):
        metric.compute(where="epoch 3, test")


def test_one_bad_score_of_a_vertex_without_a_label_is_refused_too():
    outputs, y = OUTPUTS["multiclass"]
    outputs = outputs.clone()
    outputs[3, 2] = float("nan")  # its label is unknown
    metric = metric_of("multiclass")
    metric.update(outputs, y)
    with pytest.raises(GnnplanError, match="found 1 of 16 that are NaN"):
        metric.compute()


def test_finite_vectors_whose_product_overflows_are_refused():
    metric = metric_of("link")
    metric.update(torch.full((4, 2), 1e30), OUTPUTS["link"][1])
    with pytest.raises(GnnplanError, match="found 4 of 4"):
        metric.compute()


@pytest.mark.parametrize("task", OUTPUTS)
def test_bad_scores_of_one_rank_end_the_evaluation_on_every_rank(task: str):
    outputs, y = OUTPUTS[task]

    def body(comm):
        metric = metric_of(task)
        metric.update(outputs * float("nan") if comm.rank == 1 else outputs, y)
        with pytest.raises(GnnplanError) as error:
            metric.compute(comm, "here")
        return str(error.value)

    first, *others = run_in_process(3, body)
    scores = 2 * 2 if task == "link" else outputs.numel()
    assert f"here: expected finite scores, found {scores} of {3 * scores}" in first
    assert others == [first, first]


def test_metric_functions_alone_refuse_scores_that_are_no_numbers():
    with pytest.raises(GnnplanError, match="found 1 of 2"):
        roc_auc(np.array([np.nan, 1.0]), np.array([True, False]))
    with pytest.raises(GnnplanError, match="found 2 of 3"):
        reciprocal_ranks(torch.tensor([[1.0, float("nan"), float("inf")]]))
