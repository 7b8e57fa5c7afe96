"""Exchanges between stretches of compute: what is read from the ranks' moments."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gnnplan.planner.cost.pipeline_time import kappa
from gnnplan.planner.probe import collectives as module
from gnnplan.planner.probe.collectives import (
    AROUND_IDS,
    AROUND_ROWS,
    BACK,
    CALLS,
    HIDDEN,
    WARM_STEPS,
    after,
    around,
    exchanged,
    jitter,
    quieter_jitter,
    take_steps,
    there_and_back,
)
from gnnplan.planner.probe.hosts import one_compute_thread
from gnnplan.planner.probe.timing import middle_mean
from gnnplan.runtime.comm.collectives import Traffic
from tests.support.clock import FakeClock


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


@pytest.mark.parametrize("disturbed", [0, 3, 6])
def test_jitter_is_that_of_quiet_moments_while_three_of_nine_are_quiet(disturbed: int) -> None:
    found = [0.008, 0.009, 0.01, *[0.011] * (6 - disturbed), *[0.1] * disturbed]
    assert quieter_jitter(found).value == pytest.approx(0.01)


class Recorder:
    """Stands for a communicator of two ranks: says what was called."""

    size = 2

    def __init__(self, name: str, calls: list[tuple[str, str, int]], clock: FakeClock) -> None:
        self.name, self.calls, self.clock = name, calls, clock
        self.metered = Traffic()

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What was metered so far."""
        return {"exchange": replace(self.metered)}

    def _note(self, call: str, tensor: torch.Tensor) -> None:
        self.calls.append((self.name, call, tensor.nbytes))
        self.clock.sleep(0.003)
        self.metered.seconds += 0.002

    def all_to_all_ids(self, ids: torch.Tensor, counts: Sequence[int]) -> None:
        """Note the bytes of the ids."""
        assert sum(counts) == ids.shape[0]
        self._note("ids", ids)

    def all_to_all_rows(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        received_counts: Sequence[int],
        *,
        out: torch.Tensor,
    ) -> None:
        """Note the bytes handed over."""
        assert sum(counts) == rows.shape[0]
        assert sum(received_counts) == out.shape[0]
        self._note("rows", rows)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Note the bytes of the tensor."""
        self._note("sum", tensor)


def test_a_step_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, done, clock = list[tuple[str, str, int]](), list[str](), FakeClock()
    monkeypatch.setattr(module, "time", clock)
    exchanging, reducing = Recorder("x", calls, clock), Recorder("g", calls, clock)
    moments = take_steps(
        exchanging, reducing, 4096, 3,
        lambda: done.append("compute"), lambda: done.append("short"),
    )  # fmt: skip
    asked, summed = ("x", "ids", 64), ("g", "sum", 4096)
    # A number for each rank as rows; then hidden rows and back, as many as the other step's.
    plain = [asked, ("x", "rows", 8), *[("x", "rows", 4096)] * 2, summed]
    assert calls == [asked, ("x", "rows", 4096), summed, *plain] * (3 + WARM_STEPS)
    one = ["short", "short", "compute"]
    assert done == [*one, *one, "short"] * (3 + WARM_STEPS)
    assert np.array(moments).shape == (3, len(CALLS) + 6, 2)
    asking, rows, reduced, computed, after_least, *_ = np.array(moments).transpose(1, 0, 2)
    # Of the 3 ms and more that an exchange takes, 2 are metered.
    assert (asking[:, 1] - asking[:, 0]).tolist() == pytest.approx([0.002] * 3)
    there, back = np.array(moments)[:, HIDDEN], np.array(moments)[:, BACK]
    assert there_and_back(there[None], back[None]).value == pytest.approx(0.004)
    assert np.all(after_least[:, 1] <= there[:, 0])
    assert np.all(there[:, 1] <= back[:, 0])
    for place in (AROUND_IDS, AROUND_ROWS):
        assert around(np.array(moments)[None, :, place]).value == pytest.approx(0.001)
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
