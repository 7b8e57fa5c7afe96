"""Batches are those of the record, of every sampler in every form in which it draws."""

import importlib.util
import json
from typing import Any

import numpy as np
import pytest

from tests.golden_batches.batches import FORMS, KEPT, OTHERS, PLANS, RELATIVE, Case, cases, digest

HASHES: dict[str, Any] = json.loads(KEPT.read_text())
INTERPRETED = ("gpu", "gpu stack")
QUICK = ("neighbor", "labor", "ladies")
"""Of the interpreted kernels, those of every run; the rest is slow."""
CASES = list(cases())


def check(case: Case) -> None:
    if case.form in INTERPRETED and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: kernels of a GPU cannot even be interpreted")
    expected, found = HASHES[case.name], digest(case)
    assert found.get("refused") == expected.get("refused")
    assert found.get("batches") == expected.get("batches")
    np.testing.assert_allclose(found.get("weights", []), expected.get("weights", []), rtol=RELATIVE)


def test_every_case_is_kept_and_no_other():
    assert sorted(HASHES) == sorted(case.name for case in CASES)


@pytest.mark.parametrize("form", FORMS)
def test_samplers_of_a_form_draw_different_batches(form: str):
    drawn = [HASHES[f"{name} every_hop {form}"] for name in PLANS]
    hashes = [each["batches"] for each in drawn if "batches" in each]
    assert len(hashes) >= 4
    assert len({*hashes}) == len(hashes)


@pytest.mark.parametrize("name", PLANS)
def test_single_batches_are_those_of_a_stack_and_of_a_gpu(name: str):
    for dialect in PLANS[name].dialects:
        alone = HASHES[f"{name} {dialect} single"]["batches"]
        for form in ("stack", "gpu", "gpu stack"):
            found = HASHES[f"{name} {dialect} {form}"]
            assert "refused" in found or found["batches"] == alone


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.form not in INTERPRETED], ids=lambda case: case.name
)
def test_batches_are_those_that_are_kept(case: Case):
    check(case)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.form in INTERPRETED and c.sampler in QUICK],
    ids=lambda case: case.name,
)
def test_batches_of_interpreted_kernels_are_those_that_are_kept(case: Case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.form in INTERPRETED and c.sampler not in QUICK],
    ids=lambda case: case.name,
)
def test_batches_of_all_interpreted_kernels_are_those_that_are_kept(case: Case):
    check(case)


def test_samplers_that_no_plan_names_are_kept_too():
    assert {f"{name} every_hop single" for name in OTHERS} <= set(HASHES)
