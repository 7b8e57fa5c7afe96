"""Logistic regression on features alone: the accuracy that a GNN has to beat."""

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph

MOST_ROWS = 50_000


def logistic_regression_accuracy(
    graph: Graph, *, most_rows: int = MOST_ROWS, iterations: int = 100, l2: float = 1e-5
) -> float:
    """Return the test accuracy of multinomial logistic regression on standardised features.

    It is trained by L-BFGS on at most `most_rows` training nodes and scored on as many test nodes,
    both seeded choices; `l2` weighs the squared norm of the weights. The graph needs dense features
    and a multiclass task.
    """
    if graph.x is None or graph.y is None or str(graph.task) != "multiclass":
        raise InputError(f"{graph.name}: expected dense features and a multiclass task")
    x, y = _rows(graph, graph.train_idx, most_rows)
    test_x, test_y = _rows(graph, graph.test_idx, most_rows)
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-6)
    x, test_x = (x - mean) / scale, (test_x - mean) / scale
    weight = torch.zeros(graph.num_classes, x.shape[1], requires_grad=True)
    bias = torch.zeros(graph.num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = torch.nn.functional.linear(x, weight, bias)
        value = torch.nn.functional.cross_entropy(logits, y) + l2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        predicted = torch.nn.functional.linear(test_x, weight, bias).argmax(1)
    return float((predicted == test_y).float().mean())


def _rows(
    graph: Graph, ids: NDArray[np.int64], most_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(ids) > most_rows:
        ids = np.sort(np.random.default_rng(0).choice(ids, most_rows, replace=False))
    assert graph.x is not None
    assert graph.y is not None
    x = torch.from_numpy(np.asarray(graph.x[ids], dtype=np.float32))
    return x, torch.from_numpy(np.asarray(graph.y[ids], dtype=np.int64))
