"""What processors lose that sample apart, in counts of vertices (formulas 5.3, 5.6)."""

import numpy as np
import pytest

from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.support.labor import copies, graph_of

# [R8] the seven vertices of [R7].
SEVEN = graph_of({0: [1, 2, 3], 1: [0, 2], 2: [0, 1, 4, 5], 3: [0, 6], 4: [2], 5: [2, 6], 6: [3, 5]}, 7)  # fmt: skip  # noqa: E501
# [R1] N(s1) = {a, b, c, d}, N(s2) = {a, b}.
TWO_SEEDS = {0: [2, 3, 4, 5], 1: [2, 3]}


def test_one_batch_of_two_seeds_touches_fewer_vertices_than_two_of_one() -> None:
    # [R8] {0} and {4} apart touch 4 + 2 vertices, together 5: vertex 2 is shared.
    def touched(seeds: list[int]) -> int:
        batch = NeighborSampler(*SEVEN, [-1]).sample(np.array(seeds), epoch=0, step=0)
        return len(batch.n_id)

    assert touched([0]) + touched([4]) == 6
    assert touched([0, 4]) == 5


@pytest.mark.parametrize(("apart", "expected"), [(True, 1.5), (False, 1.375)])
def test_labor_1_on_two_processors_is_labor_0_without_a_shared_maximum(
    apart: bool, expected: float
) -> None:
    # [C19] apart 1.5, which is LABOR-0's, in the place of 1.375; [R1] in 4000 disjoint copies, of
    # which one processor has all the first seeds, the other all the second ones.
    count = 4000
    graph = copies(TWO_SEEDS, 6, count)
    first = np.arange(0, 6 * count, 6)
    parts = [first, first + 1] if apart else [np.concatenate([first, first + 1])]
    sampler = LaborSampler(*graph, [1], variant=1)
    drawn: set[int] = set()
    for part in parts:
        drawn |= set(sampler.sample(part, epoch=0, step=0).n_id[len(part) :].tolist())
    # A copy has at most four vertices to draw; their number's standard deviation is below 1.
    assert len(drawn) / count == pytest.approx(expected, abs=4 / np.sqrt(count))
