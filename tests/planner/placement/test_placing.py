"""What a placement leaves to read, in the cost model's terms."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.planner.candidate import RankRows
from gnnplan.planner.cost.host_memory import disk_bytes
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.model import fixed_parts, predict
from gnnplan.planner.cost.request import row_bytes
from gnnplan.planner.placement.owned import place_shared
from gnnplan.planner.placement.place import Capacity, code_bytes, memories_of, place_rows
from tests.planner.cost.by_hand import GRAPH, NODES, candidate, request
from tests.support.placing import rows_placed
from tests.support.profiles import hotness


def left_to_the_disk(requests: float, moved: float) -> RankRows:
    """Of a rank without room for all rows and no host copy, whose batches took so many requests."""
    one = candidate().with_policy("naive")
    beside = sum(fixed_parts(request(), one, 0, code_bytes(NODES)).values())
    asked = request(budgets=Budgets(device_bytes=beside + 10_000_000))
    batches = [replace(b, disk_requests=requests, disk_bytes=moved) for b in asked.profile.batches]
    asked = replace(asked, profile=replace(asked.profile, batches=batches))
    p = np.linspace(0.2, 0.0, NODES, dtype=np.float32)
    found = rows_placed(asked, one, hotness(1000, p), host=False)
    return found.rows.ranks[0]


def test_requests_and_bytes_of_the_disk_are_those_that_whole_batches_were_counted_to_take() -> None:
    apart, together = left_to_the_disk(1.0, 1.0), left_to_the_disk(0.5, 0.8)
    assert apart.rows["disk"] > 0
    assert together.rows == apart.rows
    assert together.disk_requests == pytest.approx(0.5 * apart.disk_requests)
    # Half the requests for four fifths of the bytes: 1.6 times as many in each.
    assert together.disk_request_bytes == pytest.approx(1.6 * apart.disk_request_bytes)


def shared_rows(p: NDArray[np.float32]) -> list[RankRows]:
    """Of two ranks that share a batch and have room for nothing but their own state."""
    two = replace(candidate(ranks=2), batching="cooperative")
    asked = request(budgets=Budgets(device_bytes=1))
    room = Capacity(own_rows=0, host_rows=0)
    memories = memories_of(asked, replace(two, batching="independent"), hotness(1000, p),
                           shared_host=False)  # fmt: skip
    found = place_shared(asked, two, hotness(1000, p), replace(memories, room=room))
    return found.rows.ranks


def test_an_owner_reads_its_neighbouring_rows_of_a_shared_batch_together() -> None:
    # Owners are dealt by a hash: of rows that all are read, every other one is a rank's, so that
    # about half of them have the next one in the same request or the one after.
    every = np.ones(NODES, np.float32)
    for rank in shared_rows(every):
        assert rank.rows["disk"] == pytest.approx(NODES / 2, rel=0.02)
        assert rank.disk_requests < 0.2
        assert rank.disk_request_bytes > 10 * row_bytes(GRAPH)
    apart = np.zeros(NODES, np.float32)
    apart[::200] = 1.0
    for rank in shared_rows(apart):
        assert rank.disk_requests == pytest.approx(1.0)


def test_a_placement_is_scored_on_the_half_that_it_was_not_chosen_on() -> None:
    # The first half read the first quarter of the rows, the second half the next one, and both the
    # third; there is room for a quarter. What is chosen on one half is read no more in the other.
    at, room = np.arange(NODES) * 4 // NODES, Capacity(own_rows=NODES // 4, host_rows=None)
    law = {"first_half": (0.9, 0.0, 0.1, 0.0), "second_half": (0.0, 0.9, 0.1, 0.0)}
    halves = {name: np.array(p, np.float32)[at] for name, p in law.items()}
    hot = replace(hotness(1000, np.full(NODES, 0.2)), **halves)
    one = candidate().with_policy("degree")
    asked = request()
    memories = replace(memories_of(asked, one, hot, shared_host=True), room=room)
    for policy, share in (("song-jiang", 0.0), ("degree", 0.1)):
        # In-degrees say the same in both halves: the third quarter, a tenth of the reads of each.
        degrees = np.array([0, 0, 9, 0])[at]
        found = place_rows(asked, one.with_policy(policy), hot, memories, out_degree=degrees)
        assert found.rows.ranks[0].shares.get("own", 0.0) == pytest.approx(share)


def test_buffers_for_the_rows_of_peers_come_out_of_a_ranks_own() -> None:
    two = candidate(ranks=2).with_policy("random")
    beside = sum(fixed_parts(request(), two, 0, code_bytes(NODES)).values())
    budget = beside + 10_000_000
    asked = request(budgets=Budgets(device_bytes=budget))
    p = np.linspace(0.2, 0.0, NODES, dtype=np.float32)
    found = rows_placed(asked, two, hotness(1000, p), host=False)
    assert found.rows.ranks[0].rows["peer"] > 0
    used = predict(asked, two, found.rows).memory_bytes["rank0"]
    assert 0 < used.parts["rows of peers"] < 10_000_000
    # There is room for reading all rows from the disk, of which only those are that nobody keeps.
    spared = disk_bytes(asked, two) - used.parts["rows from disk"]
    assert budget - 400 < used.total + spared <= budget
