"""A budget refuses what does not fit, says the sum, and is unchanged by a refusal."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gnnplan.runtime.errors import BudgetExceeded
from gnnplan.runtime.features.disk import ByteBudget


def test_a_refusal_writes_the_sum_out_and_changes_nothing() -> None:
    budget = ByteBudget(100, "disk tier")
    budget.reserve("buffers", 60)
    budget.reserve("index", 30)
    with pytest.raises(BudgetExceeded, match=r"disk tier: buffers 60 \+ index 41 = 101 > 100"):
        budget.reserve("index", 11)
    assert (budget.used_bytes, budget.free_bytes, budget.peak_bytes) == (90, 10, 90)


def test_bytes_come_back_and_the_peak_stays() -> None:
    budget = ByteBudget(100, "t")
    with budget.holding("a", 70):
        assert budget.used_bytes == 70
    with pytest.raises(RuntimeError), budget.holding("a", 40):
        raise RuntimeError
    assert (budget.used_bytes, budget.peak_bytes) == (0, 70)
    with pytest.raises(ValueError, match="more than it holds"):
        budget.release("a", 1)
    with pytest.raises(ValueError, match="at least 0"):
        budget.reserve("a", -1)


def test_threads_never_pass_the_limit_together() -> None:
    budget = ByteBudget(1000, "t")

    def take(part: int) -> int:
        taken = 0
        for _ in range(200):
            try:
                budget.reserve(str(part), 7)
                taken += 7
            except BudgetExceeded:
                break
        return taken

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(take, range(4))) == budget.used_bytes == 1000 - 1000 % 7
