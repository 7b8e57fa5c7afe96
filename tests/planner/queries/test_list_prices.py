"""Prices of machines: dated, of presets, and refused in a line where a file is damaged."""

from pathlib import Path

import pytest

from gnnplan.planner.probe.presets import is_preset
from gnnplan.planner.queries.list_prices import read_prices
from gnnplan.runtime.errors import InputError


def test_listed_prices_are_dated_and_of_presets():
    listed = read_prices()
    assert listed
    for name, price in listed.items():
        assert is_preset(name), name
        assert price.date[:2] == "20"
        assert len(price.source) > 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dgx-a10: {dollars_per_hour: 1, date: 2026-01-31, source: x}", "did you mean dgx-a100"),
        ("dgx-a100: {dollars_per_hour: -1, date: 2026-01-31, source: x}", "above 0"),
        ("dgx-a100: 3", "expected lines like"),
        ("- 3", "expected lines like"),
        ("{", "YAML"),
    ],
)
def test_a_price_file_that_cannot_be_is_refused_in_a_line(tmp_path: Path, text: str, words: str):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(InputError, match=words) as refused:
        read_prices(tmp_path / "p.yaml")
    assert "\n" not in str(refused.value)
