"""What a grid is predicted to send while it samples, against what its ranks count themselves."""

from typing import Any

import numpy as np
import pytest

from planner.candidate import Candidate
from planner.cost.matrix import link_words, probability_seconds, replications
from planner.cost.partitioned import Fetched, fetched, grid_parts, sent_bytes
from planner.profiling.draw import drawer
from planner.profiling.sharing import stack_profile
from planner.workload import StackProfile
from runtime.comm.grid import open_grid
from runtime.graph.dataset import Graph
from runtime.plan import GraphRef, Sampler, Threads, Workload
from runtime.sampling.matrix_grid import GridSampler, empty_graph
from runtime.sampling.matrix_grid_shard import cut_shard
from runtime.sampling.matrix_stack import Request
from runtime.sampling.neighbor import NeighborSampler
from runtime.sampling.seeds import SeedSchedule
from runtime.stages import Stage
from tests.support.inprocess import run_in_process

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
    return Candidate(
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
    found = fetched(stack, candidate(ranks, copies, bulk), steps)
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
    assert fetched(stack, candidate(4, 2, 1), 9).rows == [pytest.approx(10 * 2**0.5)]
    assert fetched(stack, candidate(4, 2, 8), 9).rows == [pytest.approx(80.0)]
    assert fetched(stack, candidate(4, 2, 8), 3).steps == 3.0


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
