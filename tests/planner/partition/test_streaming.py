"""Tests for planner/partition/streaming.py and balance.py."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.balance import repair_balance
from gnnplan.planner.partition.partition import partition
from gnnplan.planner.partition.problem import Balance, PartitionProblem, make_problem
from gnnplan.planner.partition.streaming import fennel_parts, ldg_parts, pagraph_parts
from tests.planner.partition.graphs import csc, random_csc, ring_of_cliques
from tests.reference.partition_quality import measure_quality


def pagraph_score(
    *, common: int, part_training: int, part_nodes: int, num_training: float, num_parts: int
) -> float:
    """PaGraph's score of giving a training vertex to a part, in its public form (formulas 1.7)."""
    return (1 + common) * (num_training / num_parts - part_training) / (part_nodes + 1)


@pytest.mark.parametrize("name", ["ldg", "fennel"])
@pytest.mark.parametrize("edges", [None, 0.1])
def test_streams_keep_to_every_limit(name: str, edges: float | None):
    indptr, indices = random_csc(500, 4000, 3)
    training = np.arange(0, 500, 4)
    balance = Balance(nodes=0.05, training=0.05, edges=edges)
    problem = make_problem(indptr, indices, parts=5, training=training, balance=balance)
    found = partition(indptr, indices, parts=5, name=name, training=training, balance=balance)
    quality = measure_quality(indptr, indices, found, num_parts=5, training=problem.training)
    assert (quality.nodes <= problem.limits[0]).all()
    assert (quality.training <= problem.limits[1]).all()
    assert (quality.edges <= problem.limits[2]).all()


@pytest.mark.parametrize("name", ["ldg", "fennel"])
def test_streams_cut_less_than_random_on_a_real_graph(name: str, data_folder: Path):
    with np.load(data_folder / "amazon-photo.npz") as pack:
        indptr, indices = pack["indptr"], pack["indices"]
    found, chance = (
        measure_quality(
            indptr, indices, partition(indptr, indices, parts=4, name=n), num_parts=4
        ).cut_share
        for n in (name, "random")
    )
    assert found < 0.5 * chance


def test_a_mapped_graph_gives_the_parts_of_one_in_memory(tmp_path: Path):
    indptr, indices = random_csc(300, 2000, 4)
    np.save(tmp_path / "indices.npy", indices)
    mapped = np.load(tmp_path / "indices.npy", mmap_mode="r")
    expected = partition(indptr, indices, parts=3, name="ldg")
    assert (partition(indptr, mapped, parts=3, name="ldg") == expected).all()


def test_first_pass_of_ldg_by_hand(monkeypatch: pytest.MonkeyPatch):
    """Limits 2 and 2: 0 -> part 0; 1 follows it; 2 reads 1, but part 0 is full; 3 follows 2."""
    monkeypatch.setattr("gnnplan.planner.partition.streaming.PASSES", 1)
    indptr, indices = csc(4, [(0, 1), (1, 2), (2, 3)])
    problem = make_problem(indptr, indices, parts=2, balance=Balance(nodes=0.01))
    assert ldg_parts(problem).tolist() == [0, 0, 1, 1]


def ldg_score(problem: PartitionProblem, near: int, filled: float) -> float:
    """Stanton and Kliot: neighbours in the part, by the share of its capacity that is free."""
    return near * (1 - filled)


def fennel_score(problem: PartitionProblem, near: int, filled: float) -> float:
    """Tsourakakis et al., exponent 1.5: less the derivative of a * sum of loads^1.5."""
    n, p, m = problem.num_nodes, problem.num_parts, problem.num_edges / 2  # both ends store it
    alpha = np.sqrt(p) * m / n**1.5
    return near - alpha * 1.5 * np.sqrt(filled * n / p)


