"""A seeded synthetic dataset for link prediction: a block model with some of its edges held out.

The graph is `generate_sbm`'s: degree-corrected communities, features that tell a node's community
through noise. Its undirected edges are cut into three: those to validate and to test on are not
stored at all, the rest is stored in both directions and a share of it is trained on. Two nodes of
one community are likelier to be linked, so a model that finds communities ranks true destinations
above random ones.

A seeded synthetic typed dataset: papers that cite papers, and the authors who wrote them.

Papers and authors live in communities, one per class, and edges mostly stay inside them. A paper's
label is its community but for some noise; its own features hardly tell it, those of its authors
(another table, of another width) tell more. So a model that reads both types through their
relations beats one that reads papers alone.

| number | edge type                    | edges                                          |
|--------|------------------------------|------------------------------------------------|
| 0      | paper__cites__paper          | block model, one direction each                |
| 1      | author__writes__paper        | every paper has from 1 to 2 x mean - 1 authors |
| 2      | paper__written_by__author    | the same, turned                               |
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import EdgeOptions, array_edges, build_csc
from gnnplan.runtime.graph.dataset import Graph, commit_dataset
from gnnplan.runtime.graph.generate import (
    block_model_drawer,
    check_sizes,
    distinct_pairs,
    feature_rows,
    noisy_labels,
    signal_length,
    split_nodes,
)
from gnnplan.runtime.graph.staging import Staging, refuse_occupied


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


NODE_TYPES = ("paper", "author")
EDGE_TYPES = ("paper__cites__paper", "author__writes__paper", "paper__written_by__author")


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
    """Write a typed dataset: node ids are shuffled over both types, papers are classified.

    Args:
        folder: dataset folder to write, whole or not at all.
        overwrite: let an earlier dataset step aside, to `<folder>.previous`.
        num_papers: nodes of type paper.
        num_authors: nodes of type author.
        cites: mean number of papers that a paper cites.
        authors_per_paper: mean number of authors drawn for a paper; repetitions fall away.
        paper_dim: feature columns of a paper.
        author_dim: feature columns of an author.
        num_classes: classes, and communities.
        seed: equal seeds give equal datasets.
        train_fraction: share of the papers in the training split.
        val_fraction: share in the validation split.
        test_fraction: share in the test split.
        homophily: share of edges whose other end is drawn from the paper's own community.
        paper_signal: how far a paper's features alone tell its community, 0 (not at all) to 1.
        author_signal: the same of an author's features and community.
        label_noise: share of papers whose label is a random other class.

    Raises:
        DatasetError: impossible sizes, a dataset is there, or the folder cannot be written.
    """
    refuse_occupied(folder, overwrite=overwrite)
    check_sizes(num_papers, cites, min(paper_dim, author_dim), num_classes)
    if num_authors < num_classes or authors_per_paper < 1:
        raise DatasetError(
            "expected at least one author per class and per paper, found "
            f"{num_authors} authors and {authors_per_paper} per paper"
        )
    rng = np.random.default_rng([seed, 4])
    paper_of = np.arange(num_papers) * num_classes // num_papers
    author_of = np.arange(num_authors) * num_classes // num_authors
    new_id = rng.permutation(num_papers + num_authors)
    src, dst, edge_type = _edges(paper_of, author_of, cites, authors_per_paper, homophily, rng)
    node_type = np.zeros(len(new_id), np.int32)
    node_type[new_id[num_papers:]] = 1
    labels = np.full(len(new_id), -1, np.int64)
    labels[new_id[:num_papers]] = noisy_labels(paper_of, num_classes, label_noise, rng)
    fractions = (train_fraction, val_fraction, test_fraction)
    split = split_nodes(np.sort(new_id[:num_papers]), fractions, rng)
    with Staging(folder, overwrite=overwrite) as staging:
        num_edges = build_csc(
            array_edges(new_id[src], new_id[dst], edge_type=edge_type), len(new_id), staging
        )
        communities = {"paper": paper_of, "author": author_of}
        ids = {"paper": new_id[:num_papers], "author": new_id[num_papers:]}
        widths = {"paper": paper_dim, "author": author_dim}
        signals = {"paper": paper_signal, "author": author_signal}
        for name in NODE_TYPES:
            # Tables are in the order of node ids.
            own = communities[name][np.argsort(ids[name])]
            table = staging.create(f"x_{name}", np.float32, (widths[name],))
            length = signal_length(num_classes, signals[name])
            for rows in feature_rows(own, widths[name], num_classes, length, rng):
                table.append(rows)
        staging.save("node_type", node_type)
        staging.save("y", labels)
        for key, part in zip(("train_idx", "val_idx", "test_idx"), split, strict=True):
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


def _edges(
    paper_of: NDArray[np.int64],
    author_of: NDArray[np.int64],
    cites: float | int,
    authors_per_paper: int,
    homophily: float,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Source, destination and type of every edge; authors follow the papers in numbering."""
    papers, authors = len(paper_of), len(author_of)
    draw = block_model_drawer(np.ones(papers), paper_of, homophily, rng)
    keys = distinct_pairs(draw, papers, round(papers * cites), rng)
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
