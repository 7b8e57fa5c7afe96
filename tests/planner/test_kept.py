"""What is made of final arrays is made once, within a limit, and goes when they go."""

import gc
from unittest import mock

import numpy as np
import pytest

from gnnplan.planner import array_cache as module
from gnnplan.planner.array_cache import declare_final, make_once
from gnnplan.planner.placement.order import hot_to_cold
from gnnplan.planner.workload import Hotness


def made(p: np.ndarray, calls: list[int], name: str = "half") -> np.ndarray:
    def make() -> tuple[np.ndarray]:
        calls.append(1)
        return (p / 2,)

    return make_once((p,), name, make)[0]


def test_nothing_is_kept_of_an_array_that_may_change() -> None:
    p, calls = np.ones(4), list[int]()
    made(p, calls)
    p[:] = 4
    assert made(p, calls).tolist() == [2.0] * 4
    assert len(calls) == 2


def test_views_of_a_final_array_are_final_and_told_apart() -> None:
    p, calls = declare_final(np.arange(8.0)), list[int]()
    for _ in range(2):
        assert made(p[:4], calls).tolist() == [0.0, 0.5, 1.0, 1.5]
        assert made(p[4:], calls).tolist() == [2.0, 2.5, 3.0, 3.5]
        assert made(p[::2], calls).tolist() == [0.0, 1.0, 2.0, 3.0]
        assert made(p[::2], calls, "another").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(calls) == 4


def test_what_is_made_of_an_array_goes_with_it() -> None:
    store = module._Store()
    with mock.patch.object(module, "_STORE", store):
        p, calls = declare_final(np.ones(1000)), list[int]()
        made(made(p, calls), calls)
        assert (store._bytes, len(calls)) == (16_000, 2)
        del p
        gc.collect()
        assert store._bytes == 0
        assert not store._found


def test_the_least_recently_used_goes_first_and_the_limit_holds() -> None:
    store = module._Store()
    with (
        mock.patch.object(module, "_STORE", store),
        mock.patch.object(module, "LIMIT_BYTES", 1600),
        mock.patch.object(module, "LARGEST_BYTES", 800),
    ):
        first, second, third = (declare_final(np.full(100, float(i))) for i in range(3))
        calls = list[int]()
        for p in (first, second, first, third):
            made(p, calls)
            assert store._bytes <= 1600
        assert len(calls) == 3
        made(first, calls)
        assert len(calls) == 3
        made(second, calls)
        assert len(calls) == 4
        large = declare_final(np.ones(101))
        for _ in range(2):
            made(large, calls)
        assert len(calls) == 6


@pytest.mark.parametrize("finished", [False, True])
def test_an_order_is_the_same_whether_it_is_kept_or_not(finished: bool) -> None:
    rng = np.random.default_rng(0)
    first, second = ((rng.integers(0, 4, 500) / 4).astype(np.float32) for _ in range(2))
    hot = Hotness(
        seeds_per_rank=1,
        first_half=first,
        second_half=second,
        num_batches=8,
        topology=np.zeros_like(first),
    )
    hot = hot.finished() if finished else hot
    mean = (first + second) / 2
    ids, _ = hot_to_cold(hot.features)
    for _ in range(2):
        ids, values = hot_to_cold(hot.features)
        np.testing.assert_array_equal(ids, np.argsort(-mean, kind="stable"))
        np.testing.assert_array_equal(values, mean[ids])
    assert (hot_to_cold(hot.features)[0] is ids) == finished
