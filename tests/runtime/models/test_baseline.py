"""Logistic regression on features alone, against scikit-learn's and under changes of unit."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.models.metrics import logistic_regression_accuracy


def test_accuracy_is_that_of_another_library(small_graph: Graph) -> None:
    x, y = np.asarray(small_graph.x), np.asarray(small_graph.y)
    train, test = small_graph.train_idx, small_graph.test_idx
    other = LogisticRegression(max_iter=500, C=1e4).fit(x[train], y[train])
    expected = float(other.score(x[test], y[test]))
    assert logistic_regression_accuracy(small_graph) == pytest.approx(expected, abs=0.01)


def test_the_units_of_features_and_columns_that_never_vary_change_nothing(
    small_graph: Graph,
) -> None:
    x = np.asarray(small_graph.x)
    moved = np.concatenate([x * 8 + np.float32(64), np.full((len(x), 1), 5, np.float32)], axis=1)
    expected = logistic_regression_accuracy(small_graph)
    found = logistic_regression_accuracy(replace(small_graph, x=moved))
    assert found == pytest.approx(expected, abs=0.01)


def test_features_and_one_class_each_are_needed(small_graph: Graph) -> None:
    with pytest.raises(InputError, match="dense features and a multiclass task"):
        logistic_regression_accuracy(replace(small_graph, x=None))


def test_of_many_rows_a_choice_is_used(small_graph: Graph) -> None:
    few = logistic_regression_accuracy(small_graph, most_rows=50)
    assert few == logistic_regression_accuracy(small_graph, most_rows=50)
    assert round(few * 50) == pytest.approx(few * 50, abs=1e-4)  # of 50 test nodes
