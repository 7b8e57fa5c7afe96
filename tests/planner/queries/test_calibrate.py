"""Factors per stage: learnt from runs, kept beside the raw model, used only where asked."""

from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.cli.main import main
from gnnplan.planner.cost.step import mark_estimated
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.profile.cache import Profile, load_record
from gnnplan.planner.queries.calibrate import (
    CONFIRMED,
    Calibration,
    Observation,
    calibrate_machine,
    calibrate_search,
    calibration_path,
    load_calibration,
    refit,
)
from gnnplan.planner.queries.compare import Comparison, compare, factor_names
from gnnplan.planner.queries.whatif import whatif
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.report import RunReport, save_report
from tests.planner.queries.test_compare import report, stage
from tests.support.machines import constant, machine
from tests.support.profiles import profile

SETTINGS = PlanSettings(workload=Workload(batch_size=100, hidden=8, fanouts=[5, 3]), devices=1)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path) -> Profile:
    """A cache of its own, and a profile that nothing is measured for."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    made = profile(small_graph.num_nodes, 100)
    monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
    return made


def make(graph: Graph, out: Path, *, calibrate: bool = False) -> Plan:
    return pipeline.plan(graph.path, SETTINGS, machine=machine(), out=out, calibrate=calibrate)


def run(plan: Plan, factor: float, number: int = 0) -> RunReport:
    """A run whose gather takes `factor` times the predicted seconds; all else as predicted."""
    stages = {
        name: stage(seconds * (factor if name == "gather" else 1.0))
        for name, seconds in plan.prediction.stages.items()
    }
    made = report(plan)
    seconds = replace(
        made.step_seconds,
        median=plan.prediction.step_seconds.value * (1 + number / 1e6),
        count=50,
        discarded=10,
        enough=True,
    )
    ranks = [replace(r, stages=stages) for r in made.ranks]
    noise = replace(made.noise, overloaded=False)
    return replace(made, step_seconds=seconds, ranks=ranks, noise=noise)


def learn(plan: Plan, factor: float, number: int = 0) -> tuple[dict[str, float], list[str]]:
    made = run(plan, factor, number)
    used = load_record(plan).factors
    return refit(compare(plan, made), made, plan, used)


def test_a_factor_is_the_median_of_runs_and_no_run_counts_twice(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = make(small_graph, tmp_path / "p")
    factors: dict[str, float] = {}
    for number, factor in enumerate((1.2, 1.4, 1.2)):
        factors, alarms = learn(plan, factor, number)
        assert alarms == []
    assert factors["gather"] == pytest.approx(1.2)
    assert factors["forward_backward"] == pytest.approx(1.0)
    learn(plan, 1.4, 1)
    assert len(load_calibration(plan.machine.fingerprint).observations) == 3


def test_a_run_under_an_estimate_teaches_nothing(small_graph: Graph, tmp_path: Path) -> None:
    """Factors scale measured profiles; how far an estimate was off says nothing of those."""
    plan = make(small_graph, tmp_path / "p")
    estimated = replace(plan, prediction=mark_estimated(plan.prediction))
    assert learn(estimated, 3.0) == ({}, [])
    assert load_calibration(plan.machine.fingerprint).observations == []
    known, _ = learn(plan, 1.2)
    assert known["gather"] == pytest.approx(1.2)
    assert learn(estimated, 3.0, 1) == (known, [])
    assert len(load_calibration(plan.machine.fingerprint).observations) == 1


def test_a_run_that_was_forced_teaches_nothing_and_is_told_of(
    small_graph: Graph, tmp_path: Path
) -> None:
    """Its seconds are of another graph or machine than the plan's, whose factors they would be."""
    plan = make(small_graph, tmp_path / "p")
    forced = replace(run(plan, 3.0), forced=["expected the graph, found another"])
    found = compare(plan, forced)
    assert refit(found, forced, plan, {}) == ({}, [])
    assert load_calibration(plan.machine.fingerprint).observations == []
    (note,) = [each for each in found.notes if each.startswith("forced")]
    assert note == "forced, so that the run teaches no factors: expected the graph, found another"


