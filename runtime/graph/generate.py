"""Seeded synthetic datasets for classes (R-MAT, block model), links and typed graphs.

Graphs of one type are symmetric, without repeated edges or self-loops, with shuffled node ids and
dense float32 features. Arguments that several generators share:

    num_nodes                nodes; need not be a power of two
    degree                   mean stored in-degree: `num_nodes * degree` stored edges
    num_classes              classes, and communities
    seed                     equal seeds give equal datasets
    train_fraction, ...      shares of the nodes (for links: of the undirected edges) in the split
    homophily                share of edges whose second end is of the first's community
    degree_exponent          exponent of the power law of the nodes' weights; larger is more even
    feature_signal           how far the features alone tell the community, 0 (not at all) to 1
    label_noise              share of nodes whose label is a random other class
    overwrite                keep an earlier dataset as `<folder>.previous`

Node v of community c has features x_v = s u_c + z_v, with u_c a random direction of length 1 and
z_v standard normal noise. The best classifier on the features alone is right with probability
1/C + feature_signal (1 - 1/C), for C orthogonal directions and no label noise. Averaging over
neighbours of the same community shrinks the noise and not the signal, so a graph network gains as
far as edges stay inside communities.

All generators raise DatasetError for impossible sizes, a dataset that is there, or a folder that
cannot be written. They take about 40 bytes of memory per stored edge, which must be there.

Sources: Chakrabarti, Zhan, Faloutsos, "R-MAT" (SDM 2004), with the parameters of the Graph500
benchmark; Karrer and Newman, "Stochastic blockmodels and community structure in networks",
Phys. Rev. E 83, 016107 (2011), for degree-corrected block models.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import EdgeOptions, array_edges, build_csc
from gnnplan.runtime.graph.dataset import Graph, commit_dataset
from gnnplan.runtime.graph.format import SPLITS
from gnnplan.runtime.graph.generate_draws import (
    Clustering,
    Ids,
    Rng,
    block_model_drawer,
    check_sizes,
    community_weights,
    distinct_pairs,
    draw_communities,
    equal_communities,
    noisy_labels,
    rmat_drawer,
    seed_chances,
    signal_length,
    split_by_chance,
    split_nodes,
    split_pairs,
)
from gnnplan.runtime.graph.staging import Staging, refuse_occupied

ROWS_PER_CHUNK = 1 << 16
NODE_TYPES = ("paper", "author")
EDGE_TYPES = ("paper__cites__paper", "author__writes__paper", "paper__written_by__author")


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
    nodes with at least one edge.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_classes)
    rng = np.random.default_rng([seed, 1])
    communities = rng.integers(0, num_classes, num_nodes)
    keys = distinct_pairs(rmat_drawer(num_nodes, rng), num_nodes, degree, rng)
    return _write_classes(
        folder,
        keys,
        communities,
        rng,
        fractions=(train_fraction, val_fraction, test_fraction),
        label_noise=label_noise,
        overwrite=overwrite,
        name=f"rmat-{num_nodes}",
        num_classes=num_classes,
        feature_dim=feature_dim,
        feature_signal=feature_signal,
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
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_classes)
    rng = np.random.default_rng([seed, 2])
    keys, communities = _draw_block_model(
        num_nodes, num_classes, degree, homophily, degree_exponent, rng
    )
    return _write_classes(
        folder,
        keys,
        communities,
        rng,
        fractions=(train_fraction, val_fraction, test_fraction),
        label_noise=label_noise,
        overwrite=overwrite,
        name=f"sbm-{num_nodes}",
        num_classes=num_classes,
        feature_dim=feature_dim,
        feature_signal=feature_signal,
    )


def generate_communities(
    folder: Path,
    shape: Clustering,
    *,
    num_nodes: int,
    degree: float | int,
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
    """Write a graph of log-normal degrees with communities, trained on in one region.

    A graph that is not `both_ways` has directed edges, and lists as long as chance has them. Labels
    are independent of the topology, as of `generate_rmat`; the split holds nodes with an edge.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_classes)
    rng = np.random.default_rng([seed, 5])
    region = min(num_nodes, max(2, round(num_nodes * shape.region)))
    names = community_weights(shape, num_nodes, region, shape.named, rng)
    keys = draw_communities(shape, names, region, degree, rng)
    src, dst, former = _shuffle_nodes(keys, np.arange(num_nodes), rng)
    chances = seed_chances(shape, names, region, rng)[former]
    classes = rng.integers(0, num_classes, num_nodes)
    connected = np.zeros(num_nodes, bool)
    connected[src] = connected[dst] = True
    fractions = (train_fraction, val_fraction, test_fraction)

    def make_rest() -> dict[str, Ids]:
        labels = noisy_labels(classes, num_classes, label_noise, rng)
        ids = np.flatnonzero(connected)
        split = split_by_chance(ids, chances[ids], fractions, rng)
        return {"y": labels, **dict(zip(SPLITS, split, strict=True))}

    return _write(
        folder,
        src,
        dst,
        classes,
        rng,
        overwrite=overwrite,
        both_ways=shape.both_ways,
        num_communities=num_classes,
        feature_dim=feature_dim,
        feature_signal=feature_signal,
        make_rest=make_rest,
        name=f"communities-{num_nodes}",
        num_classes=num_classes,
        task="multiclass",
    )


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
    """Write the graph of `generate_sbm` for task link; its pairs are (source, destination).

    Edges to validate and to test on are not stored. The rest is stored in both directions, and
    `train_fraction` of all undirected edges is trained on. Nodes of one community are likelier to
    be linked, so a model that finds communities ranks true destinations above random ones.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_nodes, degree, feature_dim, num_communities)
    rng = np.random.default_rng([seed, 3])
    keys, communities = _draw_block_model(
        num_nodes, num_communities, degree, homophily, degree_exponent, rng
    )
    src, dst, of_node = _shuffle_nodes(keys, communities, rng)
    pairs = np.stack([src, dst], axis=1)
    turned = rng.random(len(pairs)) < 0.5  # which end is the source is a coin flip
    pairs[turned] = pairs[turned, ::-1]
    stored, split = split_pairs(pairs, (train_fraction, val_fraction, test_fraction), rng)
    return _write(
        folder,
        stored[:, 0],
        stored[:, 1],
        of_node,
        rng,
        overwrite=overwrite,
        num_communities=num_communities,
        feature_signal=feature_signal,
        make_rest=lambda: dict(zip(SPLITS, split, strict=True)),
        name=f"links-{num_nodes}",
        feature_dim=feature_dim,
        num_classes=0,
        task="link",
    )


def generate_typed(
    folder: Path,
    *,
    num_papers: int,
    num_authors: int,
    cites: float | int = 8.0,
    authors_per_paper: int = 3,
    paper_dim: int = 32,
    author_dim: int = 16,
    num_classes: int = 5,
    seed: int = 0,
    train_fraction: float = 0.2,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    homophily: float = 0.8,
    paper_signal: float = 0.1,
    author_signal: float = 0.4,
    label_noise: float = 0.05,
    overwrite: bool = False,
) -> Graph:
    """Write papers that cite papers, and their authors; papers are classified by community.

    A paper's own features hardly tell its label, those of its authors (another table, of another
    width) tell more: a model that reads both types beats one that reads papers alone.

    | number | edge type                    | edges                                          |
    |--------|------------------------------|------------------------------------------------|
    | 0      | paper__cites__paper          | block model, one direction each; mean `cites`  |
    | 1      | author__writes__paper        | every paper has from 1 to 2 x mean - 1 authors |
    | 2      | paper__written_by__author    | the same in the other direction                |

    `authors_per_paper` is the mean number drawn; repetitions fall away.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_papers, cites, min(paper_dim, author_dim), num_classes)
    if num_authors < num_classes or authors_per_paper < 1:
        raise DatasetError(
            "expected at least one author per class and per paper, found "
            f"{num_authors} authors and {authors_per_paper} per paper"
        )
    rng = np.random.default_rng([seed, 4])
    paper_of = equal_communities(num_papers, num_classes)
    author_of = equal_communities(num_authors, num_classes)
    new_id = rng.permutation(num_papers + num_authors)
    src, dst, edge_type = _typed_edges(
        paper_of, author_of, cites, authors_per_paper, homophily, rng
    )
    node_type = np.zeros(len(new_id), np.int32)
    node_type[new_id[num_papers:]] = 1
    labels = np.full(len(new_id), -1, np.int64)
    labels[new_id[:num_papers]] = noisy_labels(paper_of, num_classes, label_noise, rng)
    fractions = (train_fraction, val_fraction, test_fraction)
    split = split_nodes(np.sort(new_id[:num_papers]), fractions, rng)
    tables = (
        ("paper", paper_of, new_id[:num_papers], paper_dim, paper_signal),
        ("author", author_of, new_id[num_papers:], author_dim, author_signal),
    )
    with Staging(folder, overwrite=overwrite) as staging:
        num_edges = build_csc(
            array_edges(new_id[src], new_id[dst], edge_type=edge_type), len(new_id), staging
        )
        for name, communities, ids, width, signal in tables:
            own = communities[np.argsort(ids)]  # tables are in the order of node ids
            _save_features(staging, f"x_{name}", own, width, num_classes, signal, rng)
        staging.save("node_type", node_type)
        staging.save("y", labels)
        for key, part in zip(SPLITS, split, strict=True):
            staging.save(key, part)
        return commit_dataset(
            staging,
            name=f"typed-{len(new_id)}",
            num_nodes=len(new_id),
            num_edges=num_edges,
            feature_dim=max(paper_dim, author_dim),
            feature_storage="typed",
            num_classes=num_classes,
            task="multiclass",
            node_types=list(NODE_TYPES),
            edge_types=list(EDGE_TYPES),
        )


