"""Rows that batches read of other parts, against batches drawn from a graph of communities."""

import numpy as np
import pytest

from gnnplan.planner.graph_presets import graph_preset, preset_law
from gnnplan.planner.profile.community_law import community_law
from gnnplan.runtime.graph.generate_draws import (
    Clustering,
    block_model_drawer,
    community_weights,
    equal_communities,
)
from tests.benchmarks.published_remote import (
    HALO,
    entries,
    exposures,
    halo,
    remote_nodes,
)

NODES, EDGES, PARTS, SEEDS, FANOUTS = 12_000, 90_000, 4, 40, (5, 4, 3)
SHAPE = Clustering(spread=0.9, inside=0.9, community=300)


def test_exposures_and_entries_keep_their_means() -> None:
    share, out = exposures(0.03, 1.5)
    assert float(share @ out) == pytest.approx(0.03, rel=1e-6)
    assert out.max() <= 0.5
    means = np.array([0.01, 0.7, 3.0, 11.0, 50.0, 4000.0])
    numbers, chances = entries(means)
    assert (numbers * chances).sum(-1) == pytest.approx(means, rel=0.02)
    assert chances[1, 0] == pytest.approx(np.exp(-0.7), rel=1e-6)


def test_nodes_next_to_training_nodes_of_other_parts_are_as_published() -> None:
    found = halo(preset_law(graph_preset("products")), 1024, (15, 10, 5), 4)
    assert found[0] == pytest.approx(HALO[0], rel=0.1)
    assert found[1] == pytest.approx(HALO[1], abs=0.03)


def test_remote_rows_are_those_of_drawn_batches() -> None:
    rng = np.random.default_rng(3)
    communities = equal_communities(NODES, NODES // 300)
    weights = community_weights(SHAPE, NODES, NODES, 1.0, rng)
    u, v = block_model_drawer(weights, communities, SHAPE.inside, rng)(EDGES)
    pairs = np.unique(np.concatenate([u * NODES + v, v * NODES + u]))
    pairs = pairs[pairs // NODES != pairs % NODES]
    start, named = np.searchsorted(pairs // NODES, np.arange(NODES + 1)), pairs % NODES
    part = communities % PARTS
    train = np.flatnonzero((part == 0) & (np.diff(start) > 0) & (rng.random(NODES) < 0.5))
    reads, batches = np.zeros(NODES), 60
    for _ in range(batches):
        met = rng.choice(train, SEEDS, replace=False)
        for fanout in FANOUTS:
            lists = (named[start[node] : start[node + 1]] for node in met)
            ends = [rng.permutation(x)[:fanout] for x in lists]
            met = np.unique(np.concatenate([met, *ends]))
        reads[met] += 1
    law = community_law(NODES, len(pairs), 0.5, SHAPE)
    found = remote_nodes(law, SEEDS, FANOUTS, "neighbor", PARTS, 0.0)
    far = np.where(part == 0, 0.0, reads)
    assert found.reads == pytest.approx(far.sum() / batches, rel=0.08)
    rows = NODES // PARTS // 2
    by_degree = far[np.argsort(np.where(part == 0, 0, -np.diff(start)), kind="stable")[:rows]]
    assert found.kept(rows, "degree") == pytest.approx(by_degree.sum() / far.sum(), abs=0.05)
    assert found.kept(rows, "degree") < found.kept(rows, "presample") <= 1.0
    assert found.kept(0.0, "presample") == 0.0
