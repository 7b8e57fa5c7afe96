"""An epoch's last, smaller batch: its layers may take another order, and then more memory."""

from dataclasses import replace

import numpy as np
import pytest

from gnnplan.planner.cost.request import part_of, part_profile
from gnnplan.planner.profile.draw import drawer, last_batch, shared_batch
from gnnplan.planner.profile.loop import Bench, synthetic_batch
from gnnplan.planner.profile.model_seconds import timing_request
from gnnplan.planner.profile.presample import interpolated, presample
from gnnplan.planner.profile.protocol import BatchShape
from gnnplan.planner.profile.timing_process import TimedModel
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Combination
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.models.adjacency import torch_block
from gnnplan.runtime.models.functions import transforms_first
from gnnplan.runtime.plan.schema import Sampler, Workload
from tests.support.timings import request

WORK = Workload(fanouts=[5, 3], batch_size=100, seed=1)
IN, HIDDEN = 256, 16


def with_seeds(graph: Graph, number: int) -> Graph:
    return replace(graph, train_idx=np.arange(number, dtype=np.int64))


@pytest.mark.parametrize(("ranks", "seeds"), [(1, 30), (2, 15)])
def test_it_is_drawn_where_it_is_smaller(small_graph: Graph, ranks: int, seeds: int) -> None:
    found, _ = presample(with_seeds(small_graph, 230), WORK, Sampler(), ranks)
    assert found.last_vertices[0] == seeds
    assert len(found.last_vertices) == len(found.last_edges) + 1 == 3
    # Fewer seeds have relatively more neighbours.
    whole = found.vertices[-1].mean / found.vertices[0].mean
    assert found.last_vertices[-1] / seeds > whole
    for number in (200, 100, 60):  # whole batches alone, or one small one
        none, _ = presample(with_seeds(small_graph, number), WORK, Sampler(), ranks)
        assert (none.last_vertices, none.last_edges) == ([], [])


def test_a_rank_without_seeds_in_it_has_none(small_graph: Graph) -> None:
    graph = with_seeds(small_graph, 201)
    found = last_batch(graph, WORK, Sampler(), 1)
    assert found is not None
    assert found.seeds.size == 1
    assert (
        last_batch(replace(graph, meta=replace(graph.meta, task="link")), WORK, Sampler(), 1)
        is None
    )


def test_it_is_asked_for_once_for_each_number_of_ranks(small_graph: Graph) -> None:
    graph, settings = with_seeds(small_graph, 230), PlanSettings(workload=WORK)
    batch, _ = presample(graph, WORK, Sampler(), 1)
    one = Combination(ranks=1, threads=1)
    asked = timing_request(graph, settings, batch, one)
    assert asked.last is not None
    assert (asked.last.vertices, asked.last.edges) == (batch.last_vertices, batch.last_edges)
    assert asked.last.dialect == asked.shape.dialect
    assert timing_request(graph, settings, batch, one, counts_bytes=False).last is None
    plain = replace(batch, last_vertices=[], last_edges=[])
    assert timing_request(graph, settings, plain, one).last is None


def first(shape: BatchShape) -> bool:
    block = torch_block(synthetic_batch(shape, 0).blocks[0])
    return transforms_first(block, IN, HIDDEN, trains=True, inner=False)


def test_its_order_of_sum_and_product_counts() -> None:
    mean = BatchShape(vertices=[1000, 1500], edges=[2000])
    last = BatchShape(vertices=[300, 900], edges=[600])
    assert first(mean)
    assert not first(last)
    work = Workload(num_layers=1, fanouts=[2], hidden=HIDDEN)
    wanted = replace(
        request(), workload=work, in_dim=IN, num_classes=HIDDEN, shape=mean, scales=[1.0], steps=1
    )
    alone, both = (
        TimedModel(Bench(each)).run().activation_bytes
        for each in (wanted, replace(wanted, last=last))
    )
    summed = 4 * 300 * 2 * IN  # own rows stand beside the sums
    assert alone < summed < both < 2 * summed
    # A last batch in the same order as the others holds less than they do.
    small = BatchShape(vertices=[300, 450], edges=[600])
    assert TimedModel(Bench(replace(wanted, last=small))).run().activation_bytes == alone


def test_ranks_that_share_it_have_parts_of_it(small_graph: Graph) -> None:
    graph = with_seeds(small_graph, 230)
    batch, _ = presample(graph, WORK, Sampler(), 1)
    shared = shared_batch(drawer(graph, WORK, Sampler(), 1), steps=2)
    part = part_profile(batch, part_of(batch, shared, 2, every_hop=False))
    assert part.last_vertices[:-1] == [round(n / 2) for n in batch.last_vertices[:-1]]
    assert part.last_vertices[-1] > batch.last_vertices[-1] / 2  # of others, too
    assert part.last_edges == [round(n / 2) for n in batch.last_edges]


def test_a_size_between_two_has_a_last_batch_between(small_graph: Graph) -> None:
    graph = with_seeds(small_graph, 230)
    found = [presample(graph, WORK, Sampler(), ranks) for ranks in (1, 4)]
    batches = {batch.seeds_per_rank: batch for batch, _ in found}
    hotness = {hot.seeds_per_rank: hot for _, hot in found}
    between, _ = interpolated(50, batches, hotness)
    low, high = batches[25].last_vertices[-1], batches[100].last_vertices[-1]
    assert low < between.last_vertices[-1] < high
