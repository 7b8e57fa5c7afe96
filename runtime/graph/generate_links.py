"""A seeded synthetic dataset for link prediction: a block model with some of its edges held out.

The graph is `generate_sbm`'s: degree-corrected communities, features that tell a node's community
through noise. Its undirected edges are cut into three: those to validate and to test on are not
stored at all, the rest is stored in both directions and a share of it is trained on. Two nodes of
one community are likelier to be linked, so a model that finds communities ranks true destinations
above random ones.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.csc import EdgeOptions, array_edges, build_csc
from runtime.graph.dataset import Graph, commit_dataset
from runtime.graph.edge_draws import block_model_drawer, distinct_pairs
from runtime.graph.generate import check_sizes, feature_rows, signal_length
from runtime.graph.staging import Staging, refuse_occupied


def generate_links(
    folder: Path,
    *,
    num_nodes: int,
    degree: float | int = 25.0,
    feature_dim: int = 64,
    num_communities: int = 10,
    seed: int = 0,
    train_fraction: float = 0.5,
    val_fraction: float = 0.05,
    test_fraction: float = 0.1,
    homophily: float = 0.8,
    degree_exponent: float = 2.5,
    feature_signal: float = 0.4,
    overwrite: bool = False,
) -> Graph:
    """Write a degree-corrected block model for task link; its pairs are (source, destination).

    Source: Karrer and Newman, Phys. Rev. E 83, 016107 (2011). Memory: about 40 bytes per edge.

    Args:
        folder: dataset folder to write, whole or not at all.
        overwrite: let an earlier dataset step aside, to `<folder>.previous`.
        num_nodes: nodes.
        degree: mean in-degree before edges are held out.
        feature_dim: feature columns.
        num_communities: communities; the dataset has no labels.
        seed: equal seeds give equal datasets.
        train_fraction: share of the undirected edges to train on, among those that are stored.
        val_fraction: share of the undirected edges held out for validation.
        test_fraction: share held out for the test.
        homophily: share of edges whose second end is drawn from the first's community.
        degree_exponent: exponent of the weights' power law; larger is more even.
        feature_signal: how far the features alone tell the community, 0 (not at all) to 1.

    Raises:
        DatasetError: impossible sizes, a dataset is there, or the folder cannot be written.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_communities)
    rng = np.random.default_rng([seed, 3])
    weights = np.minimum((1 - rng.random(num_nodes)) ** (-1 / (degree_exponent - 1)), 50.0)
    communities = np.arange(num_nodes) * num_communities // num_nodes
    draw = block_model_drawer(weights, communities, homophily, rng)
    keys = distinct_pairs(draw, num_nodes, max(1, round(num_nodes * degree / 2)), rng)
    new_id = rng.permutation(num_nodes)
    of_node = np.empty(num_nodes, np.int64)
    of_node[new_id] = communities
    pairs = np.stack([new_id[keys // num_nodes], new_id[keys % num_nodes]], axis=1)
    turned = rng.random(len(pairs)) < 0.5  # which end is the source is a coin flip
    pairs[turned] = pairs[turned, ::-1]
    split = _split(pairs, (train_fraction, val_fraction, test_fraction), rng)
    stored = split.pop("stored")
    with Staging(folder, overwrite=overwrite) as staging:
        num_edges = build_csc(
            array_edges(stored[:, 0], stored[:, 1]),
            num_nodes,
            staging,
            options=EdgeOptions(symmetrise=True),
        )
        table = staging.create("x", np.float32, (feature_dim,))
        length = signal_length(num_communities, feature_signal)
        for rows in feature_rows(of_node, feature_dim, num_communities, length, rng):
            table.append(rows)
        for name, part in split.items():
            staging.save(name, part)
        return commit_dataset(
            staging,
            name=f"links-{num_nodes}",
            num_nodes=num_nodes,
            num_edges=num_edges,
            feature_dim=feature_dim,
            feature_storage="dense",
            num_classes=0,
            task="link",
        )


def _split(
    pairs: NDArray[np.int64], fractions: tuple[float, float, float], rng: np.random.Generator
) -> dict[str, NDArray[np.int64]]:
    """Held-out pairs, the stored ones, and those of them that are trained on."""
    train, val, test = fractions
    if min(fractions) < 0 or train <= 0 or val + test >= 1 or train > 1 - val - test + 1e-9:
        raise DatasetError(
            "expected a training share above 0 and validation and test shares of 0 or more that "
            f"add up to at most 1, found {', '.join(f'{f:g}' for f in fractions)}"
        )
    shuffled = pairs[rng.permutation(len(pairs))]
    ends = np.cumsum([int(val * len(pairs)), int(test * len(pairs))])
    held_val, held_test, stored = np.split(shuffled, ends)
    return {
        "stored": stored,
        "train_idx": stored[: max(1, int(train * len(pairs)))],
        "val_idx": held_val,
        "test_idx": held_test,
    }
