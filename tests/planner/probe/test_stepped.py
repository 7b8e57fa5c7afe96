"""Exchanges between stretches of compute: what is read from the ranks' moments."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from planner.cost.straggler import kappa
from planner.probe.stepped import (
    CALLS,
    WARM_STEPS,
    after,
    exchanged,
    jitter,
    middle_mean,
    one_compute_thread,
    take_steps,
)


def spans(entries: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([entries, entries + seconds], axis=-1)


def test_an_exchange_lasts_from_the_last_entry_to_the_last_exit() -> None:
    # Rank 1 comes 2 s late; rank 0 leaves 1 s before it.
    entries = np.array([[0.0] * 8, [2.0] * 8])
    exits = np.array([[5.0] * 8, [6.0] * 8])
    found = exchanged(spans(entries, exits - entries))
    assert found.seconds.value == pytest.approx(4.0)
    assert found.early.value == pytest.approx(0.5)  # mean of 1 and 0


def test_the_order_of_ranks_that_leave_early_changes_nothing() -> None:
    draws = np.random.default_rng(0)
    entries, seconds = np.zeros((2, 50)), draws.uniform(1.0, 2.0, (2, 50))
    one, other = (exchanged(spans(entries, each)) for each in (seconds, seconds[::-1]))
    assert one == other
    assert 0 < one.early.value < one.seconds.value


def test_a_point_lies_between_two_humps_and_ignores_a_tail() -> None:
    assert middle_mean([1.0] * 50 + [2.0] * 50) == pytest.approx(1.5)
    assert middle_mean([1.0] * 90 + [100.0] * 10) == 1.0
    assert middle_mean([3.0]) == 3.0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_jitter_is_the_deviation_of_ranks_that_do_equal_work(ranks: int) -> None:
    seconds = 0.02 * (1 + 0.1 * np.random.default_rng(ranks).standard_normal((ranks, 4000)))
    # Of a skewed wait the middle half lies a little below the mean.
    assert jitter(spans(np.zeros_like(seconds), seconds), kappa(ranks)) == pytest.approx(
        0.1, rel=0.15
    )


def test_ranks_in_step_have_no_jitter() -> None:
    seconds = np.tile(np.linspace(0.01, 0.03, 20), (2, 1))
    assert jitter(spans(np.zeros_like(seconds), seconds), kappa(2)) <= 1e-6


class Recorder:
    """Stands for torch.distributed: says what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, object]] = []

    def all_to_all_single(self, received: object, sent: object, *, group: object) -> None:
        """Note the bytes handed over."""
        self.calls.append(("all_to_all", getattr(sent, "nbytes", 0), group))

    def all_reduce(self, tensor: object, *, group: object) -> None:
        """Note the bytes of the tensor."""
        self.calls.append(("all_reduce", getattr(tensor, "nbytes", 0), group))


def test_a_step_is_that_of_training() -> None:
    dist, done = Recorder(), list[str]()
    moments = take_steps(
        dist, ("rows", "gradients"), 2, 4096, 3,
        lambda: done.append("compute"), lambda: done.append("short"),
    )  # fmt: skip
    asked = [("all_to_all", 16, "rows"), ("all_to_all", 64, "rows")]  # counts, ids
    rest = [("all_to_all", 4096, "rows"), ("all_reduce", 4096, "gradients")]
    plain = [*asked, ("all_to_all", 8, "rows"), rest[1]]  # a row's number for each rank
    assert dist.calls == [*asked, *rest, *plain] * (3 + WARM_STEPS)
    assert done == ["short", "short", "compute"] * 2 * (3 + WARM_STEPS)
    assert np.array(moments).shape == (3, len(CALLS) + 2, 2)
    asking, rows, reduced, computed, after_least = np.array(moments).transpose(1, 0, 2)
    assert np.all(reduced[:, 1] <= after_least[:, 0])
    assert np.all(asking[:, 1] <= rows[:, 0])
    assert np.all(rows[:, 1] <= computed[:, 0])
    assert np.all(computed[:, 1] <= reduced[:, 0])


def test_what_compute_takes_longer_after_an_exchange_is_never_below_nothing() -> None:
    starts = np.zeros((2, 12))
    short, long = (spans(starts, np.full((2, 12), seconds)) for seconds in (0.010, 0.013))
    assert after(long, short).value == pytest.approx(0.003)
    assert 0 < after(short, long).value < 1e-5
    # A machine that becomes slower and slower does so for both.
    drifting = np.linspace(0.010, 0.020, 12) + np.zeros((2, 12))
    drifted = after(spans(starts, drifting + 0.003), spans(starts, drifting))
    assert drifted.value == pytest.approx(0.003)


def test_one_thread_computes_while_exchanges_are_measured() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_compute_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
