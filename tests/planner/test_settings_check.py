"""Tests for planner/settings.py: no request holds a number that no training can use."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic.fields import FieldInfo

from gnnplan.api.requests import WorkloadRequest
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import FULL_GRAPH, PlanSettings, change_settings, check_workload
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import MOST_FANOUT, Links, Workload
from gnnplan.runtime.plan.setting import Range, setting_fields

NOT_FINITE = [math.nan, math.inf, -math.inf]
RANGES = {
    each.name: each.setting.range
    for each in setting_fields(PlanSettings)
    if each.setting.range is not None and not each.name.endswith("fanouts")
}


def changed(name: str, value: Any) -> PlanSettings:
    """A request with that one setting."""
    hops = value if name == "num_layers" and isinstance(value, int) and value > 0 else 2
    mode = "full-graph" if name in FULL_GRAPH else "auto"
    fanouts = [5] * min(hops, 99)
    return change_settings(PlanSettings(), {"mode": mode, "fanouts": fanouts, name: value})


def outside(wanted: Range) -> list[Any]:
    """Values at and beyond the ends of a range that it has not."""
    step = 1 if wanted.whole else 1e-9
    ends = [wanted.least - step, wanted.most + step]
    ends += [wanted.least] * wanted.above_least + [wanted.most] * wanted.below_most
    return ends if wanted.whole else [*ends, *NOT_FINITE]


def inside(wanted: Range) -> list[Any]:
    """Values at the ends of a range that it has."""
    step = 1 if wanted.whole else 1e-9
    low = wanted.least + step * wanted.above_least
    high = wanted.most - step * wanted.below_most
    return [low, high]


@pytest.mark.parametrize("name", RANGES)
def test_a_setting_outside_its_range_is_refused_with_its_option(name: str):
    wanted = RANGES[name]
    for value in outside(wanted):
        with pytest.raises(SettingsError, match=r"expected .*, found .*; correct --") as caught:
            changed(name, value)
        assert "\n" not in str(caught.value)
    for value in inside(wanted):
        changed(name, value)


def test_what_is_no_number_is_in_no_range():
    whole, real = Range(least=0, most=9), Range(least=0, most=9, whole=False)
    for value in (*NOT_FINITE, "8", True, None, 1j, [1]):
        assert not whole.has(value)
        assert not real.has(value)
    assert real.has(2.5)
    assert not whole.has(2.5)
    assert whole.has(np.int32(2))


@pytest.mark.parametrize("bad", [0, -2, MOST_FANOUT + 1, 2**40])
def test_fanouts_that_cannot_be_drawn_are_refused(bad: int):
    of_hops, of_type = Workload(fanouts=[5, bad]), Workload(type_fanouts={"cites": [bad, 5]})
    for work, option in ((of_hops, "--fanouts"), (of_type, "--type-fanouts")):
        with pytest.raises(SettingsError, match=f"fan-outs of at least 1.*correct {option}"):
            PlanSettings(workload=work)
    PlanSettings(workload=Workload(fanouts=[-1, MOST_FANOUT]))


@pytest.mark.parametrize(
    ("field", "option"),
    [("gcn_norm", "--gcn-norm"), ("precision", "--precision"), ("allow", "--allow")],
)
def test_a_word_that_is_no_choice_is_refused(field: str, option: str):
    work = Workload()
    object.__setattr__(work, field, "none of them")  # as a caller without type checks may
    with pytest.raises(SettingsError, match=f"expected one of .*found 'none of them'.*{option}"):
        check_workload(work)


@pytest.mark.parametrize("field", ["negatives", "exclude"])
def test_a_word_that_is_no_choice_of_links_is_refused(field: str):
    links = Links()
    object.__setattr__(links, field, "none of them")
    with pytest.raises(SettingsError, match=r"expected one of .*found 'none of them'"):
        check_workload(replace(Workload(), links=links))


def test_an_older_plan_with_such_numbers_is_still_read():
    old = Workload(learning_rate=-1.0, dropout=1.5, weight_decay=-1.0, hidden=0)
    assert codec.decode(Workload, codec.to_plain(old)) == old


def bounds(field: FieldInfo) -> dict[str, float]:
    """ge, gt, le and lt of a field of the service's requests."""
    found: dict[str, float] = {}
    marks = list(field.metadata)
    for inner in getattr(field.annotation, "__args__", ()):  # Annotated[...] | None
        marks += list(getattr(inner, "__metadata__", ()))
    for mark in marks:
        for part in getattr(mark, "metadata", [mark]):
            known = ("ge", "gt", "le", "lt")
            found |= {name: getattr(part, name) for name in known if hasattr(part, name)}
    return found


@pytest.mark.parametrize("name", [n for n in RANGES if n != "num_layers"])
def test_the_service_takes_what_the_command_line_takes(name: str):
    wanted = RANGES[name]
    low = "gt" if wanted.above_least else "ge"
    high = "lt" if wanted.below_most else "le"
    field = WorkloadRequest.model_fields[name]
    assert bounds(field) == {low: wanted.least, high: wanted.most}
