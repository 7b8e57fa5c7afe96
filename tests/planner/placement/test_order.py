"""Tests of planner.placement.order."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from gnnplan.planner.placement.order import hotness_order
from gnnplan.runtime.errors import InputError


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        st.integers(0, 60),
        elements=st.floats(0, 1000, width=32, allow_subnormal=True),
    )
)
@settings(deadline=None, max_examples=100)
def test_order_is_by_hotness_descending_then_id_ascending(hotness):
    expected = sorted(range(len(hotness)), key=lambda v: (-hotness[v], v))
    assert hotness_order(hotness).tolist() == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_order_of_counts_and_of_distinct_values_equals_lexsort(dtype):
    rng = np.random.default_rng(0)
    for hotness in (
        rng.pareto(1.2, 50_000).astype(dtype),
        rng.integers(0, 9, 50_000).astype(dtype),
    ):
        expected = np.lexsort((np.arange(len(hotness)), -hotness))
        np.testing.assert_array_equal(hotness_order(hotness), expected)


def test_negative_zero_ties_with_zero():
    assert hotness_order(np.array([-0.0, 0.0, 1.0])).tolist() == [2, 0, 1]


@pytest.mark.parametrize("bad", [-0.1, np.nan, np.inf])
def test_hotness_that_is_no_probability_is_refused_with_its_count(bad):
    with pytest.raises(InputError, match="found 2 others"):
        hotness_order(np.array([0.5, bad, 1.0, bad]))
