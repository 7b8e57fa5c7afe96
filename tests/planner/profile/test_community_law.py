"""The law of communities against batches drawn from graphs that are generated from it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.graph_presets import generate_like, graph_preset, graph_presets, preset_law
from gnnplan.planner.profile.community_law import (
    CommunityLaw,
    community_law,
    count_batch,
    law_batch,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_communities
from gnnplan.runtime.graph.generate_draws import Clustering
from tests.reference.law_caches import Policy, hit_rate, touched_share

NODES, DEGREE, TRAIN = 24_000, 14.0, 0.2
SHAPES = {
    "together": Clustering(spread=0.8, inside=0.9, community=600),
    "apart": Clustering(spread=1.1, inside=0.0, community=600, seed_lean=0.5),
    "uneven": Clustering(spread=0.8, inside=0.85, community=300, seed_spread=0.7),
    "recent": Clustering(
        spread=0.6,
        inside=0.6,
        community=500,
        both_ways=False,
        region=0.3,
        lists=0.7,
        named=1.2,
        rest_spread=1.0,
    ),
}


def entries(graph: Graph, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lists of some nodes, one after the other, and to which of them each entry belongs."""
    start, size = graph.indptr[nodes], np.diff(graph.indptr)[nodes]
    owner = np.repeat(np.arange(len(nodes)), size)
    place = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    return np.asarray(graph.indices)[start[owner] + place], owner


def draw(
    graph: Graph, seeds: np.ndarray, fanouts: Sequence[int], sampler: str, rng: np.random.Generator
) -> tuple[list[int], list[int], np.ndarray]:
    """Vertices up to each hop, edges of each hop, and the input set of one batch."""
    held, counts, edges = np.unique(seeds), [len(seeds)], list[int]()
    for fanout in fanouts:
        ends, owner = entries(graph, held)
        size = np.bincount(owner, minlength=len(held))[owner]
        if sampler == "labor":
            taken = rng.random(graph.num_nodes)[ends] < fanout / size
        else:
            order = np.lexsort((rng.random(len(ends)), owner))
            first = np.cumsum(np.bincount(owner, minlength=len(held))) - np.bincount(
                owner, minlength=len(held)
            )
            taken = np.zeros(len(ends), bool)
            taken[order] = np.arange(len(ends)) - first[owner[order]] < fanout
        edges.append(int(taken.sum()))
        held = np.union1d(held, ends[taken])
        counts.append(len(held))
    return counts, edges, held


def make(folder: Path, shape: Clustering) -> tuple[Graph, CommunityLaw]:
    graph = generate_communities(
        folder, shape, num_nodes=NODES, degree=DEGREE, feature_dim=1, train_fraction=TRAIN, seed=4
    )
    train = graph.num_train / graph.num_nodes
    return graph, community_law(NODES, graph.num_edges, train, shape)


@pytest.mark.parametrize("name", SHAPES)
def test_counts_are_those_of_batches_drawn_from_a_graph_of_the_law(name: str, tmp_path: Path):
    graph, law = make(tmp_path / "g", SHAPES[name])
    rng, fanouts, seeds = np.random.default_rng(1), (4, 3, 3), 60
    for sampler in ("neighbor", "labor"):
        found = [
            draw(graph, rng.choice(graph.train_idx, seeds, replace=False), fanouts, sampler, rng)
            for _ in range(30)
        ]
        counts = count_batch(law, seeds, fanouts, sampler)
        assert counts.vertices == pytest.approx(np.mean([f[0] for f in found], axis=0), rel=0.08)
        assert counts.edges == pytest.approx(np.mean([f[1] for f in found], axis=0), rel=0.08)


def caches(
    graph: Graph, seeds: int, fanouts: Sequence[int], share: float
) -> tuple[dict[str, float], float]:
    """Hit rates in the second of two drawn epochs, and the share of nodes that it touches."""
    rng, reads = np.random.default_rng(2), np.zeros((2, graph.num_nodes))
    for epoch in reads:
        order = rng.permutation(graph.train_idx)
        for start in range(0, len(order), seeds):
            epoch[draw(graph, order[start : start + seeds], fanouts, "neighbor", rng)[2]] += 1
    names = np.bincount(graph.indices, minlength=graph.num_nodes)
    keys = {"presample": reads[0], "degree": names, "optimal": reads[1]}
    rows, found = round(share * graph.num_nodes), dict[str, float]()
    for policy, key in keys.items():
        order = np.lexsort((rng.random(graph.num_nodes), -key))
        found[policy] = float(reads[1][order[:rows]].sum() / reads[1].sum())
    return found, float((reads[1] > 0).mean())


@pytest.mark.parametrize("name", SHAPES)
def test_hit_rates_and_touched_nodes_are_those_of_drawn_epochs(name: str, tmp_path: Path):
    graph, law = make(tmp_path / "g", SHAPES[name])
    found, touched = caches(graph, 100, (3, 3), 0.1)
    policies: tuple[Policy, ...] = ("presample", "degree", "optimal")
    assert set(found) == set(policies)
    for policy in policies:
        rate = found[policy]
        assert hit_rate(law, 100, (3, 3), "neighbor", policy=policy, share=0.1) == pytest.approx(
            rate, abs=0.05
        ), policy
    assert touched_share(law, 100, (3, 3), "neighbor") == pytest.approx(touched, rel=0.1)