def test_what_few_runs_taught_stays_with_their_graph() -> None:
    def seen(graph: str, ratio: float) -> Observation:
        return Observation(plan_id="p", step_seconds=ratio, graph=graph, ratios={"gather": ratio})

    two = Calibration(fingerprint="m", observations=[seen("a", 1.2), seen("b", 1.6)])
    assert two.factors("a") == {"gather": 1.2}
    assert two.factors("b") == {"gather": 1.6}
    assert two.factors("c") == two.factors(None) == {}
    three = replace(two, observations=[*two.observations, seen("b", 1.4)])
    # By hand: logarithms .182, .336, .470, of deviation .144, so that the error of .336 is
    # 1.2533 .144 / 3^.5 = .104, and .336 (1 - (.104 / .336)^2) is .304.
    known = {g: three.factors(g)["gather"] for g in ("a", "b", "c", None)}
    assert known == pytest.approx(dict.fromkeys(("a", "b", "c", None), 1.355), abs=1e-3)


def test_what_graphs_disagree_about_teaches_others_little() -> None:
    def taught(*ratios: float) -> float:
        runs = [
            Observation(plan_id="p", step_seconds=r, graph=str(r), ratios={"gather": r})
            for r in ratios
        ]
        return Calibration(fingerprint="m", observations=runs).factors(None)["gather"]

    assert taught(0.79, 0.8, 0.81) == pytest.approx(0.8, abs=1e-3)
    assert 0.85 < taught(0.97, 0.85, 0.69) < 0.95
    assert taught(0.5, 1.1, 2.0) == 1.0
    # The graph's own runs are taken as they are.
    own = [Observation(plan_id="p", step_seconds=r, graph="a", ratios={"gather": r})
           for r in (0.97, 0.85, 0.69)]  # fmt: skip
    assert Calibration(fingerprint="m", observations=own).factors("a") == {"gather": 0.85}


def test_a_calibrated_plan_takes_as_long_as_was_measured_and_the_raw_one_stays(
    small_graph: Graph, tmp_path: Path
) -> None:
    raw = make(small_graph, tmp_path / "raw")
    learn(raw, 1.5)
    better = make(small_graph, tmp_path / "better", calibrate=True)
    assert better.prediction.stages["gather"] == pytest.approx(
        raw.prediction.stages["gather"] * 1.5
    )
    assert "derived" in better.prediction.provenance["gather"]
    assert better.machine.calibration != raw.machine.calibration
    assert make(small_graph, tmp_path / "again").plan_id == raw.plan_id
    # A run as the calibrated plan predicts confirms the factor: ratios are to the raw model.
    factors, _ = learn(better, 1.0)
    assert factors["gather"] == pytest.approx(1.5)
    # And what is priced again from its record is what it predicts.
    found = whatif(better, ["devices=1"])
    assert found.after is not None
    assert found.after.step_seconds == better.prediction.step_seconds


