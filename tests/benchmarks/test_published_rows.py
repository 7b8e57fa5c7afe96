"""Reading rows of published figures by general words, and scoring their predictions honestly."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.published_cases import Case, case_of, cases_of
from tests.benchmarks.published_csv import predict, report
from tests.benchmarks.published_fit import Fit, from_first_rows, half_widths
from tests.benchmarks.published_rows import COLUMNS, Row, read_rows
from tests.benchmarks.published_score import Scored, groups, in_order

PLAIN = Row(
    id="a", system="DGL 1.0", quantity="epoch time", value=10.0, unit="s",
    hardware="4x V100 32GB", gpus=4, hosts=1, dataset="ogbn-products", model="GraphSAGE", layers=2,
    hidden=64, fanouts="5,10", batch="512 per GPU", cache="sampling on UVA, features UVA", notes="",
    source="github some/paper exp/a.md",
)  # fmt: skip


def case(**changed: Any) -> Case:
    return case_of(replace(PLAIN, **changed))


def test_words_lead_to_machine_graph_model_and_framework() -> None:
    found = case()
    assert found.machine
    assert found.graph == "products"
    assert found.model == "sage"
    assert (found.system, found.sampling, found.rows) == ("dgl-uva", "host", "in_place")
    assert found.fanouts == (10, 5)  # DGL's lists end next to the seeds
    assert case(system="PyG 2.6").fanouts == (5, 10)
    assert not found.notes
    assert not found.reason


@pytest.mark.parametrize(
    ("hardware", "begins"),
    [
        ("DGX-1-class: NVIDIA V100 16GB (8 in box)", "dgx-v100"),
        ("NVIDIA H100-SXM5-80GB; NVLINK; Intel(R) Xeon(R) 8480C", "hgx-h100"),
        ("8xA100-80 of a DGX A100", "dgx-a100"),
    ],
)
def test_hardware_is_the_preset_of_the_same_chip_and_name(hardware: str, begins: str) -> None:
    assert case(hardware=hardware, gpus=8).machine == begins


def test_words_that_nobody_knows_fall_to_a_default_and_say_so() -> None:
    found = case(
        system="Zebra 7", hardware="an odd box", dataset="unheard-of (3M nodes, 40M edges, dim 77)",
        model="Quux", fanouts="?", batch="", cache="",
    )  # fmt: skip
    assert len(found.notes) == 5
    assert (found.preset.nodes, found.preset.edges, found.preset.feature_dim) == (3e6, 40e6, 77)
    assert found.machine
    assert found.system
    assert found.fanouts


def test_what_cannot_be_predicted_has_a_reason() -> None:
    assert case(quantity="test accuracy", unit="%").reason
    assert case(model="GIN graph property").reason
    assert case(quantity="widgets", unit="furlongs").reason


@pytest.mark.parametrize(
    ("quantity", "unit", "kind", "stages", "per"),
    [
        ("epoch time", "s", "time", 4, "epoch"),
        ("training seconds per epoch without evaluation", "s", "time", 4, "epoch"),
        ("train seconds per epoch", "s", "time", 1, "epoch"),
        ("sample seconds per epoch, slowest trainer", "s", "time", 1, "epoch"),
        ("feature copy seconds per batch", "ms", "time", 1, "step"),
        ("data loading seconds per epoch", "s", "time", 2, "epoch"),
        ("GPU cache miss rate", "share", "miss", 3, "epoch"),
        ("cache hit rate", "%", "hit", 3, "epoch"),
        ("input nodes per batch", "nodes", "inputs", 3, "epoch"),
        ("sampling throughput", "M edges/s", "rate", 1, "edges"),
    ],
)
def test_quantities_are_read_from_their_words(
    quantity: str, unit: str, kind: str, stages: int, per: str
) -> None:
    asked = case(quantity=quantity, unit=unit).asked
    assert (asked.kind, len(asked.stages), asked.per) == (kind, stages, per)


def rows_of_two_papers() -> list[Row]:
    """Made-up times of two papers, one framework in both."""
    found = []
    for paper, slower in (("one", 1.0), ("two", 3.0)):
        for gpus, value in ((1, 8.0), (2, 4.4), (3, 3.2), (4, 2.6)):
            found.append(
                replace(
                    PLAIN, id=f"{paper}-{gpus}", gpus=gpus, value=slower * value, dataset="reddit",
                    source=f"github some/{paper}",
                )
            )  # fmt: skip
    return found


def test_a_paper_s_own_figures_do_not_enter_its_predictions() -> None:
    rows = rows_of_two_papers()
    changed = [replace(r, value=100 * r.value) if r.id.startswith("one") else r for r in rows]
    before, after = (predict(cases_of(each)) for each in (rows, changed))
    values = [{x.case.row.id: x.value for x in each.scored} for each in (before, after)]
    for name, value in values[0].items():
        if name.startswith("one"):
            assert values[1][name] == value
        else:
            assert values[1][name] > 2 * value
    assert set(before.origins.values()) == {"version"}
    assert before.one_row["one-1"] is None
    assert before.one_row["one-2"] is not None
    assert before.one_row["one-2"] == pytest.approx(
        values[0]["one-2"] * 8.0 / values[0]["one-1"], rel=1e-9
    )


def test_a_class_stands_in_for_a_framework_that_no_other_paper_has() -> None:
    rows = rows_of_two_papers()
    alone = [r if r.id.startswith("one") else replace(r, system="GraphBolt") for r in rows]
    timed = predict(cases_of(alone)).timed
    origins = {row.system: Fit(timed).left_out(row).origin for row in timed}
    assert set(origins.values()) == {"class"}


def test_intervals_come_from_other_papers() -> None:
    widths = half_widths(["a", "a", "b", "b"], [0.5, -0.2, 2.0, 2.0])
    assert widths["a"] == 2.0
    assert widths["b"] == 0.5


def test_the_first_row_of_a_framework_gives_its_overhead_and_is_not_scored() -> None:
    timed = predict(cases_of(rows_of_two_papers())).timed
    found = from_first_rows(timed, [1.0] * len(timed))
    assert [x is None for x in found] == 2 * [True, False, False, False]
    assert found[1] == pytest.approx(8.0)
    assert found[5] == pytest.approx(24.0)


def scored(ours: float, published: float, **changed: Any) -> Scored:
    return Scored(case=case(value=published, **changed), value=ours, low=0.0, high=100.0)


def test_groups_differ_in_one_setting_alone_and_their_order_is_judged() -> None:
    made = [
        scored(10.0, 9.0, id="1", gpus=1),
        scored(6.0, 5.0, id="2", gpus=2),
        scored(7.0, 3.0, id="3", gpus=4),
        scored(1.0, 1.0, id="4", gpus=1, dataset="reddit", batch="64"),
    ]
    (only,) = groups(made)
    assert [x.case.row.id for x in only] == ["1", "2", "3"]
    assert not in_order(only)
    assert in_order(only[:2])
    alike = [scored(1.0, 9.0), scored(2.0, 8.9, gpus=2)]
    assert in_order(alike)  # printed as equal machines would differ


def test_a_file_is_reported_row_by_row_and_a_bad_row_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    rows = [
        {name: str(getattr(PLAIN, name)) for name in COLUMNS} | {"id": "good"},
        {**dict.fromkeys(COLUMNS, ""), "id": "bad", "value": "0", "unit": "s"},
        {**dict.fromkeys(COLUMNS, ""), "id": "none", "value": "?", "unit": "s"},
        {**dict.fromkeys(COLUMNS, ""), "id": "score", "value": "1", "quantity": "accuracy"},
    ]
    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    lines: dict[str, dict[str, Any]] = {}

    def keep(name: str, value: Any, unit: str, **words: Any) -> None:
        lines[name] = {"value": value, "unit": unit, **words}

    cases = cases_of(read_rows(path))
    report(cases, predict(cases), keep, frozenset())
    assert lines["good"]["value"] > 0
    assert lines["good"]["interval"][0] < lines["good"]["value"]
    assert lines["bad"]["value"] is None
    assert "above 0" in lines["bad"]["why"]
    assert "no number" in lines["none"]["why"]
    assert lines["score"]["value"] is None
    assert lines["csv_rows"]["value"] == 1
