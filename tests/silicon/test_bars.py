"""Bars are judged on a GPU and said in every line; plans are held to theirs and to their memory."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnplan.planner.profile import profile
from gnnplan.planner.profile.protocol import GPU, GpuTimingRequest
from gnnplan.runtime import codec
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.plan.schema import MemoryUse, Sampler, Workload
from tests.silicon import papers, planned, training
from tests.silicon.bars import Bars, open_bars
from tests.silicon.experiments import EXPERIMENTS
from tests.silicon.queue import hash_files, parse_lines
from tests.silicon.setting import Setting
from tests.support.plans import make_plan

GPU_SETTING = Setting()
"""Of a GPU; nothing here asks it for its device."""


class TestBars:
    def test_a_line_says_value_bar_and_whether_it_was_met(self, capsys: pytest.CaptureFixture[str]):
        with open_bars(GPU_SETTING) as (bars, folder):
            assert folder.is_dir()
            bars.hold("step", 1.2e-3, "s", ratio=1.25, most=1.4e-3, most_ratio=1.3)
            bars.hold("speed", 3.0, "GB/s")
        assert not folder.exists()
        step, speed = parse_lines(capsys.readouterr().out)
        assert step["bar"] == {"value at most": 1.4e-3, "ratio at most": 1.3}
        assert (step["value"], step["ratio"], step["met"]) == (1.2e-3, 1.25, True)
        assert (speed["bar"], speed["met"]) == ({}, None)

    def test_what_is_missed_is_named_at_the_end_all_of_it(self, capsys: pytest.CaptureFixture[str]):
        bars = Bars(GPU_SETTING)
        with bars.attempt("gcn"):
            raise ValueError("no kernel")
        bars.hold("gat", 2.0, "s", ratio=1.31, most_ratio=1.3)
        bars.hold("pyg", 0.1, "s", ratio=11.9, least_ratio=12.0)
        bars.hold("best", None, "share", most=0.02)
        bars.hold("sage", 1.0, "s", most=1.0, least=1.0)
        with pytest.raises(AssertionError) as error:
            bars.judge()
        for words in (
            "gcn: ValueError: no kernel", "gat: ratio 1.31, asked at most 1.3",
            "pyg: ratio 11.9, asked at least 12", "best: value none, asked at most 0.02",
        ):  # fmt: skip
            assert words in str(error.value)
        assert "sage" not in str(error.value)
        met = [line["met"] for line in parse_lines(capsys.readouterr().out)]
        assert met == [False, False, False, False, True]

    def test_a_loss_that_is_no_number_misses_its_bar(self):
        assert training.worst_apart([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
        for found in ([1.0, np.nan, 1.0], [np.nan, 1.0, 1.0], [1.0, np.nan, np.nan]):
            apart = training.worst_apart(found, [1.0] * 3)
            words = "apart: value nan, asked at most"
            with pytest.raises(AssertionError, match=words), open_bars(GPU_SETTING) as (bars, _):
                bars.hold("apart", apart, "relative", most=1e-3)

    def test_on_cores_nothing_is_judged_and_errors_come_through(self):
        with open_bars(Setting(emulated=True)) as (bars, _):
            bars.hold("step", 9.0, "s", most=1.0)
        with pytest.raises(ValueError, match="no kernel"), bars.attempt("gcn"):
            raise ValueError("no kernel")

    def test_an_error_is_not_hidden_by_what_was_missed(self):
        def miss_a_bar_and_fail() -> None:
            with open_bars(GPU_SETTING) as (bars, _):
                bars.hold("step", 9.0, "s", most=1.0)
                raise KeyError

        with pytest.raises(KeyError):
            miss_a_bar_and_fail()

    def test_what_a_run_missed_is_its_error(self):
        with pytest.raises(AssertionError, match="step: value 9"), open_bars(GPU_SETTING) as found:
            found[0].hold("step", 9.0, "s", most=1.0)


class TestPlanned:
    def test_twenty_configurations_in_lots_of_eight_and_the_rest(self):
        taken = [planned.CONFIGURATIONS[slice(*ends)] for ends in planned.LOTS.values()]
        assert [len(each) for each in taken] == [8, 8, 4]
        names = [each.name for lot in taken for each in lot]
        assert names == [each.name for each in planned.CONFIGURATIONS]
        assert len(set(names)) == 20
        assert names[3] == "nodes gat 3x128 (15,10,5) batch 512, room for 30%"

    @pytest.mark.parametrize(
        ("errors", "regrets", "short", "missed"),
        [
            ([0.01, 0.08, 0.15], [0.0, 0.02, 0.0], 0, []),
            ([0.01, 0.09, 0.20], [0.0, 0.03, 0.0], 1, ["median", "p90", "worst", "memory"]),
            ([0.01], [0.0], 0, ["configurations"]),
            ([], [], 0, ["median", "p90", "worst", "configurations"]),
        ],
    )
    def test_all_configurations_are_judged_together(
        self, errors: list[float], regrets: list[float], short: int, missed: list[str]
    ):
        found = [
            planned.Ran(error=error, regret=regret, short=short if number == 0 else 0)
            for number, (error, regret) in enumerate(zip(errors, regrets, strict=True))
        ]
        bars = Bars(GPU_SETTING)
        planned.judge(bars, found, 3)
        assert len(bars.missed) == len(missed)
        for words, line in zip(missed, bars.missed, strict=True):
            assert words in line.partition(":")[0]

    def test_what_the_same_files_have_measured_is_not_measured_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        (experiment,) = [each for each in EXPERIMENTS if each.name == "plans_rest"]
        first, second = (each.name for each in planned.CONFIGURATIONS[16:18])
        line = {"name": "planned_step", "error": 0.05, "regret": 0.01, "short": 0}
        lines = [
            line | {"configuration": first, "hash": hash_files(experiment)},
            line | {"configuration": second, "hash": "of other files"},
        ]
        (tmp_path / "plans_rest.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
        monkeypatch.setattr(planned, "RECORDS", tmp_path)
        monkeypatch.setattr(planned, "machine_here", lambda setting: None)
        ran = list[str]()

        def run(setting: Setting, bars: Bars, each: planned.Configuration, *_: object) -> object:
            ran.append(each.name)
            if len(ran) == 2:
                monkeypatch.setattr(time, "monotonic", lambda: 1e12)  # time is over
            return planned.Ran(error=0.01, regret=0.0, short=0)

        monkeypatch.setattr(planned, "run_one", run)
        setting = Setting(until=time.monotonic() + 60.0)
        with pytest.raises(AssertionError, match="planned_configurations: value 3, asked at le"):
            planned.run_lot(setting, lot="rest")
        assert ran == [each.name for each in planned.CONFIGURATIONS[17:19]]
        lines = parse_lines(capsys.readouterr().out)
        assert lines[0]["name"] == "planned_step_error_median"
        assert lines[-1]["left"] == [planned.CONFIGURATIONS[19].name]

    def test_a_plan_gets_the_memory_that_it_fills_97_hundredths_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        graph = generate_sbm(
            tmp_path / "graph", num_nodes=60, degree=4.0, feature_dim=8, num_classes=2, seed=1
        )
        plan = make_plan(graph, tmp_path / "plan")
        use = MemoryUse(parts={"context": 70, "rows": 900}, total=970, capacity=970, headroom=0)
        plan.prediction.memory_bytes["rank0"] = use
        given = list[float]()
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        whole = type("Device", (), {"total_memory": 9300})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: whole)
        with planned.capped(GPU_SETTING, plan):
            assert given == [pytest.approx((1000 - 70) / 9300)]
        assert given[1:] == [1.0]

    def test_a_plan_that_runs_out_of_memory_or_leaves_rows_on_the_host_is_short(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        from gnnplan.runtime.errors import warn_once

        graph = generate_sbm(
            tmp_path / "graph", num_nodes=60, degree=4.0, feature_dim=8, num_classes=2, seed=1
        )
        plan, cores = make_plan(graph, tmp_path / "plan"), Setting(emulated=True)

        def fails(*_: object) -> float:
            raise torch.OutOfMemoryError("no room")

        def leaves(*_: object) -> float:
            warn_once("own rows", "rank 0: 3 of 5; the others are read from the host (sum); plan")
            return 1.0

        for steps, expected in ((fails, None), (leaves, None), (lambda *_: 1.0, 1.0)):
            monkeypatch.setattr(planned, "_steps", steps)
            for _ in range(2):  # warned of each time
                assert planned.measure(cores, plan, tmp_path / "plan", graph) == expected

    def test_a_gpu_is_timed_in_this_process(self, tmp_path: Path):
        request = GpuTimingRequest(
            graph=str(tmp_path), fingerprint="", workload=Workload(), sampler=Sampler(), seeds=4,
            scales=[1.0], captures=False, seconds=1.0,
        )  # fmt: skip
        if torch.cuda.is_available():
            pytest.skip("a GPU would be timed on a graph that is not there")
        team = profile.Team
        with planned.in_this_process(), profile.Team(1) as here:
            (text,) = here.ask([json.dumps({GPU: codec.to_plain(request)})], 1)
        assert json.loads(text)["refusal"] == "this torch has no CUDA"
        assert profile.Team is team


def test_lists_are_symmetric_without_repetitions_and_skewed():
    indptr, indices = papers.draw_lists(500, 6_000, torch.device("cpu"))
    assert indptr[-1] == len(indices) <= 6_000
    rows = np.repeat(np.arange(500), np.diff(indptr))
    pairs = set(zip(rows.tolist(), indices.tolist(), strict=True))
    assert len(pairs) == len(indices)
    assert pairs == {(v, u) for u, v in pairs}
    lengths = np.sort(np.diff(indptr))
    assert lengths[-50:].sum() > 3 * lengths.sum() / 10  # a tenth of the nodes have most entries