def test_a_cache_on_a_graph_like_papers100m_hits_as_published(tmp_path: Path):
    # GNNLab, fig. 10: 10% of the rows, three hops; a degree cache is half as good as a presampled.
    graph = generate_like(tmp_path / "g", "papers100m", scale=0.0005, seed=1)
    found, _ = caches(graph, max(1, graph.num_train // 150), (15, 10, 5), 0.1)
    assert found["presample"] > 0.93
    assert found["degree"] == pytest.approx(0.4957, abs=0.08)
    assert found["optimal"] > 0.97


def inputs(law: Clustering, seeds: float, sampler: str) -> float:
    like = graph_preset("papers100m-both")
    known = community_law(like.nodes, like.edges, like.train_share, law)
    return count_batch(known, seeds, (10, 10, 10), sampler).vertices[-1]


def test_communities_bring_what_labor_gains():
    law = graph_preset("papers100m-both").law
    gains = [
        inputs(each, 1024, "neighbor") / inputs(each, 1024, "labor")
        for each in (replace(law, inside=0.0, region=1.0), replace(law, inside=0.9, region=1.0))
    ]
    assert gains[1] > 1.2 * gains[0] > 1.2


@pytest.mark.parametrize(
    ("sampler", "published"), [("neighbor", 21.3 / 26.5), ("labor", 14 / 18.4)]
)
def test_four_ranks_together_read_as_much_less_as_published(sampler: str, published: float):
    # formulas 5.8: feature milliseconds without a cache, together over alone, 4 x 1024 seeds.
    law = graph_preset("papers100m-both").law
    saved = 1 - inputs(law, 4096, sampler) / (4 * inputs(law, 1024, sampler))
    assert saved == pytest.approx(1 - published, abs=0.06)
    spread_out = replace(law, region=1.0)
    assert saved > 1.4 * (
        1 - inputs(spread_out, 4096, sampler) / (4 * inputs(spread_out, 1024, sampler))
    )


def test_ranks_that_share_a_batch_ask_for_no_more_than_all_and_no_less_than_their_part():
    law = preset_law(graph_preset("papers100m-both"))
    alone = count_batch(law, 4096, (10, 10), "neighbor")
    shared = count_batch(law, 4096, (10, 10), "neighbor", ranks_together=4)
    assert shared.vertices == alone.vertices
    for hop, asked in enumerate(shared.asked):
        assert alone.asked[hop] / 4 < asked < alone.asked[hop]


@pytest.mark.parametrize("name", ["papers100m", "products", "reddit", "ukl"])
def test_every_preset_has_a_profile_without_an_array_of_its_nodes(name: str):
    law, settings = preset_law(graph_preset(name)), PlanSettings()
    batch, hotness = law_batch(law, settings, 512)
    means = [each.mean for each in batch.vertices]
    assert means == sorted(means)
    assert hotness.first_half.size <= 1 << 16
    inputs = hotness.first_half.mean(dtype=float) * law.nodes
    assert inputs == pytest.approx(means[-1], rel=0.05)


def test_every_preset_says_where_its_law_is_from():
    for name, preset in graph_presets().items():
        assert len(preset.law_source) > 20, name
        assert 0 < preset.law.inside < 1
        assert preset.train_share <= preset.law.region or str(preset.task) == "link"
        # what names the region's nodes is its own lists at least, and all edges at most
        assert preset.law.lists <= preset.law.named <= 1 / preset.law.region


@pytest.mark.parametrize(
    ("name", "policy", "share", "published"),
    [
        # GNNLab, figures 4a, 11 and 12; none of these was fitted
        ("papers100m", "presample", 0.15, 0.985),
        ("papers100m", "presample", 0.21, 0.9852),
        ("papers100m", "degree", 0.15, 0.6396),
        ("papers100m", "degree", 0.3, 0.8841),
        ("uk-2006-05", "presample", 0.14, 0.6953),
        ("uk-2006-05", "degree", 0.14, 0.3595),
    ],
)
def test_published_hit_rates_are_within_three_points(
    name: str, policy: Policy, share: float, published: float
):
    law = preset_law(graph_preset(name))
    found = hit_rate(law, 8000, (15, 10, 5), "neighbor", policy=policy, share=share)
    assert found == pytest.approx(published, abs=0.03)


def test_a_published_count_of_three_hops_is_explained():
    # formulas 5.8, products: vertices of 1000 seeds in thousands.
    law = preset_law(graph_preset("products"))
    for sampler, published in (("neighbor", 513e3), ("labor", 237e3)):
        found = count_batch(law, 1000, (10, 10, 10), sampler).vertices[-1]
        assert found == pytest.approx(published, rel=0.1)
