"""A rank's part of a shared batch, drawn by one process: what all ranks' would be."""

from typing import Literal

import numpy as np
import pytest

from gnnplan.planner.profile import draw as draw_shared
from gnnplan.planner.profile.draw import drawer, shared_drawer
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.distributed.owner import Owners

WORK = Workload(fanouts=[4, 3], batch_size=60, seed=3)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["neighbor", "labor"])
@pytest.mark.parametrize("dialect", ["first_seen", "every_hop"])
def test_it_owns_those_of_the_global_batchs_vertices_that_are_its_own(
    small_graph: Graph, name: str, dialect: Literal["first_seen", "every_hop"], num_ranks: int
) -> None:
    # Draws belong to vertices, so a single process draws the same batch.
    sampler = Sampler(name=name, dialect=dialect)
    shared = shared_drawer(small_graph, WORK, sampler, num_ranks)
    alone = drawer(small_graph, WORK, sampler, 1)
    owners = Owners(num_ranks, num_nodes=small_graph.num_nodes)
    for step in (0, 1, 7, 1, 0):  # again as before, whatever was drawn between
        mine, whole = shared(0, step), alone(0, step)
        assert whole.n_id.size > whole.seeds.size
        own = whole.n_id[owners.of(whole.n_id) == 0]
        assert mine.exchanges is not None
        held = mine.n_id[: mine.exchanges[0].num_own]
        assert np.array_equal(np.sort(held), np.sort(own))
        assert set(mine.seeds.tolist()) == set(whole.seeds.tolist()) & set(own.tolist())
        assert mine.global_num_seeds == whole.seeds.size


def test_after_the_last_kept_batch_the_first_comes_again(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_shared, "MOST_BATCHES", 3)
    shared = shared_drawer(small_graph, WORK, Sampler(), 2)
    found = [shared(0, step).n_id for step in range(6)]
    assert [np.array_equal(found[0], each) for each in found] == [True, False, False] * 2
    monkeypatch.setattr(draw_shared, "MOST_IDS", 1)
    once = shared_drawer(small_graph, WORK, Sampler(), 2)
    assert np.array_equal(once(0, 5).n_id, found[0])


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_fails_does_not_keep_the_others_waiting(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    choose = draw_shared._Rank.choose

    def failing(self: draw_shared._Rank, step: int) -> object:
        if step == 1 and self.rank == failed:
            raise SamplerError("no room")
        return choose(self, step)

    monkeypatch.setattr(draw_shared._Rank, "choose", failing)
    # The others hear only that it met them no more; what is raised is why.
    with pytest.raises(SamplerError, match="no room"):
        shared_drawer(small_graph, WORK, Sampler(), 2)
