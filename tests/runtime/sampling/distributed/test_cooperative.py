"""Cooperative batches: any number of ranks draws the subgraph of one process, each its own part."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError, SamplerError
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import build_sampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler, check_cooperates
from gnnplan.runtime.sampling.distributed.owner import Owners, deal
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from tests.support.inprocess import run_in_process

Topology = tuple[NDArray[np.int64], NDArray[np.int32]]


def random_graph(seed: int, num_nodes: int, degree: float) -> Topology:
    """Skewed in-degrees, some of them zero; sorted neighbours without repetition, some loops."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_nodes):
        count = min(int(rng.exponential(degree)), num_nodes)
        rows.append(np.sort(rng.choice(num_nodes, count, replace=False)))
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return indptr, np.concatenate(rows).astype(np.int32)


def owners_of(kind: str, size: int, num_nodes: int) -> Owners:
    if kind == "hash":
        return Owners(size, num_nodes=num_nodes)
    # Uneven on purpose: with four ranks the last one owns nothing.
    parts = np.random.default_rng(1).integers(0, size, num_nodes) // (2 if size == 4 else 1)
    return Owners(size, parts.astype(np.int32), num_nodes=num_nodes)


def cooperate(
    graph: Topology, sampler: Sampler, fanouts: list[int], owners: Owners,
    batches: list[NDArray[np.int64]], **settings: Any,
) -> list[list[MiniBatch]]:  # fmt: skip
    """The batches of every rank, on threads; batch i is step i of epoch 2."""

    def rank(comm: Any) -> list[MiniBatch]:
        mine = CooperativeSampler(
            sampler, *graph, fanouts, 5, owners=owners, comm=comm, edge_ids=True, **settings
        )
        return [
            mine.sample(seeds[owners.of(seeds) == comm.rank], epoch=2, step=step)
            for step, seeds in enumerate(batches)
        ]

    return run_in_process(owners.num_ranks, rank)


def edges_of(parts: list[MiniBatch], layer: int, graph: Topology) -> NDArray[np.float64]:
    """(destination, edge, weight) of a layer's block over all ranks, sorted; ids checked."""
    found = []
    for part in parts:
        block = part.blocks[layer]
        ids = part.exchanges[layer].ids if part.exchanges else part.n_id
        assert block.e_id is not None
        assert ids[: block.num_src].shape[0] == block.num_src
        rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
        np.testing.assert_array_equal(ids[block.indices], graph[1][block.e_id])
        assert (graph[0][ids[rows]] <= block.e_id).all()
        assert (block.e_id < graph[0][ids[rows] + 1]).all()
        weight = np.zeros(len(rows)) if block.weight is None else block.weight
        found.append(np.stack([ids[rows], block.e_id, weight], axis=1))
    edges = np.concatenate(found)
    return edges[np.lexsort(edges.T)]


def assert_same_subgraph(parts: list[MiniBatch], whole: MiniBatch, graph: Topology) -> None:
    """Equal frontiers S^l, each vertex at one rank, and equal edges with equal weights."""
    for layer, block in enumerate(whole.blocks):
        np.testing.assert_array_equal(
            edges_of(parts, layer, graph), edges_of([whole], layer, graph)
        )
        own = [part.exchanges[layer].ids[: part.exchanges[layer].num_own] for part in parts]
        assert sorted(np.concatenate(own)) == sorted(whole.n_id[: block.num_src])
        dst = [part.exchanges[layer].ids[: part.blocks[layer].num_dst] for part in parts]
        assert sorted(np.concatenate(dst)) == sorted(whole.n_id[: block.num_dst])
    drawn = np.sum([part.num_sampled_edges for part in parts], axis=0)
    assert drawn.tolist() == whole.num_sampled_edges
    nodes = np.sum([part.num_sampled_nodes for part in parts], axis=0)
    assert nodes.tolist() == whole.num_sampled_nodes


def weighted(graph: Topology) -> NDArray[np.float32]:
    return np.random.default_rng(3).random(len(graph[1])).astype(np.float32)


SAMPLERS: list[tuple[str, dict[str, Any]]] = [
    ("neighbor", {}),
    ("neighbor", {"draws": "replacement"}),
    ("neighbor", {"draws": "poisson", "weights": "graph", "estimator": "horvitz-thompson"}),
    ("full", {}),
    ("labor", {}),
    ("labor", {"form": "exact_k", "estimator": "plain"}),
    ("labor", {"kappa": 4.0, "estimator": "horvitz-thompson"}),
    ("labor", {"kappa": 3.0, "layer_dependent": 1.0}),
    ("labor", {"weights": "graph"}),
]


