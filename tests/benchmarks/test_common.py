"""What every benchmark prints its lines with."""

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.common import Spread, record


def _strictly(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"expected JSON, found {word}")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_has_no_word_for_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    given = record(
        "name", None, "s", ratio=math.nan, gap=np.float64(math.inf), parts={"a": [1.5, -math.inf]}
    )
    printed = _strictly(capsys.readouterr().out)
    assert printed == {
        "name": "name", "value": None, "unit": "s", "baseline": None, "ratio": None,
        "gap": None, "parts": {"a": [1.5, None]},
    }  # fmt: skip
    assert math.isinf(given["gap"])  # the caller has what it gave


def test_a_spread_is_its_median_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    record("name", Spread.of([3.0, 1.0, 2.0]), "s", baseline=4.0, ratio=2.0)
    printed = _strictly(capsys.readouterr().out)
    assert (printed["value"], printed["repeats"], printed["ratio"]) == (2.0, 3, 2.0)
    assert (printed["p10"], printed["p90"]) == pytest.approx((1.2, 2.8))
