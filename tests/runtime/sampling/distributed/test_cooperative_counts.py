"""Cooperative batches: the counts of formulas 5.6 and 5.7, by hand and on sampled batches."""

import itertools
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cost.stages.exchange_gpu import remote_share
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import build_sampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler, check_cooperates
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.stages import Stage
from tests.runtime.sampling.distributed.test_cooperative import Topology, cooperate, random_graph
from tests.support.inprocess import run_in_process


def test_c20_the_remote_fraction_leaves_out_the_own_vertices() -> None:
    # [C20]: P = 4, 1000 own of 6000 touched: .625, not .75.
    assert remote_share(1000, 6000, 4) == 0.625
    assert remote_share(1000, 6000, 1) == 0
    assert remote_share(0, 0, 4) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_c20_counted_remote_fractions_are_those_of_the_formula(size: int) -> None:
    # A graph so much larger than the batch that hardly a vertex drawn was expanded before.
    nodes, degree = 200_000, 8
    rng = np.random.default_rng(0)
    indices = rng.integers(0, nodes, nodes * degree).astype(np.int32)
    graph = (np.arange(0, nodes * degree + 1, degree), indices)
    owners = Owners(size, num_nodes=nodes)
    batches = [rng.permutation(nodes)[:100].astype(np.int64) for _ in range(10)]
    ranks = cooperate(graph, Sampler(dialect="every_hop"), [5, 5], owners, batches)
    counted, expected = [], []
    for layer in (1, 0):
        parts = [batch for batches in ranks for batch in batches]
        touched = sum(part.exchanges[layer].num_touched for part in parts)
        expanded = sum(part.blocks[layer].num_dst for part in parts)
        counted.append(sum(part.exchanges[layer].num_remote for part in parts) / touched)
        expected.append(remote_share(expanded, touched, size))
    # First hop: 5000 vertices drawn, each remote by a coin of its own; three standard errors.
    assert abs(counted[0] - expected[0]) < 3 * np.sqrt(0.25 / 5000)
    # Second hop: the seeds draw again among the same neighbours, and what they meet again is new
    # only to those who do not own it. So the formula is a lower bound.
    assert expected[1] < counted[1] < expected[1] + 0.03


def test_c20_is_too_low_where_batches_meet_their_own_vertices_again(small_graph: Graph) -> None:
    graph = (np.array(small_graph.indptr), np.array(small_graph.indices))
    owners = Owners(4, num_nodes=3000)
    ranks = cooperate(
        graph, Sampler(dialect="every_hop"), [5, 5], owners, [small_graph.train_idx[:200]]
    )
    exchanges = [batches[0].exchanges[0] for batches in ranks]
    expanded = sum(batches[0].blocks[0].num_dst for batches in ranks)
    touched = sum(exchange.num_touched for exchange in exchanges)
    counted = sum(exchange.num_remote for exchange in exchanges) / touched
    assert counted > remote_share(expanded, touched, 4) + 0.03


def test_ids_sent_are_eight_bytes_for_each_remote_vertex_and_a_count_for_each_rank() -> None:
    graph = random_graph(4, 200, 6.0)
    owners = Owners(3, num_nodes=200)

    def rank(comm: Any) -> tuple[int, int]:
        sampler = CooperativeSampler(
            Sampler(dialect="every_hop"), *graph, [4, 4], 0, owners=owners, comm=comm
        )
        seeds = np.arange(50)
        batch = sampler.sample(seeds[owners.of(seeds) == comm.rank], epoch=0, step=0)
        remote = sum(exchange.num_remote for exchange in batch.exchanges)
        return remote, comm.traffic[Stage.EXCHANGE_IDS].sent_bytes

    for remote, sent_bytes in run_in_process(3, rank):
        assert sent_bytes == 8 * remote + 2 * 8 * 2  # two hops, a count for two other ranks


# The graph of [R7] and [R8].
TOY = {0: [1, 2, 3], 1: [0, 2], 2: [0, 1, 4, 5], 3: [0, 6], 4: [2], 5: [2, 6], 6: [3, 5]}


def toy() -> Topology:
    lengths = [len(TOY[v]) for v in range(7)]
    indices = np.concatenate([TOY[v] for v in range(7)]).astype(np.int32)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), indices


def test_r8_two_ranks_load_five_vertices_together_and_six_apart() -> None:
    graph = toy()
    parts = np.array([0, 0, 0, 0, 1, 1, 1], np.int32)
    owners = Owners(2, parts, num_nodes=7)
    full = Sampler(name="full", dialect="every_hop")
    ranks = cooperate(graph, full, [-1], owners, [np.array([0, 4])])
    assert sum(batches[0].exchanges[0].num_own for batches in ranks) == 5
    one = build_sampler(full, *graph, [-1], 0)
    alone = [len(one.sample(np.array([seed]), epoch=0, step=0).n_id) for seed in (0, 4)]
    assert sum(alone) == 6


@pytest.mark.parametrize("seed", range(20))
def test_r7_work_per_seed_never_grows_with_the_batch(seed: int) -> None:
    """All batches of each size, two hops of LABOR-0 with one r: concave, f(B)/B falls (5.7)."""
    sampler = build_sampler(Sampler(name="labor", dialect="every_hop"), *toy(), [1, 1], seed)
    f = [0.0]
    for size in range(1, 8):
        counts = [
            len(sampler.sample(np.array(seeds), epoch=0, step=0).n_id)
            for seeds in itertools.combinations(range(7), size)
        ]
        f.append(float(np.mean(counts)))
    assert (np.diff(f, n=2) <= 1e-12).all()
    assert (np.diff([f[b] / b for b in range(1, 8)]) <= 1e-12).all()


def test_c19_labor_1_on_two_ranks_without_a_reduction_would_draw_more() -> None:
    """[R1]: LABOR-1 expects 1.375 new vertices, two ranks by themselves 1.5: so it is refused."""
    for variant in (1.0, "star"):
        with pytest.raises(SamplerError, match="maximum over all rows"):
            check_cooperates(Sampler(name="labor", parameters={"variant": variant}))
    check_cooperates(Sampler(name="labor", parameters={"variant": 0.0}))
