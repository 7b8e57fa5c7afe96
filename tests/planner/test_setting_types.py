"""A setting of any request takes values of its own type alone, and is refused before all else.

The tests' checks of arguments would be faster than those of the product: what has wrong types is
asked in a process without them, `python -m tests.planner.test_setting_types`.
"""

import json
import math
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from pydantic import BaseModel, ValidationError

import gnnplan
from gnnplan.api.requests import EstimateRequest, RunRequest, SamplerRequest, WorkloadRequest
from gnnplan.planner.cli.common import option_fields
from gnnplan.planner.cli.main import main
from gnnplan.planner.queries.estimate import EstimateSettings
from gnnplan.planner.queries.tuned import TuneRequest
from gnnplan.planner.settings import PlanSettings, SamplerChoice, change_settings
from gnnplan.planner.units import parse_sampler
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.launch.config import RunConfig, TrainOptions
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.plan.setting import setting_fields
from gnnplan.runtime.sampling.registry import number, parameters_of

ROOT = Path(__file__).parents[2]
VALUES: dict[str, Any] = {
    "none": None, "list": [], "dict": {}, "text": "x", "truth": True, "nan": math.nan,
    "inf": math.inf, "tuple": (5, 5), "object": object(),
}  # fmt: skip
TEXTS = ["nan", "inf", "x", "None", "[]", "True"]


def kinds_of(hint: Any) -> set[str]:
    """Names of `VALUES` that are of a declared type."""
    if isinstance(hint, types.UnionType):
        return set[str]().union(*map(kinds_of, typing.get_args(hint)))
    kind = typing.get_origin(hint) or hint
    known = {types.NoneType: {"none"}, list: {"list"}, dict: {"dict"}, bool: {"truth"}}
    return {str: {"text"}, int: set[str](), float: set[str](), Literal: set[str](), **known}[kind]


@dataclass(frozen=True)
class Case:
    """A request that cannot be, and the line that refuses it."""

    name: str
    ask: Callable[[], Any]
    words: str
    """Pattern of the line."""
    error: str = "SettingsError"


def of_type(
    title: str, kind: type, ask: Callable[[dict[str, Any]], Any], **more: str
) -> list[Case]:
    """Each field of a request with each value that is of another type."""
    hints = {each.name: each.hint for each in setting_fields(kind)}
    if not hints:
        every = typing.get_type_hints(kind)
        hints = {each.name: every[each.name] for each in fields(kind)}
    return [
        Case(
            name=f"{title}: {name} {value}",
            ask=lambda name=name, value=value: ask({name: VALUES[value]}),
            words=rf"^{name.replace('_', ' ')}: expected .+, found .+$",
            **more,
        )
        for name, hint in hints.items()
        for value in VALUES
        if value not in kinds_of(hint)
    ]


def change(values: dict[str, Any]) -> Any:
    return change_settings(PlanSettings(), values)


def start(values: dict[str, Any]) -> Any:
    return gnnplan.train("no-such-plan", **values)


def of_words(changes: Callable[[], dict[str, Any]], words: str) -> Case:
    return Case(name=words, ask=lambda: change(changes()), words=f"expected {words}")


