"""A setting is declared once: flag, REST body, client, form and page are made of its field."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from pydantic import ValidationError

from gnnplan.api.dashboard.plans import form_fields
from gnnplan.api.requests import GraphRequest, WorkloadRequest, with_settings
from gnnplan.planner.cli.common import option_fields, with_options
from gnnplan.planner.client.resources import profile_body
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.setting import Range, Setting, flat_values, make_from


@dataclass(frozen=True, kw_only=True, slots=True)
class ToySettings(PlanSettings):
    """A copy of the request's schema with one field more."""

    toy_weight: Annotated[int, Setting(help="Weight of the toy.", range=Range(least=1, most=9))] = 3


@pytest.fixture
def asked() -> list[ToySettings]:
    """What commands were asked."""
    return []


@pytest.fixture
def toy_app(asked: list[ToySettings]) -> typer.Typer:
    """A command of the toy request."""
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @with_options(settings=None)
    def make(graph: str, *, settings: ToySettings) -> None:
        assert graph == "g"
        asked.append(settings)

    return app


def test_a_new_field_is_a_flag_with_its_help_and_its_range(
    toy_app: typer.Typer, asked: list[ToySettings], capsys: pytest.CaptureFixture[str]
):
    toy_app(["g"], standalone_mode=False)
    toy_app(["g", "--toy-weight", "7", "--num-negatives", "2"], standalone_mode=False)
    assert [each.toy_weight for each in asked] == [3, 7]
    assert [each.workload.links.num_negatives for each in asked] == [1, 2]
    toy_app(["--help"], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "--toy-weight" in shown
    assert "Weight of the toy." in shown
    with pytest.raises(
        SettingsError, match=r"toy weight: expected .* at most 9, found 0; correct "
    ):
        toy_app(["g", "--toy-weight", "0"], standalone_mode=False)


def test_a_new_field_is_sent_by_the_client_and_taken_by_the_service():
    request = with_settings(GraphRequest, ToySettings)
    sent = profile_body("g", ToySettings(toy_weight=7))
    assert sent["toy_weight"] == 7
    assert request.model_validate(sent).model_dump()["toy_weight"] == 7
    shown = request.model_json_schema()["properties"]["toy_weight"]
    assert (shown["default"], shown["minimum"], shown["maximum"]) == (3, 1, 9)
    with pytest.raises(ValidationError, match="toy_weight"):
        request.model_validate({"graph": "g", "toy_weight": 10})


def test_a_new_field_stands_in_the_dashboards_form():
    assert {each.name for each in form_fields(ToySettings)} >= {"toy_weight", "model", "exclude"}


def test_every_setting_is_on_every_surface_that_it_names():
    flags = {each.name for each in option_fields(PlanSettings)}
    body = set(WorkloadRequest.model_fields) & set(flat_values(PlanSettings()))
    form = {each.name for each in form_fields()}
    assert flags - body == {"num_layers"}
    assert body - flags == {"sampler_parameters", "other_samplers"}
    assert form == flags & body


def test_values_by_name_are_the_request_again():
    settings = ToySettings(toy_weight=2, devices=3)
    assert make_from(ToySettings, flat_values(settings)) == settings
