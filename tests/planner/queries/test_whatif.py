"""why-not, diff, whatif and inverse queries: priced from the cached profile, nothing measured."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile import cache as record
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.queries.cheapest import cheapest_for
from gnnplan.planner.queries.diff import diff, render as render_diff
from gnnplan.planner.queries.whatif import apply_changes, whatif
from gnnplan.planner.queries.why_not import render_why_not, why_not
from gnnplan.planner.settings import PlanSettings, change_mode
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan, Workload
from tests.support.emulated_ranks import make_graph
from tests.support.machines import machine
from tests.support.profiles import hotness, profile

WORK = Workload(batch_size=100, hidden=8, fanouts=[5, 3])
SETTINGS = PlanSettings(workload=WORK)
SLOW = machine(mapped_row=20e-6)
"""The mapping is slow, so copies of rows pay."""


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path) -> Profile:
    """Half of the reads go to the first tenth of the vertices; no process is started."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    n = small_graph.num_nodes
    made = profile(n, 100)
    p = np.where(np.arange(n) < n // 10, 0.9, 0.1)
    made = Profile(numbers=made.numbers, hotness={s: hotness(s, p) for s in made.hotness})
    monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
    return made


def plan(graph: Graph, out: Path, settings: PlanSettings, model: MachineModel = SLOW) -> Plan:
    return pipeline.plan(graph.path, settings, machine=model, out=out)


def test_a_change_of_nothing_changes_nothing(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p", SETTINGS)
    found = whatif(made, ["devices=auto"])
    assert found.after is not None
    assert found.after.step_seconds == made.prediction.step_seconds
    assert found.speedup == 1.0
    assert found.after.provenance == made.prediction.provenance


def test_what_if_says_what_planning_anew_would(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p", replace(SETTINGS, policy="none"))
    found = whatif(made, ["link.memory0.bandwidth=x2", "devices=1"])
    twice = SLOW.with_tables(
        {
            name: replace(SLOW.tables[name], values=[v / 2 for v in SLOW.tables[name].values])
            for name in ("gather", "mapped_gather")
        }
    )
    anew = plan(small_graph, tmp_path / "anew", replace(SETTINGS, policy="none", devices=1), twice)
    assert found.after is not None
    assert found.after.step_seconds.value == pytest.approx(anew.prediction.step_seconds.value)
    assert found.after.num_ranks == 1
    assert found.after.stages["gather"] < found.before.stages["gather"] * 2


@pytest.mark.parametrize(("planned", "asked"), [(4, 1), (4, 3)])
def test_a_profile_of_other_ranks_does_not_answer_for_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: int, asked: int
) -> None:
    """Whole batches are drawn for ranks that share them, and three ranks' share may be four's."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    graph = make_graph(tmp_path / "graph")
    work = Workload(batch_size=5, hidden=8, fanouts=[3, 2])
    box = load_preset("pcie-4090x4")
    settings = PlanSettings(workload=work, devices=planned)
    made = pipeline.plan(graph.path, settings, machine=box, out=tmp_path / "p")
    changed = replace(settings, devices=asked)
    found, reason = whatif(made, [f"devices={asked}"]), why_not(made, changes=[f"devices={asked}"])
    anew = pipeline.plan(graph.path, changed, machine=box, out=tmp_path / "anew")
    assert found.after == reason.best
    assert found.after is not None
    assert found.after.step_seconds == anew.prediction.step_seconds
    assert found.after.epoch_seconds == anew.prediction.epoch_seconds


def test_an_estimate_of_a_whole_graph_on_cores_is_answered_by_one(tmp_path: Path) -> None:
    graph = make_graph(tmp_path / "graph")
    work = Workload(batch_size=32, hidden=8, fanouts=[3, 2])
    quick = PlanSettings(workload=work, quick=True)
    box = load_preset("cpu-2core")
    made = pipeline.plan(graph.path, quick, machine=box, out=tmp_path / "p")
    found = whatif(made, ["mode=full-graph"])
    whole = change_mode(quick, "full-graph")
    anew = pipeline.plan(graph.path, whole, machine=box, out=tmp_path / "anew")
    assert found.after is not None
    assert found.after.step_seconds == anew.prediction.step_seconds


def test_a_policy_that_the_dataset_cannot_have_is_refused_as_when_planned(tmp_path: Path) -> None:
    graph = make_graph(tmp_path / "graph", "typed")
    work = Workload(batch_size=32, hidden=8, fanouts=[3, 2], model="rgcn")
    quick = PlanSettings(workload=work, quick=True)
    made = pipeline.plan(graph.path, quick, machine=load_preset("cpu-2core"), out=tmp_path / "p")
    refused = "expected policy auto or none for features by node type"
    with pytest.raises(SettingsError, match=refused):
        whatif(made, ["policy=degree"])
    with pytest.raises(SettingsError, match=refused):
        cheapest_for(made, 1e6, ["policy=degree"])
    with pytest.raises(SettingsError, match=refused):
        why_not(made, "degree")
    assert refused in why_not(made, changes=["policy=degree"]).why


def test_less_memory_can_leave_no_plan(small_graph: Graph, skewed: Profile, tmp_path: Path) -> None:
    made = plan(small_graph, tmp_path / "p", SETTINGS)
    found = whatif(made, ["memory.host0.capacity=100MiB"])
    assert found.after is None
    assert "> 104.9 MB usable" in found.refusal


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("memory0", "expected KEY=VALUE"),
        ("link.warp9.bandwidth=x2", "expected a link of by-hand"),
        ("memory.attic.capacity=1GiB", "expected a memory of by-hand"),
        ("memory.host0.capacity=lots", "expected a size"),
        ("link.disk0.bandwidth=x0", "found 'x0'"),
        ("link.disk0.bandwidth=xx", "found 'xx'"),
        ("batch_sise=7", "KEY among link.NAME.bandwidth, .* found .* .did you mean batch_size"),
        ("devices=some", "expected a whole number or auto"),
        ("device_memory=x2", "the plan had no limit"),
        ("policy=astrology", "expected a policy"),
    ],
)
def test_a_bad_change_gets_one_line(change: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        apply_changes(record.PlanRecord(settings=SETTINGS, machine=SLOW), [change])
    assert "\n" not in str(caught.value)


def test_sizes_are_changed_by_factors_and_another_mode_leaves_out_what_it_does_not_use() -> None:
    asked = replace(SETTINGS, batching="independent", policy="none", host_memory_bytes=1 << 30)
    known = record.PlanRecord(settings=asked, machine=SLOW)
    found = apply_changes(known, ["host_memory=x2", "link.disk0.bandwidth=x2"])
    assert found.settings == replace(asked, host_memory_bytes=1 << 31)
    assert found.machine != SLOW
    whole = apply_changes(known, ["mode=full-graph", "keep=0.5"])
    unused = {"batching": "auto", "policy": "auto", "mode": "full-graph", "keep": 0.5}
    work = replace(WORK, fanouts=[-1, -1])
    assert whole.settings == replace(asked, workload=work, **unused)
    back = apply_changes(whole, ["mode=minibatch", "fanouts=5,3"])
    assert back.settings == replace(asked, batching="auto", policy="auto", mode="minibatch")


def test_what_if_takes_any_setting_as_why_not_does_and_says_where_seconds_do_not_decide(
    small_graph: Graph, skewed: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = plan(small_graph, tmp_path / "one", replace(SETTINGS, devices=1))
    found, reason = whatif(one, ["devices=2"]), why_not(one, changes=["devices=2"])
    assert found.after is not None
    assert found.after == reason.best
    assert found.caution == ""
    fewer = whatif(one, ["batch_size=50"])
    assert fewer.after is not None
    assert "it trains differently: an epoch takes" in fewer.caution
    assert fewer.caution == why_not(one, changes=["batch_size=50"]).why
    assert main(["whatif", str(tmp_path / "one"), "--set", "batch_size=50"]) == 0
    assert fewer.caution in " ".join(capsys.readouterr().out.split())  # at any width
    refused = "whose parts would be timed on these cores"
    with pytest.raises(SettingsError, match=refused):
        whatif(one, ["mode=full-graph"])
    linked = why_not(one, changes=["link.memory0.bandwidth=x2"])
    assert linked.best == whatif(one, ["link.memory0.bandwidth=x2"]).after


def test_why_not_names_the_slower_stage(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p", SETTINGS)
    assert made.strategy.features.policy == "song-jiang"
    found = why_not(made, "none")
    assert "slower: gather takes" in found.why
    assert found.same_shape is not None
    assert found.best is not None
    more = found.same_shape.step_seconds.value - found.chosen.step_seconds.value
    assert more == pytest.approx(found.stage_seconds["gather"], rel=0.05)
    assert found.chosen.step_seconds == made.prediction.step_seconds
    assert "100.0% in the host's shared memory" in render_why_not(found)
    assert "own policy" in why_not(made, "song-jiang").why


def test_diff_shows_what_was_decided_and_what_it_does(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    one = plan(small_graph, tmp_path / "one", replace(SETTINGS, devices=1))
    two = plan(small_graph, tmp_path / "two", replace(SETTINGS, devices=2, policy="none"))
    found = diff(one, two)
    changed = {c.field: (c.a, c.b) for c in found.decisions}
    assert changed["strategy.features.policy"] == ("song-jiang", "none")
    step = next(n for n in found.numbers if n.name == "step")
    assert (step.a, step.b) == tuple(p.prediction.step_seconds.value for p in (one, two))
    gather = next(n for n in found.numbers if n.name == "stage gather")
    assert gather.provenance_a == one.prediction.provenance["gather"]
    assert "feature_own_ids_0" in found.arrays
    assert found.sentences[0].startswith("2 ranks with 1 compute thread each instead of 1 rank")
    (rows,) = [s for s in found.sentences if s.startswith("rows placed by none")]
    assert "instead of rows placed by song-jiang" in rows
    text = render_diff(found).splitlines()
    assert text[1] == f"  {found.sentences[0]}"
    assert not any("strategy." in line for line in text)
    assert any(re.match(r"  a step is .* (longer|shorter|as long)", line) for line in text)
    changed = replace(two.workload, hidden=two.workload.hidden + 1)
    assert diff(two, replace(two, workload=changed)).sentences == [
        f"workload: hidden {changed.hidden} instead of {two.workload.hidden}"
    ]
    threads = replace(two.strategy.threads, comm=1)
    other = replace(two.strategy, step="captured", owner="partition", threads=threads)
    assert diff(two, replace(two, strategy=other)).sentences == [
        "steps captured instead of eager",
        "owners of a shared batch's vertices by partition instead of hash",
        "threads that exchange beside compute: 1 instead of 0",
    ]
    dealt = diff(two, replace(two, strategy=replace(two.strategy, partition="ldg")))
    assert dealt.sentences == ["mini-batches of ldg parts instead of mini-batches"]
    longer = diff(replace(two, epochs=7), replace(two, plan_id="longer", epochs=None))
    assert longer.sentences == ["planned for epochs auto instead of 7"]
    assert [(c.field, c.a, c.b) for c in longer.decisions] == [("epochs", 7, None)]
    assert render_diff(longer).splitlines()[2:] == ["predicted", "  the same"]
    assert diff(one, one).decisions == diff(one, one).numbers == []
    assert render_diff(diff(one, one)) == "the plans are the same"


def test_the_fewest_devices_and_the_least_memory_for_an_epoch(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p", SETTINGS)
    epoch = made.prediction.epoch_seconds.value
    easy = cheapest_for(made, 100 * epoch)
    assert easy.fewest_devices.num_ranks == 1
    tight = cheapest_for(made, 1.001 * epoch)
    assert tight.least_memory_bytes >= easy.least_memory_bytes
    assert tight.fewest_devices.epoch_seconds.value <= 1.001 * epoch
    assert tight.least_memory.epoch_seconds.value <= 1.001 * epoch
    # One percent less is not enough for the same candidate: the bisection ended there.
    budget = f"host_memory={int(easy.least_memory_bytes * 0.95)}"
    less = [budget, "devices=1", f"policy={easy.least_memory.policy}"]
    with pytest.raises(PlanDoesNotFit):
        cheapest_for(made, 100 * epoch, less)
    with pytest.raises(PlanDoesNotFit, match="fastest predicted"):
        cheapest_for(made, epoch / 100)


def test_a_moved_dataset_and_a_lost_record_are_said(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    moved = tmp_path / "graph"
    shutil.copytree(small_graph.path, moved)
    made = pipeline.plan(moved, SETTINGS, machine=SLOW, out=tmp_path / "p")
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(PlanError, match="found nothing there"):
        whatif(made, ["devices=1"])
    record.record_path(made.plan_id).unlink()
    with pytest.raises(SettingsError, match="planned elsewhere or the cache was emptied"):
        whatif(made, ["devices=1"])


def test_without_the_cached_profile_nothing_is_measured(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SettingsError, match="expected the profile of"):
        pipeline.search_for(small_graph, SETTINGS, SLOW, measure=False)


def test_the_commands_print_one_json_document_each(
    small_graph: Graph,
    skewed: Profile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(tmp_path / "p")
    plan(small_graph, tmp_path / "p", SETTINGS)
    calls = [
        ["why-not", folder, "--policy", "none"],
        ["diff", folder, folder],
        ["whatif", folder, "--set", "devices=1", "--set", "link.memory0.bandwidth=x2"],
        ["whatif", folder, "--target-epoch-seconds", "1000"],
    ]
    for call in calls:
        assert main([*call, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
        assert main(call) == 0
        assert capsys.readouterr().out.strip()
    bad = [
        ["whatif", folder],
        ["whatif", folder, "--set", "nonsense"],
        ["whatif", folder, "--target-epoch-seconds", "0"],
        ["why-not", folder, "--policy", "astrology"],
        ["diff", folder, "nowhere"],
    ]
    for call in bad:
        assert main(call) == 2
        lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("gnnplan:")]
        assert len(lines) == 1, (call, lines)
    assert main(["whatif", folder, "--target-epoch-seconds", "1e-9"]) == 3


def test_why_not_takes_any_setting_of_a_plan(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p", replace(SETTINGS, devices=2))
    found = why_not(made, changes=["devices=1"])
    assert found.best is not None
    assert (found.best.num_ranks, found.chosen.num_ranks) == (1, 2)
    anew = plan(small_graph, tmp_path / "anew", replace(SETTINGS, devices=1))
    assert found.best.step_seconds == anew.prediction.step_seconds
    assert f"with devices=1: {found.why}" in render_why_not(found)
    assert why_not(made, changes=["devices=2"]).why == "as fast"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("devices=64", "expected at most"),
        ("replication=3", "replication 3: expected several ranks, a multiple of it"),
        ("mode=full-graph", "found mode full-graph, whose parts would be timed on these cores"),
        ("sampler=fastgcn", "add --allow"),
    ],
)
def test_why_not_gives_the_reason_of_what_cannot_be(
    small_graph: Graph, skewed: Profile, tmp_path: Path, change: str, why: str
) -> None:
    made = plan(small_graph, tmp_path / "p", replace(SETTINGS, devices=2))
    found = why_not(made, changes=[change])
    assert found.best is None
    assert why in found.why
    assert found.why in render_why_not(found)


@pytest.mark.parametrize("change", ["batch=7", "devices", "devices=", "=2", "devices=some"])
def test_why_not_refuses_a_change_that_is_no_setting(
    small_graph: Graph, skewed: Profile, tmp_path: Path, change: str
) -> None:
    made = plan(small_graph, tmp_path / "p", SETTINGS)
    with pytest.raises(SettingsError, match="--set") as caught:
        why_not(made, changes=[change])
    assert "\n" not in str(caught.value)
