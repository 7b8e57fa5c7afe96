"""Which batches a profile draws: of every number of ranks that a plan may have, and no others."""

from dataclasses import replace

from gnnplan.planner.profile.presample import draw_all
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Combination
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload

SETTINGS = PlanSettings(workload=Workload(batch_size=96, fanouts=[3, 2]))


def drawn(graph: Graph, combination: Combination) -> set[int]:
    """Seeds per rank of what was drawn."""
    batches, hotness = draw_all(graph, SETTINGS, [combination], None)
    assert set(batches) == set(hotness)
    assert all(batch.seeds_per_rank == seeds for seeds, batch in batches.items())
    return set(batches)


def test_a_whole_batch_is_drawn_only_where_ranks_share_one(small_graph: Graph) -> None:
    two = Combination(ranks=2, threads=1)
    assert drawn(small_graph, two) == {48}
    assert drawn(small_graph, replace(two, hosts=2)) == {24}
    assert drawn(small_graph, replace(two, shared=True)) == {48, 96}
