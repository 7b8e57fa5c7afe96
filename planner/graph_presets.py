"""Hold the sizes of published data sets, and generate seeded graphs like them at any scale.

A graph like a data set has its mean degree, feature columns, classes, share of training nodes (of
the nodes with an edge) and clustering: spread of degrees, communities, and the region where its
training nodes lie. Links are drawn from a block model. Of a graph that is not at hand, sizes and
clustering give a law of its batches (`KnownGraph`), by which estimates are made.
"""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.order import HeatGroups
from gnnplan.planner.probe.presets import load_yaml
from gnnplan.planner.profile.analytic import GraphLaw, expected_batch, expected_seeds, read_law
from gnnplan.planner.profile.community_law import TYPICAL, CommunityLaw, community_law, law_batch
from gnnplan.planner.profile.estimated import MOST_GROUPS, TypedGraph, read_types, typed_batch
from gnnplan.planner.queries.estimate import EstimateSettings
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime import codec
from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.format import GraphMeta, map_array, read_meta
from gnnplan.runtime.graph.generate import generate_communities, generate_links
from gnnplan.runtime.graph.generate_draws import Clustering
from gnnplan.runtime.plan.schema import GraphRef, Workload
from gnnplan.runtime.sampling.registry import BY_TYPE, DEFAULT_SAMPLER

FILE = Path(__file__).with_name("graph_presets.yaml")
LEAST_NODES = 100
HELD_OUT = 0.1
"""Share of the nodes in validation, and in test, where training leaves as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPreset:
    """Sizes of a data set."""

    nodes: int
    edges: int
    """Stored edges: both directions where the paper counts both."""
    feature_dim: int
    feature_dtype: Literal["float16", "float32", "bfloat16"]
    classes: int
    train_share: float
    """Share of training nodes; of training links for task link."""
    task: Literal["multiclass", "multilabel", "link"]
    source: str
    law: Clustering = TYPICAL
    """What its batches share, for graphs like it and for counts without a graph."""
    law_source: str = "no counts of it are published: the middle of the fitted graphs"

    @property
    def mean_degree(self) -> float:
        """Return the edges per node."""
        return self.edges / self.nodes


@functools.cache
def graph_presets() -> dict[str, GraphPreset]:
    """Return all data sets by name, in lower case."""
    plain = load_yaml(FILE.read_text())
    return {name: codec.decode(GraphPreset, value) for name, value in plain.items()}


def graph_preset(name: str) -> GraphPreset:
    """Return a data set by name, in any case.

    Raises:
        SettingsError: there is none of that name.
    """
    known = graph_presets()
    if name.lower() not in known:
        raise SettingsError(
            f"expected a data set among {', '.join(known)}, found {name!r:.80}"
            f"{did_you_mean(name, known)}"
        )
    return known[name.lower()]


def preset_law(preset: GraphPreset) -> CommunityLaw:
    """Return the law by which a data set's batches are counted without it."""
    return community_law(preset.nodes, preset.edges, preset.train_share, preset.law)


def generate_like(
    folder: Path, name: str, *, scale: float, seed: int = 0, overwrite: bool = False
) -> Graph:
    """Write a graph like a data set, with `scale` (0 to 1) times its nodes and its mean degree.

    Features are always float32; several labels per node become one class. An earlier dataset moves
    to `<folder>.previous` with `overwrite`.

    Raises:
        SettingsError: there is no such data set, or the scale leaves too few nodes for its degree.
        DatasetError: the folder cannot be written.
    """
    like = graph_preset(name)
    if not 0 < scale <= 1:
        raise SettingsError(f"--scale: expected a share above 0 and at most 1, found {scale:g}")
    nodes = round(like.nodes * scale)
    least = max(LEAST_NODES, like.classes, round(2 * like.mean_degree) + 2)
    if nodes < least:
        raise SettingsError(
            f"--scale: expected at least {least / like.nodes:.2g} for {name} ({least} nodes, for "
            f"its mean degree of {like.mean_degree:.0f}), found {scale:g}"
        )
    if like.task == "link":
        held = (1 - like.train_share) / 2
        return generate_links(
            folder,
            num_nodes=nodes,
            degree=like.mean_degree,
            feature_dim=like.feature_dim,
            num_communities=like.classes,
            seed=seed,
            overwrite=overwrite,
            train_fraction=like.train_share,
            val_fraction=held,
            test_fraction=held,
        )
    held = min(HELD_OUT, (1 - like.train_share) / 2)
    return generate_communities(
        folder,
        like.law,
        num_nodes=nodes,
        degree=like.mean_degree,
        feature_dim=like.feature_dim,
        num_classes=like.classes,
        seed=seed,
        overwrite=overwrite,
        train_fraction=like.train_share,
        val_fraction=held,
        test_fraction=held,
    )


