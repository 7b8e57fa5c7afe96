"""The link generator's split is what it says, and seeded."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links


def make(folder: Path, **settings: float) -> Graph:
    sizes = {"num_nodes": 2000, "degree": 12.0, "feature_dim": 8, "num_communities": 5}
    return generate_links(folder, **(sizes | settings))  # type: ignore[arg-type]


def keys(pairs: NDArray[np.int64]) -> set[tuple[int, int]]:
    return {(min(u, v), max(u, v)) for u, v in pairs.tolist()}


def stored_pairs(graph: Graph) -> NDArray[np.int64]:
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return np.stack([np.asarray(graph.indices, np.int64), target], axis=1)


def test_held_out_edges_are_not_stored_and_training_edges_are(tmp_path: Path) -> None:
    graph = make(tmp_path / "g")
    total = 2000 * 12 // 2
    assert graph.task == "link"
    assert (len(graph.train_idx), len(graph.val_idx), len(graph.test_idx)) == (
        total // 2,
        total // 20,
        total // 10,
    )
    stored = keys(stored_pairs(graph))
    assert graph.num_edges == 2 * len(stored) == 2 * (total - total // 20 - total // 10)
    assert keys(graph.train_idx) <= stored
    assert not stored & keys(graph.val_idx)
    assert not stored & keys(graph.test_idx)
    assert not keys(graph.val_idx) & keys(graph.test_idx)


def test_both_directions_are_stored_and_either_end_may_be_the_source(tmp_path: Path) -> None:
    graph = make(tmp_path / "g")
    pairs = {tuple(p) for p in stored_pairs(graph).tolist()}
    assert pairs == {(v, u) for u, v in pairs}
    rising = int((graph.train_idx[:, 0] < graph.train_idx[:, 1]).sum())
    count = len(graph.train_idx)
    assert abs(rising - count / 2) < 4 * (count / 4) ** 0.5


def test_equal_seeds_give_equal_datasets(tmp_path: Path) -> None:
    a, b, c = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c", seed=1)
    assert a.fingerprint == b.fingerprint
    assert a.fingerprint != c.fingerprint


@pytest.mark.parametrize(
    "fractions",
    [
        {"train_fraction": 0.0},
        {"val_fraction": -0.1},
        {"train_fraction": 0.9, "val_fraction": 0.1, "test_fraction": 0.1},
    ],
)
def test_impossible_shares_are_refused(tmp_path: Path, fractions: dict[str, float]) -> None:
    with pytest.raises(DatasetError, match="expected a training share above 0"):
        make(tmp_path / "g", **fractions)
    assert not (tmp_path / "g").exists()
