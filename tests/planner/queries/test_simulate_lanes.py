"""Counted batches on lanes, added up by hand."""

import numpy as np
import pytest

from gnnplan.planner.queries.simulated_times import lanes_total

STEPS = 3


def stages(**milliseconds: float) -> np.ndarray:
    """Sample 3, gather 4, forward_backward 5, optimizer 1 ms in every step; or otherwise."""
    found = {"sample": 3, "gather": 4, "copy": 0, "batch": 0, "forward_backward": 5,
             "all_reduce": 0, "optimizer": 1, **milliseconds}  # fmt: skip
    return np.tile(np.array(list(found.values())) * 1e-3, (STEPS, 1))


def total(
    *ranks: np.ndarray,
    near: float = 1e-3,
    launches: float = 0.0,
    depth: int = 2,
    hidden: float = 0.0,
    started: float = 0.0,
) -> float:
    shape = (len(ranks), STEPS)
    seconds = np.stack(ranks)
    each = np.full(shape, near), np.full(shape, launches), seconds[:, :, 4] + seconds[:, :, 6]
    return lanes_total(seconds, *each, depth=depth, hidden=hidden, started=started)


def test_the_first_batch_fills_the_lanes_and_training_binds() -> None:
    # 7 ms until the first batch is there, then three steps of 6 ms.
    assert total(stages()) == pytest.approx(25e-3)


def test_a_long_lane_or_what_lanes_share_binds() -> None:
    # Gathers of 9 ms: three of them after the first draw, and the last step.
    assert total(stages(gather=9)) == pytest.approx(3e-3 + 27e-3 + 6e-3)
    # The GPU has 4 ms of the loader's work and 6 of training's in each step.
    assert total(stages(), near=4e-3) == pytest.approx(30e-3)
    # Its links have 3 + 8 - 1 ms, less what only starts kernels.
    long = stages(gather=8, forward_backward=0, optimizer=0)
    assert total(long, launches=0.5e-3) == pytest.approx(3 * 9.5e-3)


def test_one_interpreter_starts_the_kernels_of_all_lanes() -> None:
    # 5 ms of starts for the loader and 4 for training: more than training's 6 ms.
    assert total(stages(), launches=5e-3, started=4e-3) == pytest.approx(3 * 9e-3)


def test_an_exchange_keeps_the_gpu_but_for_what_compute_hides_and_its_links() -> None:
    # 4 ms of the loader's work, 6 of training's and the exchange in each step.
    exchange = stages(all_reduce=2)
    assert total(exchange, near=4e-3) == pytest.approx(36e-3)
    assert total(exchange, near=4e-3, hidden=0.75) == pytest.approx(3 * 10.5e-3)
    # Links: 3 + 8 - 1 ms of reads, and the exchange.
    long = stages(gather=8, all_reduce=1, forward_backward=0, optimizer=0)
    assert total(long) == pytest.approx(33e-3)


def test_every_step_ends_with_its_slowest_rank() -> None:
    slow = stages(forward_backward=9)
    assert total(stages(), slow) == pytest.approx(7e-3 + 30e-3)
    assert total(stages(), slow) == total(slow)