SIZES_ERROR = 0.15
"""Relative standard error of the input nodes of such a graph's batches (DEC-162)."""
MOST_READ = 1 << 22
"""Most nodes of a dataset whose degrees are read."""
DEFAULT_TRAIN, DEFAULT_CLASSES = 0.1, 50
Batch = tuple[BatchProfile, HeatGroups]
"""A rank's batches, and the heat of all nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGraph:
    """Sizes of a graph, and the law of its degrees."""

    graph: GraphRef
    law: GraphLaw | CommunityLaw | TypedGraph
    """Law of the graph's own degrees, or of its sizes; sizes by type where it has several."""
    words: str
    error: float
    """Relative standard error of batches predicted by the law; 0: the law's own error."""
    every_hop: bool = False
    """Whether a hop expands every node again, not only new ones."""
    memo: dict[tuple[int, ...], Batch] = field(default_factory=dict[tuple[int, ...], Batch])
    """Batches by the seeds of a rank and the fan-outs."""

    @property
    def typed(self) -> TypedGraph | None:
        """Return the types of nodes and edges; None where there is one of each."""
        return self.law if isinstance(self.law, TypedGraph) else None

    @property
    def sampler(self) -> str:
        """Return the sampler by whose rates batches are drawn."""
        return DEFAULT_SAMPLER if self.typed is None else BY_TYPE

    def batch(self, seeds: int, work: Workload) -> Batch:
        """Return the batches of a rank, and the heat of the graph's nodes."""
        key = (seeds, *work.fanouts)
        if key not in self.memo:
            self.memo[key] = self._counted(seeds, work)
        return self.memo[key]

    def _counted(self, seeds: int, work: Workload) -> Batch:
        drawn, law = min(seeds, self.graph.num_train), self.law
        if isinstance(law, TypedGraph):
            found = typed_batch(law, drawn, work.fanouts, every_hop=self.every_hop)
            return found.profile(seeds, self.error), found.heat
        dialect = "every_hop" if self.every_hop else "first_seen"
        settings = PlanSettings(workload=work, dialect=dialect)
        if isinstance(law, CommunityLaw):
            batch, hotness = law_batch(law, settings, drawn)
            nodes = np.full(hotness.num_vertices, law.nodes / hotness.num_vertices)
            # Of which nodes lists are long is not told: as of those that lists name often.
            hot = hotness.features.astype(np.float64)
            lengths = hot * (law.edges / law.nodes / max(float(hot.mean()), 1e-300))
        else:
            first = expected_seeds(
                law, settings, seeds, num_train=self.graph.num_train, links=False
            )
            batch, hotness = expected_batch(law, settings, seeds, first)
            nodes, lengths = law.classes.nodes, law.classes.degree
        error = max(self.error, batch.input_standard_error)
        batch = replace(batch, seeds_per_rank=seeds, input_standard_error=error)
        chance, reads = (x.astype(np.float64) for x in (hotness.features, hotness.topology))
        return batch, HeatGroups.of(nodes, chance, reads, lengths, MOST_GROUPS)


