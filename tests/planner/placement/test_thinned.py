"""Vertices that stand for others: sums over them are those over all, and every place comes back."""

import numpy as np
import pytest

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.model import fixed_parts, predict
from gnnplan.planner.cost.request import Request
from gnnplan.planner.placement.order import VertexRuns, downsample_hotness
from gnnplan.planner.placement.place import CandidatePlacement, code_bytes
from gnnplan.planner.search.dimensions.rows import of_all, spread_placement
from gnnplan.planner.workload import Hotness
from tests.planner.cost.by_hand import NODES, candidate, request
from tests.support.placing import rows_placed

STRIDE = 7


def drawn(seed: int, num: int = NODES) -> Hotness:
    """Frequencies of 32 batches whose rows are met as a power law says, in two halves."""
    rng = np.random.default_rng(seed)
    law = rng.permutation(np.minimum(1.0, 20.0 / np.arange(1, num + 1)))
    first, second = (rng.binomial(16, law).astype(np.float32) / np.float32(16) for _ in range(2))
    return Hotness(
        seeds_per_rank=1000,
        first_half=first,
        second_half=second,
        num_batches=32,
        topology=np.zeros(num, np.float32),
    )


def few_of(whole: Hotness) -> Hotness:
    return downsample_hotness(whole, enough=whole.first_half.size // STRIDE)


@pytest.mark.parametrize("num", [700, 701, 706])
def test_every_vertex_is_in_the_run_of_one_that_stands_for_it(num: int) -> None:
    few = few_of(drawn(1, num))
    assert few.stride == STRIDE
    spread = VertexRuns(few)
    runs = [spread.ids(np.array([j])) for j in range(few.ids.size)]
    assert all(few.ids[j] in run for j, run in enumerate(runs))
    assert sorted(np.concatenate(runs).tolist()) == list(range(num))
    p = few.everything.features
    for run, hot in zip(runs, few.features, strict=True):  # no hotter vertex in a colder run
        assert p[run].min() <= hot <= p[run].max()


def test_a_mask_and_ids_of_some_are_those_of_their_runs() -> None:
    few = few_of(drawn(2, 703))
    chosen = np.arange(0, few.ids.size, 3)
    mask = np.zeros(few.ids.size, np.bool_)
    mask[chosen] = True
    spread = VertexRuns(few)
    assert np.flatnonzero(spread.mask(mask)).tolist() == spread.ids(chosen).tolist()


def test_sums_of_those_that_stand_for_others_are_the_sums_of_all() -> None:
    whole = drawn(3)
    few = few_of(whole)
    # Of equally hot vertices some were met in one half and some in the other: those are sampled.
    for name, off in (("features", 1e-3), ("first_half", 0.06), ("second_half", 0.06)):
        of_all, of_few = (float(getattr(h, name).sum(dtype=np.float64)) for h in (whole, few))
        assert of_few * few.weight == pytest.approx(of_all, rel=off), name


def test_few_vertices_stay_as_they_are() -> None:
    whole = drawn(4)
    assert downsample_hotness(whole, enough=NODES) is whole
    assert VertexRuns(whole).ids(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_memory_is_never_overfilled_and_a_bound_never_has_less() -> None:
    few = few_of(drawn(5, 706))
    for rows in (0, 6, 7, 100, 699, 705, 706):
        held = VertexRuns(few).ids(np.arange(few.places(rows)))
        assert len(held) <= rows
        assert few.most_places(rows) * STRIDE >= rows
        assert few.most_places(rows) >= few.places(rows)


def everywhere(asked: Request, found: CandidatePlacement, hotness: Hotness) -> CandidatePlacement:
    return of_all(asked, found, spread_placement(found.placement, hotness), hotness)


def placed_on(hotness: Hotness, policy: str, *, host: bool, share: float) -> CandidatePlacement:
    two: Candidate = candidate(ranks=2).with_policy(policy)
    beside = sum(fixed_parts(request(), two, 0, code_bytes(NODES)).values())
    rows = round(share * NODES)
    asked = request(budgets=Budgets(device_bytes=beside + rows * 400))
    degrees = np.arange(NODES, dtype=np.int64)
    found = rows_placed(asked, two, hotness, host=host, degrees=degrees)
    return everywhere(asked, found, hotness)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("policy", ["none", "song-jiang", "joint", "gnnlab"])
def test_reads_and_places_are_those_of_a_placement_of_all(policy: str, *, host: bool) -> None:
    whole = drawn(6)
    found = placed_on(few_of(whole), policy, host=host, share=0.2)
    exact = placed_on(whole, policy, host=host, share=0.2)
    for ours, theirs in zip(found.rows.ranks, exact.rows.ranks, strict=True):
        for kind in set(ours.rows) | set(theirs.rows):
            mine, other = ours.rows.get(kind, 0.0), theirs.rows.get(kind, 0.0)
            assert mine == pytest.approx(other, abs=0.02 * sum(theirs.rows.values())), kind
        assert ours.own_rows == pytest.approx(theirs.own_rows, abs=2 * STRIDE)
        assert ours.disk_requests == pytest.approx(theirs.disk_requests, rel=0.05)
    for mine, other in zip(found.placement.own, exact.placement.own, strict=True):
        assert len(set(mine.tolist())) == len(mine) <= max(1, round(0.2 * NODES))
        assert abs(len(mine) - len(other)) <= 2 * STRIDE
    seconds = found.reads.max_seconds
    assert seconds == pytest.approx(exact.reads.max_seconds, rel=0.01)


def test_predictions_of_few_are_those_of_all() -> None:
    whole = drawn(7)
    two = candidate(ranks=2).with_policy("song-jiang")
    seconds: list[float] = []
    for hotness in (whole, few_of(whole)):
        rows = rows_placed(request(), two, hotness, host=True).rows
        seconds.append(predict(request(), two, rows).step_seconds.value)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)


def test_a_placement_says_which_vertices_its_ids_stand_for() -> None:
    whole = drawn(9)
    few = few_of(whole)
    two = candidate(ranks=2).with_policy("song-jiang")
    for hotness in (whole, few):
        found = rows_placed(request(), two, hotness, host=True)
        spread = everywhere(request(), found, hotness)
        held = found.placement.own[0]
        assert np.array_equal(found.expand(held), spread.placement.own[0])
        assert np.array_equal(spread.expand(held), held)


def test_what_a_policy_looks_at_besides_is_that_of_the_vertices_that_stand_for_all() -> None:
    few = few_of(drawn(8))
    two = candidate(ranks=2).with_policy("degree")
    beside = sum(fixed_parts(request(), two, 0, code_bytes(NODES)).values())
    asked = request(budgets=Budgets(device_bytes=beside + 10_000_000))
    degrees = np.arange(NODES, dtype=np.int64)[::-1].copy()
    found = rows_placed(asked, two, few, host=False, degrees=degrees)
    held = few.ids[found.placement.own[0]]  # the lowest ids have the most
    assert held.tolist() == few.ids[: len(held)].tolist()
    assert len(held) > 50
