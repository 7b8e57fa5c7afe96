"""What our models say of published tables: the order of the methods, never the exact numbers."""

from typing import Any

import pytest

from tests.benchmarks.published import bns, compared, cooperative, same_order, tripathy
from tests.benchmarks.published_cooperative import Row
from tests.benchmarks.published_tables import RUNTIMES, rows


def ignore(name: str, value: float, unit: str, **extra: Any) -> None:
    """A line nobody prints; it must be one that could be."""
    assert value > 0, name
    assert unit
    assert extra.get("why") or extra["within"], name


def published_row(pes: int, dataset: str, sampler: str, mode: str) -> Row:
    """The table's own line, as a model that is always right would answer."""
    for line in rows(RUNTIMES):
        if (line["pes"], line["dataset"], line["sampler"], line["mode"]) == (
            str(pes),
            dataset,
            sampler,
            mode,
        ):
            feat = float(line["feat_cache_kappa"] or line["feat_cache"])
            return Row(samp=float(line["samp"]) / 1e3, feat=feat / 1e3, fb=float(line["fb"]) / 1e3)
    raise AssertionError("no such line")


def test_the_published_numbers_pass_their_own_verdicts() -> None:
    verdicts = cooperative(ignore, published_row)
    assert len(verdicts) == 12 + 4
    assert all(verdicts.values())


def test_a_model_without_gain_fails_the_verdicts() -> None:
    flat = Row(samp=1e-3, feat=1e-3, fb=1e-3)
    verdicts = cooperative(lambda *a, **k: None, lambda *key: flat)
    assert not any(verdicts.values())


KNOWN_MISSES = {"efficiencies", "comm_MB_reddit2", "epoch_s_reddit2"}
"""Where our models do not give the published order, as the benchmark says with its reasons: numbers
of GPUs that the text lacks, and edges per boundary node of a partition that is not at hand."""


def test_efficiencies_and_boundary_methods_come_out_in_the_published_order() -> None:
    # formulas 4.9: 88% Products, 61% Protein, 47% Papers; 3.7: BNS < BES < DropEdge.
    verdicts = tripathy(ignore) | bns(ignore)
    assert len(verdicts) == 1 + 9 + 6
    assert {name for name, right in verdicts.items() if not right} <= KNOWN_MISSES


def test_lines_far_from_the_paper_say_why() -> None:
    seen: list[dict[str, Any]] = []

    def keep(name: str, value: float, unit: str, **extra: Any) -> None:
        seen.append({"name": name, "value": value, "unit": unit, **extra})

    assert compared(keep, "near", 1.2, 1.0, "s", "because")
    assert not compared(keep, "far", 1.3, 1.0, "s", "because")
    assert ["why" in line for line in seen] == [False, True]
    assert seen[1]["ratio"] == pytest.approx(1.3)


def test_ties_of_a_paper_fall_either_way() -> None:
    assert same_order([2.0, 1.0, 3.0], [1.0, 1.0, 2.0])
    assert not same_order([3.0, 1.0, 2.0], [1.0, 1.0, 2.0])
