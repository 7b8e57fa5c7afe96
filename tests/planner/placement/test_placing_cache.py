"""What caches that fill themselves leave to the disk."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from gnnplan.planner.candidate import RankRows
from gnnplan.planner.cost.cache_model import DrawnReads, ExpectedReads, SuccessiveReads
from gnnplan.planner.cost.memory import SLOT_BYTES, Budgets
from gnnplan.planner.cost.request import row_bytes
from gnnplan.planner.placement.caches import missed_law, place_behind_caches
from gnnplan.planner.placement.place import Capacity, memories_of
from gnnplan.runtime.features.direct import BLOCK_BYTES
from tests.planner.cost.by_hand import GRAPH, NODES, candidate, request
from tests.support.profiles import hotness


@given(share=st.floats(0.01, 0.99), seed=st.integers(0, 5))
def test_missed_rows_add_up_and_the_hot_are_missed_least(share: float, seed: int) -> None:
    p = np.random.default_rng(seed).uniform(0.0, 1.0, 2000).astype(np.float32) ** 3
    law = missed_law(p, share * float(p.sum()))
    assert float(law.sum()) == pytest.approx(share * float(p.sum()), rel=0.02)
    assert np.all(law <= p)
    hot, cold = p > 0.5, (p > 0.0) & (p < 0.1)
    assert law[hot].sum() / p[hot].sum() < law[cold].sum() / p[cold].sum()


def test_a_cache_that_saves_nothing_or_everything() -> None:
    p = np.array([0.5, 0.0, 0.25], np.float32)
    assert missed_law(p, 1.0).tolist() == p.tolist()
    assert missed_law(p, 0.0).tolist() == [0.0, 0.0, 0.0]


def behind_a_cache(p: NDArray[np.float32], batches: Sequence[NDArray[np.int32]] = ()) -> RankRows:
    """Of one rank whose cache has few slots; the host maps none."""
    one = candidate().with_policy("lru")
    asked = request(budgets=Budgets(device_bytes=1))
    found = memories_of(asked, candidate(), hotness(1000, p), shared_host=False)
    slots = 300 * (row_bytes(GRAPH) + SLOT_BYTES)
    memories = replace(found, room=Capacity(own_rows=0, host_rows=0, own_bytes=slots))
    reads: SuccessiveReads = ExpectedReads(p=p, num_batches=10)
    if batches:
        reads = DrawnReads(batches=batches, num_nodes=p.size, independent=False)
    found = place_behind_caches(asked, one, hotness(1000, p), reads, memories)
    return found.rows.ranks[0]


def test_rows_that_lie_together_are_read_together_past_a_cache() -> None:
    near, apart = np.zeros(NODES, np.float32), np.zeros(NODES, np.float32)
    near[:20_000] = 0.5
    apart[::100] = 0.5
    together, alone = behind_a_cache(near), behind_a_cache(apart)
    assert together.rows["disk"] > 0
    assert together.disk_requests < 0.2
    assert together.disk_request_bytes > 10 * row_bytes(GRAPH)
    assert alone.rows["disk"] > 0
    assert alone.disk_requests == pytest.approx(1.0, rel=0.01)


def test_requests_past_a_cache_are_counted_on_batches_that_were_drawn() -> None:
    # Rows ten by ten, always together, and each ten too far from the next to be read with it.
    tens = np.arange(0, NODES, 1000)[:, None] + np.arange(10)
    rng = np.random.default_rng(0)
    batches = [tens[rng.random(len(tens)) < 0.4].ravel().astype(np.int32) for _ in range(64)]
    p = np.zeros(NODES, np.float32)
    p[tens] = 0.4
    by_law, counted = behind_a_cache(p), behind_a_cache(p, batches)
    assert counted.disk_requests == pytest.approx(0.1)
    assert 10 * row_bytes(GRAPH) < counted.disk_request_bytes <= 2 * BLOCK_BYTES
    assert by_law.disk_requests > 2 * counted.disk_requests
