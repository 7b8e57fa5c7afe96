"""Hold the sizes of published data sets, and generate seeded graphs like them at any scale.

A graph like a data set has its mean degree, feature columns, classes, share of training nodes (of
the nodes with an edge) and clustering: spread of degrees, communities, and the region where its
training nodes lie. Links are drawn from a block model.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.profile.community_law import TYPICAL, CommunityLaw, community_law
from gnnplan.runtime import codec
from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_communities, generate_links
from gnnplan.runtime.graph.generate_draws import Clustering

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
    import yaml  # on use: the command line starts without it

    plain = yaml.safe_load(FILE.read_text())
    return {name: codec.decode(GraphPreset, value) for name, value in plain.items()}


def graph_preset(name: str) -> GraphPreset:
    """Return a data set by name, in any case.

    Raises:
        SettingsError: there is none of that name.
    """
    known = graph_presets()
    if name.lower() not in known:
        raise SettingsError(
            f"expected a data set among {', '.join(known)}, found {name!r}"
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