@pytest.mark.parametrize("owner", ["hash", "partition"])
@pytest.mark.parametrize("dialect", ["every_hop", "first_seen"])
@pytest.mark.parametrize(("name", "parameters"), SAMPLERS)
def test_any_number_of_ranks_draws_the_subgraph_of_one_process(
    name: str,
    parameters: dict[str, Any],
    dialect: Literal["every_hop", "first_seen"],
    owner: str,
) -> None:
    sampler = Sampler(name=name, dialect=dialect, parameters=parameters)
    for trial, size in enumerate([1, 2, 4, 3]):
        graph = random_graph(trial, 80, 6.0)
        weight = weighted(graph) if parameters.get("weights") == "graph" else None
        rng = np.random.default_rng(trial)
        # Several steps, so that a dependent sequence passes the end of a segment; some are tiny.
        batches = [rng.permutation(80)[:count].astype(np.int64) for count in (9, 1, 20, 0, 7, 80)]
        owners = owners_of(owner, size, 80)
        fanouts = [3, 2, 4]
        ranks = cooperate(graph, sampler, fanouts, owners, batches, edge_weight=weight)
        one = build_sampler(
            sampler, *graph, fanouts, 5, edge_ids=True, edge_weight=weight
        )  # fmt: skip
        for step, seeds in enumerate(batches):
            whole = one.sample(seeds, epoch=2, step=step)
            assert_same_subgraph([batches[step] for batches in ranks], whole, graph)


def test_what_a_rank_holds_of_others_is_what_it_drew_itself_and_all_it_receives_is_its_own() -> (
    None
):
    graph = random_graph(7, 300, 8.0)
    owners = Owners(3, num_nodes=300)
    received: dict[int, list[NDArray[np.int64]]] = {0: [], 1: [], 2: []}

    def rank(comm: Any) -> MiniBatch:
        plain = comm.all_to_all_ids

        def listening(ids: torch.Tensor, counts: list[int]) -> Any:
            got = plain(ids, counts)
            received[comm.rank].append(got[0].numpy())
            return got

        comm.all_to_all_ids = listening
        sampler = CooperativeSampler(
            Sampler(dialect="every_hop"), *graph, [4, 4], 0, owners=owners, comm=comm
        )
        seeds = np.arange(60)
        return sampler.sample(seeds[owners.of(seeds) == comm.rank], epoch=0, step=0)

    for number, batch in enumerate(run_in_process(3, rank)):
        assert len(received[number]) == 2
        ids = np.concatenate(received[number])
        assert len(ids) > 20
        assert (owners.of(ids) == number).all()
        for block, exchange in zip(batch.blocks, batch.exchanges, strict=True):
            remote = np.arange(exchange.num_own, block.num_src)
            assert set(remote) <= set(block.indices.tolist())
            assert (owners.of(exchange.ids[exchange.num_own :]) != number).all()
            assert (owners.of(exchange.ids[: exchange.num_own]) == number).all()


def test_a_rank_reads_the_adjacency_of_its_own_vertices_alone() -> None:
    graph = random_graph(2, 200, 6.0)
    owners = Owners(2, num_nodes=200)
    seeds = np.arange(0, 200, 5)

    def rank(comm: Any) -> MiniBatch:
        indptr, indices = graph[0], graph[1].copy()
        rows = np.repeat(np.arange(200), np.diff(indptr))
        indices[owners.of(rows) != comm.rank] = 199  # what others own reads as nonsense here
        sampler = CooperativeSampler(
            Sampler(name="labor", dialect="every_hop"), indptr, indices, [3, 3], 5, owners=owners,
            comm=comm, edge_ids=True,
        )  # fmt: skip
        return sampler.sample(seeds[owners.of(seeds) == comm.rank], epoch=0, step=0)

    one = build_sampler(
        Sampler(name="labor", dialect="every_hop"), *graph, [3, 3], 5, edge_ids=True
    )
    assert_same_subgraph(run_in_process(2, rank), one.sample(seeds, epoch=0, step=0), graph)