def _write_classes(
    folder: Path,
    keys: Ids,
    communities: Ids,
    rng: Rng,
    *,
    num_classes: int,
    fractions: tuple[float, float, float],
    label_noise: float,
    **options: Any,
) -> Graph:
    """Write a graph whose nodes are classified by their community; `options` are `_write`'s."""
    src, dst, of_node = _shuffle_nodes(keys, communities, rng)
    connected = np.zeros(len(communities), bool)
    connected[src] = connected[dst] = True

    def make_rest() -> dict[str, Ids]:
        labels = noisy_labels(of_node, num_classes, label_noise, rng)
        split = split_nodes(np.flatnonzero(connected), fractions, rng)
        return {"y": labels, **dict(zip(SPLITS, split, strict=True))}

    return _write(
        folder,
        src,
        dst,
        of_node,
        rng,
        make_rest=make_rest,
        num_communities=num_classes,
        num_classes=num_classes,
        task="multiclass",
        **options,
    )


def _write(
    folder: Path,
    src: Ids,
    dst: Ids,
    communities: Ids,
    rng: Rng,
    *,
    overwrite: bool,
    both_ways: bool = True,
    num_communities: int,
    feature_dim: int,
    feature_signal: float,
    make_rest: Callable[[], dict[str, Ids]],
    **facts: Any,
) -> Graph:
    """Write topology and features, then the arrays of `make_rest`, whose draws come last."""
    with Staging(folder, overwrite=overwrite) as staging:
        num_edges = build_csc(
            array_edges(src, dst),
            len(communities),
            staging,
            options=EdgeOptions(symmetrise=both_ways),
        )
        _save_features(staging, "x", communities, feature_dim, num_communities, feature_signal, rng)
        for key, array in make_rest().items():
            staging.save(key, array)
        return commit_dataset(
            staging,
            num_nodes=len(communities),
            num_edges=num_edges,
            feature_dim=feature_dim,
            feature_storage="dense",
            **facts,
        )


