"""How long a small model's training step takes, beside good moments."""

import pytest
import torch

from planner.probe import quiet as small_step
from planner.probe.quiet import NAME, Looks, SmallStep, step_seconds


def test_a_step_takes_as_long_as_its_arithmetic_and_leaves_torch_as_it_was() -> None:
    threads, drawn = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        # 200 million operations: no core does them in a tenth of a millisecond.
        assert step_seconds() > 1e-4
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), drawn)
    finally:
        torch.set_num_threads(threads)


def test_it_is_held_against_good_moments_and_written_down(monkeypatch) -> None:
    looks = Looks({NAME: {"2e+06": 30, "3e+06": 70}})
    monkeypatch.setattr(small_step, "step_seconds", lambda: 2.5e-3)
    assert SmallStep(looks).slowdown() == pytest.approx(1.25)
    assert looks.seen[NAME]["2.5e+06"] == 1


def test_threads_are_given_back_where_the_step_fails(monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(small_step, "_step", lambda: broken)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no memory"):
        step_seconds()
    assert torch.get_num_threads() == before
