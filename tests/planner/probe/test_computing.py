"""How fast cores compute: three steps give three rates, and rates are kept for first answers."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from gnnplan.planner.probe import computing
from gnnplan.planner.profile.operations import RooflineRate, layer_operations


def seconds_of(start: float, flops: float, moved: float) -> list[float]:
    """Seconds of the three steps on cores of these rates."""
    rate = RooflineRate(flops=flops, bytes=moved)
    operations = [list(layer_operations("sage", shape)) for shape in computing.SHAPES]
    return [len(each) * start + sum(map(rate.seconds, each)) for each in operations]


@given(start=st.floats(5e-6, 1e-4), flops=st.floats(3e10, 1e12), moved=st.floats(5e9, 1e11))
def test_three_steps_give_the_rates_that_they_were_made_of(
    start: float, flops: float, moved: float
) -> None:
    found = computing.solve_rates(seconds_of(start, flops, moved))
    # A tiny step works a little beside its starts; what is left explains the other two.
    assert start <= found["core_start"] <= start + 4e-5
    said = seconds_of(*(found[name] for name in computing.NAMES))
    made = seconds_of(start, flops, moved)
    assert said[1:] == pytest.approx(made[1:], rel=0.02)


def test_faster_products_are_seen_as_such() -> None:
    slow, fast = (computing.solve_rates(seconds_of(1e-5, f, 3e10)) for f in (1e11, 2e11))
    assert fast["core_flops"] == pytest.approx(2 * slow["core_flops"], rel=0.1)
    assert fast["core_bytes"] == pytest.approx(slow["core_bytes"], rel=0.1)


@pytest.mark.parametrize("shape", computing.SHAPES)
def test_a_step_computes_gradients_and_leaves_the_callers_numbers_and_threads(
    shape: computing.LayerShape,
) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with computing.computing_on(1):
        step = computing.make_step(shape)
        assert torch.get_num_threads() == 1
    step()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_learnt_rates_are_kept_for_the_threads_that_were_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "usable_cores", lambda: 2)
    assert computing.known_rates(tmp_path) == {}
    computing.learn_rates(tmp_path)
    tables = computing.known_rates(tmp_path)
    assert {name: table.unit for name, table in tables.items()} == computing.NAMES
    assert all(table.points == [[1.0, 2.0]] for table in tables.values())
    assert all(min(table.values) > 0 for table in tables.values())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"1": {}}', '{"one": {"core_flops": 1}}']
)
def test_a_damaged_file_of_rates_counts_as_none(tmp_path: Path, content: str) -> None:
    computing._file(tmp_path).write_text(content)
    assert computing.known_rates(tmp_path) == {}


def test_a_file_with_a_rate_of_nothing_counts_as_none(tmp_path: Path) -> None:
    rates = dict.fromkeys(computing.NAMES, 0.0)
    computing._file(tmp_path).write_text(json.dumps({"1": rates}))
    assert computing.known_rates(tmp_path) == {}