def streamed(problem: PartitionProblem, score: Callable[..., float], slack: float) -> list[int]:
    """Node by node, with every load counted anew, for three rounds.

    Loads are the parts' largest over their share, `slack` times as large for LDG's capacity.
    """
    n, size, parts = problem.num_nodes, problem.num_parts, [-1] * problem.num_nodes
    amounts = np.stack([np.ones(n), problem.training, np.diff(problem.indptr)])
    balanced = [c for c in range(3) if np.isfinite(problem.limits[c, 0]) and amounts[c].sum() > 0]
    # Scores that tie are told apart by their last bit, so loads are multiplied here too.
    with np.errstate(divide="ignore"):
        per_load = 1 / (amounts.sum(axis=1)[:, None] * problem.shares) / slack
    for v in list(range(n)) * 3:
        near = [parts[u] for u in problem.indices[problem.indptr[v] : problem.indptr[v + 1]]]
        parts[v] = -1
        held = np.array([amounts[:, np.equal(parts, p)].sum(axis=1) for p in range(size)]).T
        filled = [max(held[c, p] * per_load[c, p] for c in balanced) for p in range(size)]
        counted = [c for c in balanced if amounts[c, v] > 0]
        room = [
            p
            for p in range(size)
            if all(held[c, p] + amounts[c, v] <= problem.limits[c, p] for c in counted)
        ]
        scores = {p: score(problem, near.count(p), filled[p]) for p in room} or {
            p: -filled[p] for p in range(size)
        }
        parts[v] = max(scores, key=lambda p: (scores[p], -filled[p], -p))
    return parts


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 3, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_streams_follow_the_published_rules_node_by_node(seed: int, weights: tuple[int, ...]):
    indptr, indices = random_csc(60, 200 + 100 * seed, seed)
    training = np.random.default_rng(seed).random(60) < 0.3
    for mask, balance in ((training, Balance(nodes=0.3, training=0.3, edges=0.3)),
                          (None, Balance(nodes=0.4))):  # fmt: skip
        problem = make_problem(
            indptr, indices, parts=len(weights), training=mask, weights=weights, balance=balance
        )
        assert balance.nodes is not None
        ldg = streamed(problem, ldg_score, 1 + balance.nodes)
        assert ldg_parts(problem).tolist() == ldg
        fennel = streamed(problem, fennel_score, 1.0)
        assert fennel_parts(problem).tolist() == fennel
        assert ldg != fennel


@pytest.mark.parametrize("seed", range(10))
def test_repair_brings_three_loads_within_their_limits(seed: int):
    indptr, indices = random_csc(400, 2000, seed)
    rng = np.random.default_rng(seed)
    training = rng.random(400) < 0.3
    problem = make_problem(
        indptr, indices, parts=4, training=training, balance=Balance(edges=0.1), seed=seed
    )
    start = np.minimum(rng.integers(0, 6, 400), 3).astype(np.int32)  # part 3 has half of all
    found = repair_balance(problem, start)
    quality = measure_quality(indptr, indices, found, num_parts=4, training=training)
    assert (quality.nodes <= problem.limits[0]).all()
    assert (quality.training <= problem.limits[1]).all()
    assert (quality.edges <= problem.limits[2]).all()


def test_repair_leaves_a_balanced_partition_alone():
    indptr, indices = ring_of_cliques(4, 6)
    problem = make_problem(indptr, indices, parts=4)
    start = np.repeat(np.arange(4, dtype=np.int32), 6)
    assert (repair_balance(problem, start) == start).all()


def test_pagraph_follows_its_score_step_by_step():
    """The published rule with sets, one training node after the other."""
    indptr, indices = random_csc(40, 120, 6)
    training = np.random.default_rng(6).random(40) < 0.4
    problem = make_problem(indptr, indices, parts=3, training=training)
    members: list[set[int]] = [set(), set(), set()]
    mine = [0, 0, 0]
    expected: dict[int, int] = {}
    for v in np.flatnonzero(training).tolist():
        near = set(indices[indptr[v] : indptr[v + 1]].tolist()) - {v}
        scores = [
            pagraph_score(
                common=len(near & members[p]),
                part_training=mine[p],
                part_nodes=len(members[p]),
                num_training=float(training.sum()),
                num_parts=3,
            )
            for p in range(3)
        ]
        best = max(range(3), key=lambda p: (scores[p], -mine[p], -p))
        members[best] |= near | {v}
        mine[best] += 1
        expected[v] = best
    found = pagraph_parts(problem)
    assert {v: int(found[v]) for v in expected} == expected


def test_pagraph_needs_training_nodes_and_at_most_64_parts():
    indptr, indices = csc(100, [(0, 1)])
    with pytest.raises(SettingsError, match="expected training nodes, found none"):
        partition(indptr, indices, parts=2, name="pagraph")
    with pytest.raises(SettingsError, match="at most 64 parts, found 65"):
        partition(indptr, indices, parts=65, name="pagraph", training=np.array([0]))