def test_rows_take_the_way_of_the_ids_back() -> None:
    """Sending own rows by the exchange puts, behind the own ones, those of `ids` in order."""
    graph = random_graph(9, 150, 5.0)
    owners = Owners(4, num_nodes=150)
    for dialect in ("every_hop", "first_seen"):
        batches = [np.arange(40), np.zeros(0, np.int64), np.array([149])]
        steps = cooperate(graph, Sampler(dialect=dialect), [3, 3], owners, batches)

        def rank(comm: Any, steps: Any = steps) -> None:
            for batch in steps[comm.rank]:
                for exchange in batch.exchanges:
                    own = torch.from_numpy(exchange.ids[: exchange.num_own])
                    sent = own[torch.from_numpy(exchange.send_rows)]
                    got = comm.all_to_all_rows(
                        sent.reshape(-1, 1), exchange.send_counts, exchange.receive_counts
                    )
                    assert got[:, 0].tolist() == exchange.ids[exchange.num_own :].tolist()

        run_in_process(4, rank)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ladies", "sums over the whole batch"),
        ("pladies", "sums over the whole batch"),
        ("fastgcn", "sums over the whole batch"),
        ("las", "prefers what a rank holds"),
    ],
)
def test_samplers_that_need_the_whole_batch_are_refused_in_one_line(name: str, why: str) -> None:
    with pytest.raises(SamplerError, match=why) as caught:
        check_cooperates(Sampler(name=name, dialect="every_hop"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kappa", [1.0, 4.0, float("inf")])
def test_kappa_gives_the_same_sequence_on_any_number_of_ranks(kappa: float) -> None:
    graph = random_graph(11, 120, 7.0)
    rng = np.random.default_rng(0)
    batches = [rng.permutation(120)[:12].astype(np.int64) for _ in range(10)]
    sampler = Sampler(
        name="labor", dialect="every_hop", parameters={"kappa": str(kappa) if kappa > 9 else kappa}
    )
    settings = {"steps_per_epoch": 4}
    sequences = []
    for size in (1, 2, 4):
        owners = Owners(size, num_nodes=120)
        ranks = cooperate(graph, sampler, [2, 2], owners, batches, **settings)
        sequences.append(
            [
                sorted(np.concatenate([r[step].exchanges[0].ids[: r[step].exchanges[0].num_own]
                                       for r in ranks]))
                for step in range(len(batches))
            ]
        )  # fmt: skip
    assert sequences[0] == sequences[1] == sequences[2]


def test_owners_by_hash_are_fair_and_do_not_depend_on_the_run() -> None:
    ids = np.arange(40_000)
    for size in (2, 3, 8):
        counts = np.bincount(Owners(size, num_nodes=40_000).of(ids), minlength=size)
        # Binomial: six standard deviations of the mean share.
        assert abs(counts - 40_000 / size).max() < 6 * np.sqrt(40_000 / size)
    assert Owners(4, num_nodes=8).of(np.arange(8)).tolist() == [
        int(o) for o in Owners(4, num_nodes=8).of(np.arange(8))
    ]


def test_dealing_groups_by_owner_and_keeps_the_order() -> None:
    counts, order = deal(np.array([2, 0, 2, 0, 1], np.int32), 4)
    assert counts == [2, 1, 2, 0]
    assert order.tolist() == [1, 3, 4, 0, 2]
    assert deal(np.zeros(0, np.int32), 2)[0] == [0, 0]


def test_bad_partitions_seeds_and_disagreeing_ranks_are_named() -> None:
    with pytest.raises(PlanError, match="expected one rank per node"):
        Owners(2, np.zeros(3, np.int32), num_nodes=4)
    with pytest.raises(PlanError, match="expected ranks between 0 and 1, found 0 to 2"):
        Owners(2, np.array([0, 2], np.int32), num_nodes=2)
    graph = random_graph(1, 50, 4.0)
    owners = Owners(2, num_nodes=50)

    def foreign(comm: Any) -> None:
        sampler = CooperativeSampler(Sampler(), *graph, [2], 0, owners=owners, comm=comm)
        sampler.sample(np.arange(50), epoch=0, step=0)

    with pytest.raises(SamplerError, match="of another rank"):
        run_in_process(2, foreign)

    own = int(np.flatnonzero(owners.of(np.arange(50)) == 0)[0])
    for seeds, why in [([own, 50], "between 0 and 49, found 50"), ([own, own], "twice")]:

        def bad(comm: Any, seeds: list[int] = seeds) -> None:
            sampler = CooperativeSampler(Sampler(), *graph, [2], 0, owners=owners, comm=comm)
            if comm.rank == 0:
                sampler.sample(np.array(seeds), epoch=0, step=0)

        with pytest.raises(SamplerError, match=why):
            run_in_process(2, bad)

    def disagree(comm: Any) -> None:
        parts = np.full(50, comm.rank, np.int32)  # each rank believes that all is its own ...
        parts[1::2] = 1 - comm.rank  # ... but every second vertex
        sampler = CooperativeSampler(
            Sampler(name="full"), *graph, [-1], 0, owners=Owners(2, parts, num_nodes=50), comm=comm
        )
        sampler.sample(np.flatnonzero(parts == comm.rank), epoch=0, step=0)

    with pytest.raises(PlanError, match="different partitions"):
        run_in_process(2, disagree)


def test_a_batch_of_one_rank_is_the_plain_batch() -> None:
    graph = random_graph(3, 90, 5.0)
    seeds = np.arange(10)
    for dialect in Dialect:
        sampler = replace(Sampler(), dialect=dialect.value)
        (batch,) = cooperate(graph, sampler, [3, 3], Owners(1, num_nodes=90), [seeds])
        plain = build_sampler(sampler, *graph, [3, 3], 5).sample(seeds, epoch=2, step=0)
        np.testing.assert_array_equal(batch[0].n_id, plain.n_id)
        for found, expected in zip(batch[0].blocks, plain.blocks, strict=True):
            np.testing.assert_array_equal(found.indptr, expected.indptr)
            np.testing.assert_array_equal(found.indices, expected.indices)
