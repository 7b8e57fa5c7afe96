"""Seeded synthetic datasets: R-MAT (skewed degrees) and a stochastic block model one can learn.

Both give a symmetric graph without repeated edges or self-loops, node ids shuffled, dense float32
features, labels and a split. `degree` is the mean stored in-degree, so a graph has
`num_nodes * degree` stored edges, both directions counted.

Features and labels: node v of community c has label c except for a share `label_noise` (a random
other class), and features x_v = s u_c + z_v with u_c a random direction of length 1 and z_v
standard normal noise. The length s is chosen such that the best classifier on the features alone
would be right with probability 1/C + feature_signal (1 - 1/C), for C orthogonal directions and no
label noise. Averaging over neighbours of the same community shrinks the noise and not the signal,
so a graph network gains on any classifier of single rows as far as edges stay inside communities
(`homophily`).
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import EdgeOptions, array_edges, build_csc
from gnnplan.runtime.graph.dataset import Graph, commit_dataset
from gnnplan.runtime.graph.staging import Staging, refuse_occupied

Ends = tuple[NDArray[np.int64], NDArray[np.int64]]
Drawer = Callable[[int], Ends]
"""Draws up to that many edges: two equally long arrays of node ids."""

DRAW_EDGES = 1 << 21
GRAPH500 = (0.57, 0.19, 0.19)
"""Probabilities a, b, c of the quadrants; d is the rest (0.05)."""


def rmat_drawer(num_nodes: int, rng: np.random.Generator) -> Drawer:
    """R-MAT edges: each bit level of (u, v) falls into one of four quadrants."""
    levels = max(1, (num_nodes - 1).bit_length())
    a, b, c = (np.float32(p) for p in GRAPH500)

    def draw(count: int) -> Ends:
        u = np.zeros(count, np.int64)
        v = np.zeros(count, np.int64)
        for _ in range(levels):
            r = rng.random(count, dtype=np.float32)
            lower = r >= a + b
            u <<= 1
            u |= lower
            v <<= 1
            v |= np.where(lower, r >= a + b + c, r >= a)
        inside = (u < num_nodes) & (v < num_nodes)
        return u[inside], v[inside]

    return draw


def block_model_drawer(
    weights: NDArray[np.float64],
    communities: NDArray[np.int64],
    homophily: float,
    rng: np.random.Generator,
) -> Drawer:
    """Degree-corrected block-model edges.

    Args:
        weights: [num_nodes] positive; a node is drawn in proportion to it.
        communities: [num_nodes] rising community of each node.
        homophily: probability that the second end is drawn from the first's community.
        rng: source of randomness.
    """
    ends = np.cumsum(weights)
    first = np.searchsorted(communities, communities, side="left")
    last = np.searchsorted(communities, communities, side="right") - 1
    low, high = (ends - weights)[first], ends[last]

    def draw(count: int) -> Ends:
        u = np.searchsorted(ends, rng.random(count) * ends[-1], side="right")
        inside = rng.random(count) < homophily
        start, stop = np.where(inside, low[u], 0.0), np.where(inside, high[u], ends[-1])
        v = np.searchsorted(ends, start + rng.random(count) * (stop - start), side="right")
        most = len(ends) - 1  # rounding may land on the total itself
        return np.minimum(u, most), np.minimum(v, most)

    return draw


def distinct_pairs(
    draw: Drawer, num_nodes: int, wanted: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Exactly `wanted` distinct undirected edges u < v as sorted keys `u * num_nodes + v`.

    Raises:
        DatasetError: so many edges that new ones are hardly found any more.
    """
    keys = np.empty(0, np.int64)
    while len(keys) < wanted:
        have = len(keys)
        missing = wanted - have
        fresh: list[NDArray[np.int64]] = [keys]
        for start in range(0, int(missing * 1.1) + 1024, DRAW_EDGES):
            u, v = draw(min(DRAW_EDGES, int(missing * 1.1) + 1024 - start))
            key = np.minimum(u, v) * num_nodes + np.maximum(u, v)
            fresh.append(key[u != v])
        keys = np.concatenate(fresh)
        keys.sort()
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
        if len(keys) - have < min(missing, max(64, missing // 100)):
            raise DatasetError(
                f"found only {len(keys)} distinct edges of {wanted} among {num_nodes} nodes; "
                "lower the degree or raise the number of nodes"
            )
    if len(keys) > wanted:
        surplus = rng.choice(len(keys), len(keys) - wanted, replace=False, shuffle=False)
        keys = np.delete(keys, surplus)
    return keys


ROWS_PER_CHUNK = 1 << 16


def generate_rmat(
    folder: Path,
    *,
    num_nodes: int,
    degree: float | int = 15.0,
    feature_dim: int = 64,
    num_classes: int = 10,
    seed: int = 0,
    train_fraction: float = 0.1,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    feature_signal: float = 0.5,
    label_noise: float = 0.05,
    overwrite: bool = False,
) -> Graph:
    """Write an R-MAT graph with the Graph500 parameters (0.57, 0.19, 0.19, 0.05).

    Labels are uniform and independent of the topology: the graph is for speed, not for learning
    (features still carry their label). Many nodes are isolated, as R-MAT has it; the split holds
    nodes with at least one edge. Memory: about 40 bytes per stored edge.

    Source: Chakrabarti, Zhan, Faloutsos, "R-MAT" (SDM 2004); parameters of the Graph500 benchmark.

    Args:
        folder: dataset folder to write, whole or not at all.
        overwrite: let an earlier dataset step aside, to `<folder>.previous`.
        num_nodes: nodes; need not be a power of two.
        degree: mean stored in-degree.
        feature_dim: feature columns.
        num_classes: classes.
        seed: equal seeds give equal datasets.
        train_fraction: share of the nodes with an edge in the training split.
        val_fraction: share in the validation split.
        test_fraction: share in the test split.
        feature_signal: how far the features alone tell the class, 0 (not at all) to 1.
        label_noise: share of nodes whose label is a random other class.

    Raises:
        DatasetError: impossible sizes, a dataset is there, or the folder cannot be written.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_classes)
    rng = np.random.default_rng([seed, 1])
    draw = rmat_drawer(num_nodes, rng)
    communities = rng.integers(0, num_classes, num_nodes)
    return _write(
        folder,
        overwrite=overwrite,
        name=f"rmat-{num_nodes}",
        pairs=distinct_pairs(draw, num_nodes, _num_pairs(num_nodes, degree), rng),
        communities=communities,
        rng=rng,
        feature_dim=feature_dim,
        num_classes=num_classes,
        fractions=(train_fraction, val_fraction, test_fraction),
        feature_signal=feature_signal,
        label_noise=label_noise,
    )


def generate_sbm(
    folder: Path,
    *,
    num_nodes: int,
    degree: float | int = 25.0,
    feature_dim: int = 64,
    num_classes: int = 10,
    seed: int = 0,
    train_fraction: float = 0.1,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    homophily: float = 0.8,
    degree_exponent: float = 2.5,
    feature_signal: float = 0.4,
    label_noise: float = 0.05,
    overwrite: bool = False,
) -> Graph:
    """Write a degree-corrected stochastic block model, one community per class.

    An edge takes its first end with probability proportional to the node's weight, its second end
    likewise, from the same community with probability `homophily` and else from any. Weights follow
    a power law, capped at 50 times the smallest.

    Source: Karrer and Newman, "Stochastic blockmodels and community structure in networks",
    Phys. Rev. E 83, 016107 (2011). Memory: about 40 bytes per stored edge.

    Args:
        folder: dataset folder to write, whole or not at all.
        overwrite: let an earlier dataset step aside, to `<folder>.previous`.
        num_nodes: nodes.
        degree: mean stored in-degree.
        feature_dim: feature columns.
        num_classes: classes, and communities.
        seed: equal seeds give equal datasets.
        train_fraction: share of the nodes in the training split.
        val_fraction: share in the validation split.
        test_fraction: share in the test split.
        homophily: share of edges whose second end is drawn from the first's community.
        degree_exponent: exponent of the weights' power law; larger is more even.
        feature_signal: how far the features alone tell the class, 0 (not at all) to 1.
        label_noise: share of nodes whose label is a random other class.

    Raises:
        DatasetError: impossible sizes, a dataset is there, or the folder cannot be written.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_classes)
    rng = np.random.default_rng([seed, 2])
    # Inverse of the power law's distribution function, from weight 1 on.
    weights = np.minimum((1 - rng.random(num_nodes)) ** (-1 / (degree_exponent - 1)), 50.0)
    communities = np.arange(num_nodes) * num_classes // num_nodes
    draw = block_model_drawer(weights, communities, homophily, rng)
    return _write(
        folder,
        overwrite=overwrite,
        name=f"sbm-{num_nodes}",
        pairs=distinct_pairs(draw, num_nodes, _num_pairs(num_nodes, degree), rng),
        communities=communities,
        rng=rng,
        feature_dim=feature_dim,
        num_classes=num_classes,
        fractions=(train_fraction, val_fraction, test_fraction),
        feature_signal=feature_signal,
        label_noise=label_noise,
    )


def signal_length(num_classes: int, feature_signal: float) -> float:
    """Length s of the class signal for which features alone reach the wanted accuracy.

    With C orthogonal directions and unit noise the best classifier takes the largest of C
    independent normals, one of which is shifted by s:

        P(right) = integral phi(t - s) Phi(t)^(C - 1) dt

    Args:
        num_classes: C.
        feature_signal: (P(right) - 1/C) / (1 - 1/C), in [0, 1).
    """
    from scipy.stats import norm  # half a second of imports, for generators alone

    if num_classes == 1 or feature_signal <= 0:
        return 0.0
    goal = 1 / num_classes + min(feature_signal, 0.999) * (1 - 1 / num_classes)
    grid = np.linspace(-8.0, 28.0, 4001)
    others = norm.cdf(grid) ** (num_classes - 1)

    low, high = 0.0, 20.0
    for _ in range(60):  # bisection: the probability rises with s
        middle = (low + high) / 2
        right = np.trapezoid(norm.pdf(grid - middle) * others, grid)
        low, high = (middle, high) if right < goal else (low, middle)
    return low


def _num_pairs(num_nodes: int, degree: float | int) -> int:
    return max(1, round(num_nodes * degree / 2))


def check_sizes(num_nodes: int, degree: float | int, feature_dim: int, num_classes: int) -> None:
    """Refuse sizes of which no graph can be made; raises DatasetError."""
    if num_nodes < 2 or num_classes < 1 or feature_dim < 1 or num_classes > num_nodes:
        raise DatasetError(
            "expected at least 2 nodes, 1 feature column and from 1 to num_nodes classes, found "
            f"{num_nodes} nodes, {feature_dim} columns and {num_classes} classes"
        )
    if not 0 < degree <= (num_nodes - 1) / 2:
        raise DatasetError(
            f"expected a mean degree above 0 and at most {(num_nodes - 1) / 2:g} (half of a "
            f"complete graph's) for {num_nodes} nodes, found {degree:g}"
        )


def _write(
    folder: Path,
    *,
    overwrite: bool,
    name: str,
    pairs: NDArray[np.int64],
    communities: NDArray[np.int64],
    rng: np.random.Generator,
    feature_dim: int,
    num_classes: int,
    fractions: tuple[float, float, float],
    feature_signal: float,
    label_noise: float,
) -> Graph:
    """Shuffle node ids, then write topology, features, labels and split."""
    num_nodes = len(communities)
    new_id = rng.permutation(num_nodes)
    src, dst = new_id[pairs // num_nodes], new_id[pairs % num_nodes]
    of_node = np.empty(num_nodes, np.int64)
    of_node[new_id] = communities
    connected = np.zeros(num_nodes, bool)
    connected[src] = connected[dst] = True
    with Staging(folder, overwrite=overwrite) as staging:
        stored = build_csc(
            array_edges(src, dst), num_nodes, staging, options=EdgeOptions(symmetrise=True)
        )
        table = staging.create("x", np.float32, (feature_dim,))
        length = signal_length(num_classes, feature_signal)
        for rows in feature_rows(of_node, feature_dim, num_classes, length, rng):
            table.append(rows)
        staging.save("y", noisy_labels(of_node, num_classes, label_noise, rng))
        split = split_nodes(np.flatnonzero(connected), fractions, rng)
        for key, ids in zip(("train_idx", "val_idx", "test_idx"), split, strict=True):
            staging.save(key, ids)
        return commit_dataset(
            staging,
            name=name,
            num_nodes=num_nodes,
            num_edges=stored,
            feature_dim=feature_dim,
            feature_storage="dense",
            num_classes=num_classes,
            task="multiclass",
        )


def feature_rows(
    communities: NDArray[np.int64],
    feature_dim: int,
    num_classes: int,
    length: float,
    rng: np.random.Generator,
) -> Iterator[NDArray[np.float32]]:
    """Chunks of s u_c + z, float32 [rows, feature_dim]."""
    directions = rng.standard_normal((num_classes, feature_dim))
    directions *= length / np.linalg.norm(directions, axis=1, keepdims=True)
    centres = directions.astype(np.float32)
    for start in range(0, len(communities), ROWS_PER_CHUNK):
        own = communities[start : start + ROWS_PER_CHUNK]
        rows = rng.standard_normal((len(own), feature_dim), dtype=np.float32)
        rows += centres[own]
        yield rows


def noisy_labels(
    communities: NDArray[np.int64], num_classes: int, share: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Each node's community, but for a share of random other classes."""
    if num_classes == 1:
        return communities
    wrong = rng.random(len(communities)) < share
    shift = rng.integers(1, num_classes, len(communities))
    return np.where(wrong, (communities + shift) % num_classes, communities)


def split_nodes(
    candidates: NDArray[np.int64],
    fractions: tuple[float, float, float],
    rng: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Disjoint random sorted id sets of the wanted shares; each has a node if there are three."""
    if min(fractions) < 0 or sum(fractions) > 1 + 1e-9 or fractions[0] <= 0:
        raise DatasetError(
            "expected split fractions of 0 or more that add up to at most 1, with a training "
            f"share above 0, found {', '.join(f'{f:g}' for f in fractions)}"
        )
    shuffled = rng.permutation(candidates)
    sizes = [max(1, int(f * len(candidates))) if f > 0 else 0 for f in fractions]
    ends = np.cumsum(sizes)
    return [np.sort(shuffled[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