def know_graph(
    settings: EstimateSettings, dataset: Path | None = None, types: Path | None = None
) -> KnownGraph:
    """Return the sizes of the graph that is asked for; given ones go before a known graph's.

    Raises:
        SettingsError: a size is missing, cannot be, or there is no such data set.
        DatasetError: the folder is no dataset, or the file of types is damaged.
    """
    given = {
        "nodes": settings.nodes, "edges": settings.edges, "features": settings.features,
        "dtype": None if settings.dtype == "auto" else settings.dtype, "train": settings.train,
        "classes": settings.classes,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    every_hop = settings.dialect == "every_hop"
    if types is not None:
        typed = read_types(types)
        return KnownGraph(
            graph=_typed_graph(typed, given),
            law=typed,
            words="sizes by type as given",
            error=SIZES_ERROR,
            every_hop=every_hop,
        )
    known, words = _known_sizes(settings, dataset)
    graph = _graph_of(known | given, settings.like or (dataset.name if dataset else "graph"))
    if changed := [f"--{name}" for name in given if name in known]:
        words = f"{words} but for {', '.join(changed)}"
    counts = {"nodes", "edges", "train"} & set(given)
    if counts - {"train"} and graph.num_edges > graph.num_nodes**2:
        raise SettingsError(
            f"--edges: expected at most {graph.num_nodes**2:,} edges between {graph.num_nodes:,} "
            f"nodes, found {graph.num_edges:,}; give --nodes and --edges of one graph"
        )
    if dataset is not None and graph.num_nodes <= MOST_READ and not counts:
        law, words, error = _law_of(dataset), f"{words}, its degrees read", 0.0
    else:
        clustering = TYPICAL if settings.like is None else graph_preset(settings.like).law
        law, error = _law_like(graph, clustering), SIZES_ERROR if counts else 0.0
        if clustering == TYPICAL:
            words, error = f"{words}, clustered as usual", SIZES_ERROR
    return KnownGraph(graph=graph, law=law, words=words, error=error, every_hop=every_hop)


ROUNDED = 0.01
"""Relative difference up to which a given count is a rounded one of the types."""


def _typed_graph(typed: TypedGraph, given: dict[str, Any]) -> GraphRef:
    """Return a graph of the types' sizes, of which nodes of the seeds' type are trained on.

    Raises:
        SettingsError: what is given beside the types contradicts them.
    """
    nodes, edges = sum(typed.nodes.values()), sum(count for _, _, count in typed.edges)
    seeds = typed.nodes[typed.seeds]
    for name, count in (("nodes", nodes), ("edges", edges)):
        if abs(given.get(name, count) - count) > ROUNDED * count:
            raise SettingsError(
                f"--{name}: expected {count:,}, the sum over --types, found {given[name]:,.0f}; "
                "leave it out"
            )
    if given.get("train", 0.0) * nodes > (1 + ROUNDED) * seeds:
        raise SettingsError(
            f"--train: expected at most {seeds / nodes:.4g} of all nodes, which are the {seeds:,} "
            f"of type {typed.seeds}, found {given['train']:g}; give a smaller share"
        )
    share = min(given.get("train", DEFAULT_TRAIN * seeds / nodes), seeds / nodes)
    return _graph_of(given | {"nodes": nodes, "edges": edges, "train": share}, "graph")


def _graph_of(sizes: dict[str, Any], name: str) -> GraphRef:
    missing = [f"--{each}" for each in ("nodes", "edges", "features") if each not in sizes]
    if missing:
        raise SettingsError(
            "estimate: expected --nodes, --edges and --features, --like NAME or a dataset, found "
            f"no {' and '.join(missing)}"
        )
    nodes = round(sizes["nodes"])
    return GraphRef(
        name=name,
        path="",
        fingerprint="",
        num_nodes=nodes,
        num_edges=round(sizes["edges"]),
        feature_dim=sizes["features"],
        feature_dtype=sizes.get("dtype", "float32"),
        num_classes=sizes.get("classes", DEFAULT_CLASSES),
        task="multiclass",
        num_train=max(1, round(sizes.get("train", DEFAULT_TRAIN) * nodes)),
    )


def _law_like(graph: GraphRef, clustering: Clustering = TYPICAL) -> CommunityLaw:
    """Return the law of a graph of which sizes are known, and perhaps its clustering."""
    share = graph.num_train / graph.num_nodes
    return community_law(graph.num_nodes, graph.num_edges, share, clustering)


def _known_sizes(settings: EstimateSettings, dataset: Path | None) -> tuple[dict[str, Any], str]:
    """Return sizes by the names of settings, and where they are from."""
    if settings.like is not None:
        like = graph_preset(settings.like)
        if like.task == "link":
            raise _wrong_kind(f"--like {settings.like}", LINKS)
        return {
            "nodes": like.nodes, "edges": like.edges, "features": like.feature_dim,
            "dtype": like.feature_dtype, "train": like.train_share, "classes": like.classes,
        }, f"sizes like {settings.like.lower()}"  # fmt: skip
    if dataset is None:
        return {}, "sizes as given"
    meta = read_meta(dataset)
    _refuse_kinds(dataset, meta)
    found: dict[str, Any] = {
        "nodes": meta.num_nodes, "edges": meta.num_edges, "dtype": meta.feature_dtype,
        "train": map_array(dataset / "train_idx.npy").shape[0] / meta.num_nodes,
    }  # fmt: skip
    found |= {"features": meta.feature_dim} if meta.feature_dim else {}
    return found | (
        {"classes": meta.num_classes} if meta.num_classes else {}
    ), f"sizes of {dataset}"


LINKS = "links to predict"


def _refuse_kinds(dataset: Path, meta: GraphMeta) -> None:
    """Refuse graphs whose batches the law of one type of edges does not describe."""
    kind = LINKS if meta.task == "link" else ""
    kind = "several edge types" if len(meta.edge_types) > 1 else kind
    if kind:
        raise _wrong_kind(dataset, kind)


def _wrong_kind(graph: object, kind: str) -> SettingsError:
    """Return the error for a graph whose batches no law of sizes describes."""
    return SettingsError(
        f"{graph}: expected a graph of one edge type with nodes to predict, found {kind}; "
        "`gnnplan plan` takes such a dataset"
    )


def _law_of(dataset: Path) -> GraphLaw:
    graph = open_graph(dataset, validate=False)
    law = read_law(graph.indptr, graph.train_idx.reshape(-1))
    return replace(law, class_of=np.arange(law.classes.nodes.size, dtype=np.uint16))
