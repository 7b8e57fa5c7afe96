"""What the second measured set draws, keeps and sums up; its runs are a benchmark's."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.drawn import COLUMNS, RECORDS, ROOT, read_lines, summarize, table_row
from tests.benchmarks.drawn_cases import MOST_DRAWN, PACKS, draw_case, make_graph
from tests.benchmarks.prediction_cases import FEATURES, GENERATED


def test_each_seed_draws_others_and_one_seed_draws_the_same() -> None:
    first, again, other = ([draw_case(seed, i) for i in range(36)] for seed in (7, 7, 8))
    assert first == again
    assert not any(one == two for one, two in zip(first, other, strict=True))
    assert first[5] == draw_case(7, 5)


def test_what_is_drawn_is_of_the_stated_distribution_and_was_never_used_before() -> None:
    every = [draw_case(seed, i) for seed in range(40) for i in range(36)]
    assert {one.model for one in every} == {"sage", "gcn", "gat", "rgcn"}
    assert {one.task for one in every} == {"node", "link", "typed", "full"}
    assert {one.layers for one in every} == {1, 2, 3}
    assert {one.ranks for one in every} == {1, 2}
    for one in every:
        assert 32 <= one.hidden <= 512
        assert one.hidden % 8 == 0
        assert (one.model == "rgcn") == (one.task == "typed")
        assert len(one.fanouts) == (0 if one.task == "full" else one.layers)
        assert all(2 <= fanout <= 20 for fanout in one.fanouts)
        assert one.batch * math.prod(one.fanouts) <= MOST_DRAWN
        assert one.batch <= 4096
        assert one.source not in {*FEATURES, *GENERATED}
    batches = sorted(one.batch for one in every if one.task != "full")
    assert batches[len(batches) // 10] < 130
    assert batches[-len(batches) // 10] > 600


def test_a_drawn_graph_has_the_drawn_sizes(tmp_path: Path) -> None:
    drawn = next(one for i in range(99) if (one := draw_case(3, i)).source == "links")
    graph = make_graph(drawn, tmp_path / "graph", tmp_path)
    assert graph.num_nodes == drawn.sizes["nodes"]
    assert graph.feature_dim == drawn.sizes["columns"]
    assert str(graph.task) == "link"


def test_packs_were_never_those_of_the_first_set() -> None:
    assert not {name for of in PACKS.values() for name in of} & set(FEATURES)


def line(number: int, predicted: float, measured: float, **more: Any) -> dict[str, Any]:
    held = {
        "ape": abs(predicted - measured) / measured,
        "inside": 0.9 * predicted <= measured <= 1.1 * predicted,
    }
    return {
        "case": number, "configuration": str(number), "step": held, "epoch": held,
        "calibrated_ape": 0.5, **more,
    }  # fmt: skip


def test_the_summary_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(0, 1.0, 1.0, regret=0.0), line(1, 1.5, 1.0, regret=0.04), line(2, 0.8, 1.0)]
    found = {each["name"]: each for each in summarize([*lines, {"configuration": "3", "case": 3}])}
    assert found["step_ape_median"]["value"] == pytest.approx(0.2)
    assert found["step_ape_median"]["calibrated"] == 0.5
    assert "calibrated" not in found["epoch_ape_median"]
    assert found["regret_mean"]["value"] == pytest.approx(0.02)
    assert found["regret_worst"]["value"] == pytest.approx(0.04)
    assert found["coverage90"]["value"] == pytest.approx(1 / 3)
    assert (found["failed"]["value"], found["failed"]["which"]) == (1, ["3"])
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_first_answers_are_summed_up_where_they_were_estimates() -> None:
    first = [
        {"low": 0.5, "high": 1.5, "estimated": True},
        {"low": 2.0, "high": 3.0, "estimated": True},
        {"low": 2.0, "high": 3.0, "estimated": False},
    ]
    lines = [line(i, 1.0, 1.0, value=1.0, first=each) for i, each in enumerate(first)]
    found = {each["name"]: each for each in summarize(lines)}
    assert found["first_coverage90"]["value"] == pytest.approx(0.5)
    assert found["first_coverage90"]["configurations"] == 2


def test_the_page_shows_every_complete_run() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    records = sorted(RECORDS.glob("drawn_*.jsonl"))
    assert records
    assert COLUMNS in page
    assert all(table_row(each) in page for each in records)


def test_the_readmes_figures_are_those_of_one_run() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())

    def says(record: Path) -> bool:
        cells = table_row(record).strip("| ").split(" | ")
        planned, cases = cells[1].split(" of ")
        (off, late), (mean, worst) = cells[2].split(" / "), cells[4].split(" (")[0].split(" / ")
        return (
            f"over {cases} configurations that nobody had seen ({planned} planned)" in readme
            and f"off by {off} at the median and {late} at the 90th percentile" in readme
            and f"cost {mean} more than the best measured one on average, {worst} at worst"
            in readme
            and f"else {cells[6]}" in readme
        )

    assert any(says(record) for record in RECORDS.glob("drawn_*.jsonl"))


def test_a_killed_run_goes_on_and_another_seed_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "record.jsonl"
    assert read_lines(out, "a") == {}
    kept = [{"seed": "a", "commit": "a"}, {"name": "drawn", "case": 4}, {"name": "failed"}]
    out.write_text("\n".join(map(json.dumps, kept)) + '\n{"name": "drawn", "cas')
    assert list(read_lines(out, "a")) == [4]
    with pytest.raises(SystemExit, match="expected seed b, found a"):
        read_lines(out, "b")