def _shuffle_nodes(keys: Ids, communities: Ids, rng: Rng) -> tuple[Ids, Ids, Ids]:
    """Give nodes random ids; return both ends of each edge, and the community of each id."""
    new_id = rng.permutation(len(communities))
    of_node = np.empty(len(communities), np.int64)
    of_node[new_id] = communities
    return new_id[keys // len(communities)], new_id[keys % len(communities)], of_node


def _draw_block_model(
    num_nodes: int,
    num_communities: int,
    degree: float | int,
    homophily: float,
    degree_exponent: float,
    rng: Rng,
) -> tuple[Ids, Ids]:
    """Draw the keys of a degree-corrected block model's edges, and its nodes' communities."""
    # Inverse of the power law's distribution function, from weight 1 on.
    weights = np.minimum((1 - rng.random(num_nodes)) ** (-1 / (degree_exponent - 1)), 50.0)
    communities = equal_communities(num_nodes, num_communities)
    draw = block_model_drawer(weights, communities, homophily, rng)
    return distinct_pairs(draw, num_nodes, degree, rng), communities


def _typed_edges(
    paper_of: Ids,
    author_of: Ids,
    cites: float | int,
    authors_per_paper: int,
    homophily: float,
    rng: Rng,
) -> tuple[Ids, Ids, NDArray[np.int32]]:
    """Draw source, destination and type of every edge; authors are numbered after the papers."""
    papers, authors = len(paper_of), len(author_of)
    draw = block_model_drawer(np.ones(papers), paper_of, homophily, rng)
    keys = distinct_pairs(draw, papers, 2 * cites, rng)
    a, b = keys // papers, keys % papers
    turned = rng.random(len(keys)) < 0.5
    cited, citing = np.where(turned, b, a), np.where(turned, a, b)

    written = np.repeat(np.arange(papers), rng.integers(1, 2 * authors_per_paper, papers))
    first = np.searchsorted(author_of, paper_of[written], side="left")
    last = np.searchsorted(author_of, paper_of[written], side="right")
    inside = rng.random(len(written)) < homophily
    low, high = np.where(inside, first, 0), np.where(inside, last, authors)
    writer = low + (rng.random(len(written)) * (high - low)).astype(np.int64)
    pairs = np.unique(written * authors + writer)
    written, writer = pairs // authors, papers + pairs % authors

    src = np.concatenate([cited, writer, written])
    dst = np.concatenate([citing, written, writer])
    sizes = [len(cited), len(writer), len(writer)]
    return src, dst, np.repeat(np.arange(3, dtype=np.int32), sizes)


def _save_features(
    staging: Staging,
    name: str,
    communities: Ids,
    feature_dim: int,
    num_classes: int,
    feature_signal: float,
    rng: Rng,
) -> None:
    """Write s u_c + z of each node: float32 [nodes, feature_dim]."""
    length = signal_length(num_classes, feature_signal)
    directions = rng.standard_normal((num_classes, feature_dim))
    directions *= length / np.linalg.norm(directions, axis=1, keepdims=True)
    centres = directions.astype(np.float32)
    table = staging.create(name, np.float32, (feature_dim,))
    for start in range(0, len(communities), ROWS_PER_CHUNK):
        own = communities[start : start + ROWS_PER_CHUNK]
        rows = rng.standard_normal((len(own), feature_dim), dtype=np.float32)
        rows += centres[own]
        table.append(rows)
