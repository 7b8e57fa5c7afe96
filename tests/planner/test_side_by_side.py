"""Parts on threads of their own: the same results, in the same order, and errors that come out."""

import itertools
import threading

import numpy as np
import pytest

from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.policies.joint import place_joint
from gnnplan.planner.placement.policies.song_jiang import best_of
from gnnplan.runtime import process as module
from gnnplan.runtime.process import LONG, side_by_side
from tests.support.placements import SHAPES, random_problem


@pytest.mark.parametrize("items", [1, LONG])
@pytest.mark.parametrize("cores", [0, 1, 2, 8])
def test_results_come_in_the_order_of_the_parts(
    monkeypatch: pytest.MonkeyPatch, items: int, cores: int
) -> None:
    monkeypatch.setattr(module, "usable_core_ids", lambda: list(range(cores)))
    assert side_by_side(lambda part: part * part, range(20), items=items) == [
        part * part for part in range(20)
    ]
    assert side_by_side(lambda part: part, list[int](), items=items) == []


def test_long_parts_run_at_once_and_short_ones_by_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    both = threading.Barrier(2)
    assert side_by_side(lambda _: both.wait(5) in (0, 1), [0, 1], items=LONG) == [True, True]
    here = threading.get_ident()
    assert side_by_side(lambda _: threading.get_ident(), [0, 1], items=LONG - 1) == [here, here]


def test_an_error_of_a_part_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])

    def refuse(part: int) -> int:
        if part == 2:
            raise ValueError("part 2")
        return part

    with pytest.raises(ValueError, match="part 2"):
        side_by_side(refuse, [1, 2, 3], items=LONG)


@pytest.mark.slow
def test_placements_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    hotness = [rng.random(400).astype(np.float32) ** 4 for _ in range(3)]
    drawn = [
        random_problem(rng, name, num_nodes=300, laws=laws)[0]
        for name, laws in zip(SHAPES, itertools.cycle(("shared", "clique")), strict=False)
    ]

    def placed() -> list[object]:
        costs = RowCosts(local=0.0, peer=0.3, host=1.0)
        found: list[object] = []
        for p in hotness:
            best = best_of(p, costs, 4, 60)
            found += [best.own.tolist(), best.variants]
        for instance in drawn:
            joint = place_joint(instance, solver="density")
            held = [[ids.tolist() for ids in each.own] for each in joint.placement.items]
            found += [joint.bound, joint.score.seconds, held]
        return found

    alone = placed()
    monkeypatch.setattr(module, "LONG", 1)
    monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1, 2])
    assert placed() == alone
