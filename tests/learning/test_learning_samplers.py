"""Unbiased samplers learn what neighbour sampling learns, on a real graph at equal epochs."""

from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from tests.benchmarks.learning_samplers import (
    BAR,
    EPOCHS,
    FEATURES,
    WAYS,
    Protocol,
    new_vertices,
    train,
)

SEEDS = 20
"""Always all of them: a second look after a miss would pass by chance what one look does not."""
NAME = "coauthor-physics"


@pytest.fixture(scope="module")
def graph(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("learning") / NAME
    return import_graph(
        data_folder / f"{NAME}.npz", folder, options=ImportOptions(features=FEATURES)
    )


def accuracies(graph: Graph, folder: Path, name: str) -> list[float]:
    """Test accuracy of each seed."""
    sampler = WAYS[name].sampler(new_vertices(graph))
    how = Protocol(epochs=EPOCHS[NAME])
    return [train(graph, folder, sampler, seed, how)[0].test for seed in range(SEEDS)]


@pytest.fixture(scope="module")
def baseline(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Neighbour sampling's accuracies."""
    return accuracies(graph, tmp_path_factory.mktemp("baseline"), "neighbor")


def is_within(tests: list[float], baseline: list[float]) -> bool:
    """At most 1.0 point, and at most 2 standard errors of the paired difference, below."""
    differences = np.subtract(tests, baseline)
    error = differences.std(ddof=1) / np.sqrt(differences.size)
    return bool(differences.mean() > -BAR and differences.mean() > -2 * error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labor-star-ht", "labor-0-exact-k"])
def test_unbiased_samplers_learn_what_neighbour_sampling_learns(
    graph: Graph, baseline: list[float], tmp_path: Path, name: str
) -> None:
    found = accuracies(graph, tmp_path, name)
    assert is_within(found, baseline), (found, baseline)


def test_what_is_lower_by_more_than_chance_is_not_within() -> None:
    even = [0.9, 0.91, 0.92, 0.93, 0.94]
    assert is_within([0.901, 0.909, 0.92, 0.931, 0.939], even)
    assert not is_within([each - 0.011 + 0.001 * (each > 0.92) for each in even], even)
    assert not is_within([0.899, 0.9085, 0.919, 0.929, 0.9391], even)