CASES = [
    *of_type("plan", PlanSettings, change),
    *of_type("estimate", EstimateSettings, lambda values: replace(EstimateSettings(), **values)),
    *of_type("train", TrainOptions, start),
    *of_type("tune", TuneRequest, lambda values: TuneRequest(**values)),
    *of_type(
        "run",
        RunConfig,
        lambda values: RunConfig(**{"plan_folder": "plan", "run_folder": "run", **values}),
        error="InputError",
    ),
    of_words(lambda: {"fanouts": [5, math.nan]}, "a list of whole numbers, found .5, nan."),
    of_words(lambda: {"fanouts": [5, True]}, "a list of whole numbers, found .5, True."),
    of_words(
        lambda: {"type_fanouts": {"cites": (5, 5)}},
        "a dict of lists of whole numbers by name, found .'cites': .5, 5",
    ),
    of_words(
        lambda: {"type_fanouts": {"cites": None}},
        "a dict of lists of whole numbers by name, found .'cites': None",
    ),
    of_words(
        lambda: {"sampler_parameters": {"kappa": math.nan}}, "a dict of numbers or texts by name"
    ),
    of_words(
        lambda: {"other_samplers": ["labor"]}, "a list of SamplerChoice objects, found .'labor'."
    ),
    of_words(
        lambda: {"other_samplers": [SamplerChoice(name=VALUES["none"])]}, "a text, found None"
    ),
    of_words(
        lambda: {"learning_rate": None},
        "a number above 0 and at most 1,000, found None; correct --learning-rate",
    ),
    of_words(lambda: {"seed": 10**400}, "a whole number of at least 0 and at most .*, found 1000"),
    of_words(lambda: {"seed": 10**5000}, "a whole number of at least 0 .*, found a value of too"),
    of_words(lambda: {"workload": None}, "a Workload, found None"),
    of_words(lambda: {"workload": Workload}, "a Workload, found <class"),
    of_words(lambda: {"links": None}, "a Links, found None"),
    *(
        Case(
            name=f"a graph that is not there, and {changes}",
            ask=lambda changes=changes: gnnplan.plan("no-such-graph", "no-such-plan", **changes),
            words="expected .*, found ",
        )
        for changes in cast("list[Any]", [{"hidden": None}, {"quick": "no"}, {"settings": {}}])
    ),
    Case("train with a plan's settings", lambda: start({"settings": {}}), "found them beside a"),
    Case("unknown", lambda: start({"epoch": 3}), r"found 'epoch' \(did you mean epochs"),
    Case(
        "of a run alone",
        lambda: start({"keep_checkpoints": None}),
        "keep checkpoints: expected a whole number, found None",
        "InputError",
    ),
]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """The error of each case and its text, as users have them."""
    command = [sys.executable, "-m", "tests.planner.test_setting_types"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_cannot_be_is_refused_in_a_line_that_names_it(
    case: Case, answers: dict[str, list[str]]
):
    error, text = answers[case.name]
    assert (error, "\n" in text) == (case.error, False), text
    assert re.search(case.words, text), text


def test_values_of_the_right_types_are_taken():
    work = {"type_fanouts": {"cites": [3, 2]}, "dropout": 0, "fanouts": [5, -1]}
    found = change_settings(PlanSettings(), {"devices": None, "sampler": "labor", **work})
    parameters = {"sampler_parameters": {"kappa": 4, "dependence": "frozen"}}
    found = change_settings(found, {**parameters, "other_samplers": [SamplerChoice(name="full")]})
    assert (found.workload.dropout, found.sampler_parameters["kappa"]) == (0, 4)


def numbers_of(kind: type) -> list[Any]:
    """Flags that take numbers, each with each text that is none."""
    return [
        pytest.param(each.flag, text, id=f"{each.flag}={text}")
        for each in option_fields(kind)
        for text in TEXTS
        if not ({"text", "truth"} & kinds_of(each.hint) or each.choices)
    ]


@pytest.mark.parametrize(("flag", "text"), numbers_of(PlanSettings))
def test_a_text_that_is_no_number_is_refused_as_a_flags_value(
    flag: str, text: str, capsys: pytest.CaptureFixture[str]
):
    value = f"cites={text}" if flag == "--type-fanouts" else text
    assert main(["plan", "nowhere", "-o", "plan", flag, value]) == 2
    told = capsys.readouterr().err
    assert flag in told
    assert "nowhere" not in told


def test_an_infinite_time_is_no_option_of_the_command_either(capsys: pytest.CaptureFixture[str]):
    for text in ("nan", "inf"):
        assert main(["train", "nowhere", "--hang-seconds", text]) == 2
        told = capsys.readouterr().err
        assert f"hang seconds: expected a number above 0 and at most 86,400, found {text}" in told


@pytest.mark.parametrize("size", ["9" * 400, "nan", "inf", "1e9"])
def test_a_size_that_is_none_is_refused(size: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "nowhere", "-o", "plan", "--device-memory", size]) == 2
    assert "--device-memory: expected a size such as" in capsys.readouterr().err


REQUESTS: dict[type[BaseModel], tuple[type, dict[str, Any]]] = {
    WorkloadRequest: (PlanSettings, {"graph": "g"}),
    RunRequest: (TrainOptions, {"plan": "p"}),
    EstimateRequest: (EstimateSettings, {}),
}


@pytest.mark.parametrize("request_type", REQUESTS)
def test_the_service_refuses_the_same_values(request_type: type[BaseModel]):
    kind, body = REQUESTS[request_type]
    request_type.model_validate(body)
    for each in setting_fields(kind):
        for name, value in VALUES.items():
            if each.setting.surface != "flag" and name not in kinds_of(each.hint):
                with pytest.raises(ValidationError, match=each.name):
                    request_type.model_validate({**body, each.name: value})
    with pytest.raises(ValidationError, match="parameters"):
        SamplerRequest.model_validate({"name": "labor", "parameters": {"kappa": math.nan}})


@pytest.mark.parametrize("text", ["inf", "nan"])
def test_a_parameter_without_end_stays_a_text_that_the_sampler_reads(text: str):
    made = parse_sampler(f"labor:kappa={text}", "--sampler")
    assert made.parameters == {"kappa": text}
    values = parameters_of(Sampler(name="labor", parameters=made.parameters))
    if text == "inf":
        assert math.isinf(number("labor", values, "kappa"))
    else:
        with pytest.raises(SamplerError, match="expected kappa to be a number, found 'nan'"):
            number("labor", values, "kappa")


def answer(case: Case) -> list[str]:
    try:
        case.ask()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", "it was taken"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({case.name: answer(case) for case in CASES}))
