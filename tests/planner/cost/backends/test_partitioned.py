"""What a grid is predicted to send while it samples, against what its ranks count themselves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.candidate import Candidate, RankRows, list_cores
from gnnplan.planner.cost.backends.grid import (
    Fetched,
    fetch_sizes,
    fetch_times,
    fetched_for,
    gpu_fetch_times,
    grid_parts,
    link_words,
    probability_seconds,
    replications,
    sent_bytes,
)
from gnnplan.planner.cost.request import seeds_per_rank
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.draw import drawer
from gnnplan.planner.profile.presample import stack_profile
from gnnplan.planner.workload import BatchProfile, StackProfile
from gnnplan.runtime.comm.mesh import open_grid
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import GraphRef, Sampler, Threads, Workload
from gnnplan.runtime.sampling.distributed.grid import GridSampler, empty_graph
from gnnplan.runtime.sampling.distributed.grid_rows import cut_shard
from gnnplan.runtime.sampling.minibatch import Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage
from tests.planner.cost.by_hand import at, request, times, work
from tests.support.candidates import candidate_of_ranks
from tests.support.inprocess import run_in_process
from tests.support.machines import machine
from tests.support.profiles import batch_profile, exactly

BATCH, FANOUTS = 100, [6, 4]


def counted(graph: Graph, ranks: int, copies: int, steps: int) -> list[float]:
    """Bytes that each rank sent for one stack of the first steps."""

    def rank(comm: Any) -> float:
        grid = open_grid(comm, copies)
        sampler = NeighborSampler(
            *empty_graph(graph.num_nodes, graph.indices.dtype), FANOUTS, seed=0
        )
        shard = cut_shard(graph.indptr, graph.indices, None, grid)
        schedule = SeedSchedule(graph.train_idx, BATCH, seed=0, num_ranks=ranks, rank=comm.rank)

        def request(step: int, who: int) -> Request:
            seeds, ids, total = schedule.share(0, step, rank=who)
            seeds = np.ascontiguousarray(seeds)
            return Request(seeds=seeds, epoch=0, step=step, input_id=ids, global_num_seeds=total)

        made = GridSampler(sampler, shard, grid)
        made.sample_many([[request(s, r) for r in grid.ranks_of_row()] for s in range(steps)])
        found = (grid.column_comm.traffic, grid.row_comm.traffic)
        return float(sum(t[Stage.SAMPLE].sent_bytes for t in found if Stage.SAMPLE in t))

    return run_in_process(ranks, rank)


def candidate(ranks: int, copies: int, bulk: int) -> Candidate:
    return candidate_of_ranks(
        num_ranks=ranks, threads=Threads(), prefetch_depth=2, policy="none", hosts=2,
        topology="partitioned", replication=copies, bulk=bulk,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "copies", "bulk"), [(2, 1, 1), (4, 1, 2), (4, 2, 2)])
def test_bytes_are_those_that_the_grid_counts(
    small_graph: Graph, ranks: int, copies: int, bulk: int
) -> None:
    work = Workload(batch_size=BATCH, fanouts=FANOUTS)
    stack = stack_profile(
        drawer(small_graph, work, Sampler(), ranks), np.diff(small_graph.indptr),
        seeds_per_rank=BATCH // ranks, num_ranks=ranks, steps=small_graph.num_train // BATCH,
    )  # fmt: skip
    steps = -(-small_graph.num_train // BATCH)
    found = fetch_sizes(stack, candidate(ranks, copies, bulk), steps)
    expected = sent_bytes(found, ranks, copies)
    assert np.mean(counted(small_graph, ranks, copies, bulk)) == pytest.approx(expected, rel=0.05)


def test_words_are_those_of_the_formula_without_repetition() -> None:
    # Formulas 4.7 with every row of k b d asked once: P = 4, c = 2, two process rows of 8 entries.
    found = Fetched(rows=[4.0], entries=[8.0], batches=2.0, steps=1.0)
    more = Fetched(rows=[4.0], entries=[9.0], batches=2.0, steps=1.0)
    per_entry = 4 * (sent_bytes(more, 4, 2) - sent_bytes(found, 4, 2)) / 4
    assert per_entry == pytest.approx(link_words(2, 1, 4, 2))


def test_stacks_between_and_beyond_the_profiled_sizes() -> None:
    stack = StackProfile(
        seeds_per_rank=1, sizes=[1.0, 4.0], rows=[[10.0, 20.0]], entries=[[100.0, 200.0]]
    )
    assert fetch_sizes(stack, candidate(4, 2, 1), 9).rows == [pytest.approx(10 * 2**0.5)]
    assert fetch_sizes(stack, candidate(4, 2, 8), 9).rows == [pytest.approx(80.0)]
    assert fetch_sizes(stack, candidate(4, 2, 8), 3).steps == 3.0


def test_a_rank_keeps_its_share_of_the_lists() -> None:
    graph = GraphRef(
        name="g", path="", fingerprint="", num_nodes=1000, num_edges=50_000, feature_dim=4,
        feature_dtype="float32", num_classes=2, task="multiclass", num_train=10,
    )  # fmt: skip
    found = Fetched(rows=[10.0, 20.0], entries=[100.0, 50.0], batches=1.0, steps=1.0)
    parts = grid_parts(candidate(4, 2, 1), graph, found)
    # Half of 8 * 1001 + 4 * 50000 bytes, and a directory; the first hop's rows twice.
    assert parts["topology"] == 104_004 + 8008
    assert parts["stack"] == 2 * (80 + 400)


def test_weights_that_the_sampler_reads_come_with_the_columns() -> None:
    gpus = [f"gpu{g}" for g in range(4)]
    four = candidate_of_ranks(gpus=gpus, topology="partitioned", replication=2)
    seeds = seeds_per_rank(request().workload.batch_size, 4)
    stack = StackProfile(
        seeds_per_rank=seeds, sizes=[1.0, 4.0], rows=[[10.0] * 2, [20.0] * 2],
        entries=[[100.0] * 2, [50.0] * 2],
    )  # fmt: skip
    asked = replace(request(), profile=replace(request().profile, stacks={str(seeds): stack}))
    by_weights = Sampler(name="ladies", parameters={"weights": "graph"})
    plain, weighted = (
        fetched_for(replace(asked, user_sampler=each), four) for each in (Sampler(), by_weights)
    )
    assert (plain.rows, plain.entries) == (weighted.rows, weighted.entries)
    # 4 bytes of 150 entries, halved over the columns: half of them to owners, all to the mate.
    assert sent_bytes(weighted, 4, 2) - sent_bytes(plain, 4, 2) == pytest.approx(75 * 4 * 1.5)
    stacks = [grid_parts(four, asked.graph, each)["stack"] for each in (plain, weighted)]
    assert stacks == [2 * (80 + 400), 2 * (80 + 800)]
    mine = work(four, load_preset("dgx-a100"), RankRows(rows={}, working_rows={}, shares={}))
    seconds = [
        at(gpu_fetch_times(times({"sample": 1e-3}), mine, each), "sample")
        for each in (plain, weighted)
    ]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12, 16, 64])
def test_stages_one_after_another_are_never_faster_so_plans_take_one_shot(ranks: int) -> None:
    for copies in replications(ranks, ranks):
        for latency in (0.0, 1e-4):
            staged, at_once = (
                probability_seconds(
                    1e4, 20, ranks, copies, latency_seconds=latency, word_seconds=1e-8,
                    one_shot=one_shot,
                )
                for one_shot in (False, True)
            )  # fmt: skip
            if copies * copies <= ranks:
                assert at_once <= staged * (1 + 1e-12)


def grid_sample(copies: int, batch: BatchProfile) -> float:
    """Seconds of `sample` on 4 ranks of one host, of a rank that samples alone in 10 ms."""
    found = Fetched(rows=[40.0, 80.0], entries=[400.0, 900.0], batches=float(copies), steps=1.0)
    one = replace(candidate(4, copies, 1), devices=list_cores(4))
    nothing = RankRows(rows={}, working_rows={}, shares={})
    mine = work(one, machine(), nothing, batch=batch)
    return at(fetch_times(times({"sample": 10e-3}), mine, found), "sample")


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_every_copy_but_its_own_adds_a_ranks_inner_hops(copies: int) -> None:
    # The first hop of 4,000 vertices has 5,000 edges: 10 ns an edge and 50 ns a vertex of the
    # machine by hand. The outermost hop is a rank's own, whatever its size.
    batch = batch_profile(1000)
    wide = replace(batch, edges=[batch.edges[0], exactly(1e6)])
    none = replace(batch, edges=[exactly(0.0), batch.edges[1]],
                   vertices=[batch.vertices[0], exactly(0.0), batch.vertices[2]])  # fmt: skip
    inner = 5_000 * 10e-9 + 4_000 * 50e-9
    added = grid_sample(copies, batch) - grid_sample(copies, none)
    assert added == pytest.approx((copies - 1) * inner, abs=1e-12)
    assert grid_sample(copies, wide) == grid_sample(copies, batch)


def test_seconds_of_a_stack_by_hand() -> None:
    # Without copies: 10 ms alone, 120 rows asked at 50 ns, 1,300 entries of 4 bytes copied 4 times
    # at 5 GB/s, and per hop four exchanges of 1 ms (counts, ids, lengths, columns).
    alone = 10e-3 + 120 * 50e-9 + 1300 * 4 * 4 / 5e9 + 2 * 4 * 1e-3
    assert grid_sample(1, batch_profile(1000)) == pytest.approx(alone)
    # Two copies: entries are copied 3 times, two more exchanges a hop, and one more inner hop.
    inner = 5_000 * 10e-9 + 4_000 * 50e-9
    twice = 10e-3 + inner + 120 * 50e-9 + 1300 * 4 * 3 / 5e9 + 2 * 6 * 1e-3
    assert grid_sample(2, batch_profile(1000)) == pytest.approx(twice)
