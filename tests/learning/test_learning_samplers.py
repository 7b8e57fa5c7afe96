"""Unbiased samplers learn what neighbour sampling learns, on a real graph at equal epochs."""

from pathlib import Path

import numpy as np
import pytest

from runtime.graph.dataset import Graph
from runtime.graph.importing import ImportOptions, import_graph
from tests.benchmarks.learning_samplers import (
    BAR,
    EPOCHS,
    FEATURES,
    WAYS,
    Protocol,
    new_vertices,
    train,
)

SEEDS = 5
NAME = "coauthor-physics"


@pytest.fixture(scope="module")
def graph(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("learning") / NAME
    return import_graph(
        data_folder / f"{NAME}.npz", folder, options=ImportOptions(features=FEATURES)
    )


def accuracies(graph: Graph, folder: Path, name: str) -> np.ndarray:
    """Test accuracy of each seed."""
    sampler = WAYS[name].sampler(new_vertices(graph))
    how = Protocol(epochs=EPOCHS[NAME])
    runs = [train(graph, folder, sampler, seed, how) for seed in range(SEEDS)]
    return np.array([accuracy.test for accuracy, _ in runs])


@pytest.fixture(scope="module")
def baseline(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return accuracies(graph, tmp_path_factory.mktemp("baseline"), "neighbor")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labor-star-ht", "labor-0-exact-k"])
def test_unbiased_samplers_learn_what_neighbour_sampling_learns(
    graph: Graph, baseline: np.ndarray, tmp_path: Path, name: str
) -> None:
    """Within 1.0 point and 2 standard errors of the paired difference; the seeds are fixed."""
    differences = accuracies(graph, tmp_path, name) - baseline
    assert differences.mean() > -BAR
    assert differences.mean() > -2 * differences.std(ddof=1) / np.sqrt(SEEDS)
