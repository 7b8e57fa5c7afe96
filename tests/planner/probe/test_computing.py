"""How fast cores compute: three steps give three rates, and rates are kept for first answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from gnnplan.planner.probe import computing
from gnnplan.planner.probe.context import QUICK, ProbeContext
from gnnplan.planner.probe.presets import load_effects
from gnnplan.planner.probe.team import Team
from gnnplan.planner.profile.operations import RooflineRate, aggregation, layer_operations
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.models import functions
from tests.support.core_steps import Cores, seconds_of


@given(start=st.floats(5e-6, 1e-4), flops=st.floats(3e10, 1e12), moved=st.floats(5e9, 1e11))
def test_three_steps_give_the_rates_that_they_were_made_of(
    start: float, flops: float, moved: float
) -> None:
    found = computing.solve_rates(seconds_of(start, flops, moved))
    assert found is not None
    # A tiny step works a little beside its starts; what is left explains the other two.
    assert start <= found["core_start"] <= start + 4e-5
    said = seconds_of(*(found[name] for name in computing.NAMES))
    made = seconds_of(start, flops, moved)
    assert said[1:] == pytest.approx(made[1:], rel=0.02)


def test_faster_products_are_seen_as_such() -> None:
    slow, fast = (computing.solve_rates(seconds_of(1e-5, f, 3e10)) for f in (1e11, 2e11))
    assert slow is not None
    assert fast is not None
    assert fast["core_flops"] == pytest.approx(2 * slow["core_flops"], rel=0.1)
    assert fast["core_bytes"] == pytest.approx(slow["core_bytes"], rel=0.1)


@pytest.mark.parametrize("shape", computing.SHAPES)
def test_a_step_is_priced_in_the_order_in_which_its_layer_runs(
    shape: computing.LayerShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[str]()

    def record(name: str, layer: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **named: Any) -> Any:
            ran.append(name)
            return layer(*args, **named)

        return recorded

    for name in ("aggregate", "aggregate_dense"):
        monkeypatch.setattr(functions, name, record(name, getattr(functions, name)))
    step = computing.make_step(shape)
    ran.clear()
    step()
    (last,) = ran
    priced = layer_operations("sage", shape, product_first=last == "aggregate")
    assert computing.list_operations(shape) == list(priced)


def test_each_step_is_nearly_all_of_its_kind_on_such_cores() -> None:
    effects = load_effects()
    start, flops, moved = (
        effects[f"core_{name}"].value
        for name in ("start_seconds", "flops_per_second", "bytes_per_second")
    )
    rate = RooflineRate(flops=flops, bytes=moved)
    tiny, products, sums = (computing.list_operations(shape) for shape in computing.SHAPES)
    started = start * len(tiny)
    assert started > 0.9 * (started + sum(map(rate.seconds, tiny)))
    multiplied = [each for each in products if each.flops / flops > each.moved_bytes / moved]
    assert sum(map(rate.seconds, multiplied)) > 0.9 * sum(map(rate.seconds, products))
    shape = computing.SHAPES[computing.SUMS]
    wide = [each for each in sums if each == aggregation(shape, shape.in_dim)]
    assert sum(map(rate.seconds, wide)) > 0.75 * sum(map(rate.seconds, sums))


def all_starts(number: int) -> list[float]:
    """Seconds of the three steps, of which that one takes no longer than its starts."""
    found, start = seconds_of(1e-3, 1e11, 3e10), seconds_of(1e-3, 1e30, 1e30)
    return [start[each] if each == number else found[each] for each in range(3)]


UNEXPLAINED = {
    "products are starts": all_starts(computing.PRODUCTS),
    "sums are starts": all_starts(computing.SUMS),
    # Whatever the bytes take, the products of this step take longer at the rate of the other.
    "sums are faster than their products": [1e-6, 10.0, 1e-3],
}


@pytest.mark.parametrize("seconds", UNEXPLAINED.values(), ids=UNEXPLAINED)
def test_steps_that_tell_no_rate_give_none(seconds: list[float]) -> None:
    assert computing.solve_rates(seconds) is None


def test_a_probe_has_no_rates_of_such_steps_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ProbeContext(team=Team(1), sizes=QUICK, cores=1, scratch=tmp_path)
    took = list[float]()

    def run(*_: Any, number: int, **__: Any) -> list[list[float]]:
        return [[took[number]] * 3]

    monkeypatch.setattr(context.team, "run", run)
    took[:] = seconds_of(1e-5, 1e11, 3e10)
    assert computing.measure(context).keys() == computing.NAMES.keys()
    assert context.notes == []
    took[:] = all_starts(computing.SUMS)
    assert computing.measure(context) == {}
    assert context.notes == [
        "core rates: none, since no three explain the steps of a layer at threads 1; run gnnplan "
        "probe again when nothing else runs here"
    ]


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
    Cores(monkeypatch, seconds_of(1e-5, 1e11, 3e10))
    assert computing.known_rates(tmp_path) == {}
    computing.learn_rates(tmp_path)
    tables = computing.known_rates(tmp_path)
    assert {name: table.unit for name, table in tables.items()} == computing.NAMES
    assert all(table.points == [[1.0, 2.0]] for table in tables.values())
    assert all(min(table.values) > 0 for table in tables.values())


def test_nothing_is_learnt_on_a_machine_that_stays_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = Cores(monkeypatch, seconds_of(1e-5, 1e11, 3e10))
    cores.look_around(tmp_path)
    cores.look_seconds *= 2
    computing.learn_rates(tmp_path)
    assert computing.known_rates(tmp_path) == {}
    cores.look_seconds /= 2
    computing.learn_rates(tmp_path)
    assert computing.known_rates(tmp_path).keys() == computing.NAMES.keys()


@pytest.mark.parametrize("number", [computing.STARTS, computing.PRODUCTS, computing.SUMS])
def test_nothing_is_learnt_from_repeats_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    cores = Cores(monkeypatch, seconds_of(1e-5, 1e11, 3e10))
    cores.noisy = number
    computing.learn_rates(tmp_path)
    assert computing.known_rates(tmp_path) == {}


def test_nothing_is_learnt_from_steps_that_tell_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cores(monkeypatch, all_starts(computing.SUMS))
    computing.learn_rates(tmp_path)
    assert computing.known_rates(tmp_path) == {}


def test_rates_of_another_version_are_not_read(tmp_path: Path) -> None:
    rates = json.dumps({"1": {"core_start": 1e-5, "core_flops": 1e11, "core_bytes": 3e10}})
    for version in ("", f"{computing.VERSION + 1}-"):
        (tmp_path / f"computing-{version}{machine_fingerprint()}.json").write_text(rates)
    assert computing.known_rates(tmp_path) == {}


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