def test_a_run_that_departs_from_what_was_learnt_raises_the_alarm(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = make(small_graph, tmp_path / "p")
    for number in range(CONFIRMED):
        assert learn(plan, 1.1, number)[1] == []
    _, alarms = learn(plan, 1.9, 99)
    assert len(alarms) == 1
    assert alarms[0].startswith("drift: gather took 1.73 times")  # 1.9 / 1.1, by hand


def test_a_run_that_cannot_be_trusted_teaches_nothing(small_graph: Graph, tmp_path: Path) -> None:
    plan = make(small_graph, tmp_path / "p")
    made = run(plan, 2.0)
    busy = replace(made, noise=replace(made.noise, overloaded=True))
    short = replace(made, step_seconds=replace(made.step_seconds, enough=False))
    for each in (busy, short):
        found: Comparison = compare(plan, each)
        assert refit(found, each, plan, {}) == ({}, [])
    assert not calibration_path(plan.machine.fingerprint).exists()


def test_a_run_on_gpus_teaches_nothing_and_is_told_apart(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = make(small_graph, tmp_path / "p")
    made = run(plan, 2.0)
    assert not any("host hands them over" in note for note in compare(plan, made).notes)
    devices = [replace(device, kind="cuda") for device in plan.strategy.devices]
    timed = replace(plan, strategy=replace(plan.strategy, devices=devices))
    assert not any("host hands them over" in note for note in compare(timed, made).notes)
    words = plan.prediction.provenance | {"sample": "derived: profiled edges"}
    gpus = replace(timed, prediction=replace(plan.prediction, provenance=words))
    found = compare(gpus, made)
    assert any("host hands them over" in note for note in found.notes)
    assert refit(compare(timed, made), made, timed, {}) == ({}, [])
    assert refit(found, made, gpus, {}) == ({}, [])
    assert not calibration_path(plan.machine.fingerprint).exists()


def test_only_the_named_stages_tables_are_scaled() -> None:
    raw = machine()
    found = calibrate_machine(raw, {"gather": 2.0})
    assert found.tables["gather"].values == [2 * v for v in raw.tables["gather"].values]
    assert found.tables["sample_edge"] == raw.tables["sample_edge"]
    assert found.tables["gather"].provenance == "derived"


def test_hidden_rows_are_exchanged_as_feature_rows_were() -> None:
    hidden = constant("seconds", ["bytes", "ranks"], 2e-3)
    raw = machine().with_tables({"all_to_all_hidden": hidden})
    found = calibrate_machine(raw, {"exchange_rows": 0.75}).tables
    assert found["all_to_all_hidden"].values == [0.75 * v for v in hidden.values]
    assert found["all_to_all"].values == [0.75 * v for v in raw.tables["all_to_all"].values]


def test_the_wait_for_other_ranks_teaches_no_factor(small_graph: Graph, tmp_path: Path) -> None:
    two = replace(SETTINGS, devices=2)
    plan = pipeline.plan(small_graph.path, two, machine=machine(), out=tmp_path / "two")
    assert plan.prediction.stages["all_reduce"] > 0
    factors, _ = learn(plan, 1.0)
    assert "all_reduce" not in factors
    # Nor does one that an older version kept.
    assert calibrate_machine(machine(), {"all_reduce": 2.0}).tables == machine().tables


def test_other_samplers_and_gathers_from_disk_teach_factors_of_their_own(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = make(small_graph, tmp_path / "p")
    assert factor_names(plan) == {}
    sampler = replace(plan.strategy.sampler, name="labor")
    other = replace(
        plan,
        strategy=replace(plan.strategy, sampler=sampler),
        prediction=replace(plan.prediction, hit_rates={"rank0": {"own": 0.4, "disk": 0.6}}),
    )
    assert factor_names(other) == {"sample": "sample.labor", "gather": "gather.disk"}
    made = run(other, 1.7)
    factors, _ = refit(compare(other, made), made, other, {})
    assert factors["gather.disk"] == pytest.approx(1.7)
    assert factors["sample.labor"] == pytest.approx(1.0)
    assert not {"gather", "sample"} & factors.keys()
    raw = machine()
    scaled = calibrate_machine(raw, factors).tables
    assert scaled["disk_read"].values == pytest.approx(
        [1.7 * v for v in raw.tables["disk_read"].values]
    )
    assert scaled["gather"] == raw.tables["gather"]


def test_a_samplers_own_factor_scales_sampling_for_that_sampler_alone(small_graph: Graph) -> None:
    search = pipeline.search_for(small_graph, SETTINGS, machine())
    factors = {"sample": 1.5, "sample.labor": 3.0}
    timing = {k: replace(t, sample_seconds=2e-3) for k, t in search.request.profile.timing.items()}
    profile = replace(search.request.profile, timing=timing)
    values = search.request.machine.tables["sample_edge"].values
    for sampler, factor in (("neighbor", 1.5), ("labor", 3.0), ("ladies", 1.0)):
        asked = replace(search.request, sampler=sampler, profile=profile)
        found = calibrate_search(replace(search, request=asked), factors).request
        scaled = found.machine.tables["sample_edge"].values
        assert scaled == pytest.approx([factor * v for v in values])
        for each in found.profile.timing.values():
            assert each.sample_seconds == pytest.approx(factor * 2e-3)


def test_compare_learns_and_a_damaged_file_is_said(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "p"
    plan = make(small_graph, folder)
    save_report(run(plan, 1.3), folder)
    assert main(["compare", str(folder), "--json"]) == 0
    assert '"factors"' in capsys.readouterr().out
    path = calibration_path(plan.machine.fingerprint)
    path.write_text("{")
    with pytest.raises(SettingsError, match="not a calibration"):
        load_calibration(plan.machine.fingerprint)
    assert main(["compare", str(folder)]) == 2
