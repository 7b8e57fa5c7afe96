"""The whole path on hand-made machines and profiles: choice, refusals, byte-identical folders."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.cost.rates import edge_rate, vertex_rate
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte
from gnnplan.planner.errors import MachineError, PlanDoesNotFit, SettingsError
from gnnplan.planner.machine.model import MachineModel, Memory, Processor
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.search.dimensions.registry import CHOICES
from gnnplan.planner.settings import POLICIES, PlanSettings
from gnnplan.runtime.errors import BudgetExceeded, PlanError
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_array, load_plan
from gnnplan.runtime.plan.schema import Plan, Workload
from tests.support.machines import constant, machine
from tests.support.plans import with_sparse_rows
from tests.support.profiles import hotness, profile

BATCH = 100
WORK = Workload(batch_size=BATCH, hidden=8, fanouts=[5, 3])
SETTINGS = PlanSettings(workload=WORK)
MIB = 2**20
READING = 64 * 1024
"""Bytes in which a rank reads the disk in tests whose graphs have fewer bytes than is usual."""


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path) -> Profile:
    """Half of the reads go to the first tenth of the vertices; no process is started."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    n = small_graph.num_nodes
    made = profile(n, BATCH)
    p = np.where(np.arange(n) < n // 10, 0.9, 0.1)
    skew = {seeds: hotness(seeds, p) for seeds in made.hotness}
    made = Profile(numbers=made.numbers, hotness=skew)
    monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
    return made


def make(
    graph: Graph,
    out: Path,
    settings: PlanSettings = SETTINGS,
    model: MachineModel | None = None,
) -> Plan:
    with warnings.catch_warnings():
        return plan(graph.path, settings, machine=model or machine(), out=out)


def test_a_repeated_plan_is_the_same_to_the_byte(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        make(small_graph, tmp_path / name)
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b
    assert load_plan(tmp_path / "a", verify_arrays=True).plan_id


def test_nothing_is_copied_where_copies_gain_less_than_the_noise(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    found = make(small_graph, tmp_path / "p")
    assert found.strategy.features.own_rows == [0] * found.num_ranks
    assert [s.kind for s in found.strategy.features.sources] == ["host"]
    assert found.prediction.hit_rates["rank0"] == {"host": 1.0}
    assert found.statistics_class == "exact"


def test_rows_are_copied_where_the_mapping_is_slow(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    slow = machine(mapped_row=20e-6)
    found = make(small_graph, tmp_path / "p", model=slow)
    assert found.strategy.features.policy == "song-jiang"
    assert min(found.strategy.features.own_rows) == small_graph.num_nodes
    assert found.prediction.hit_rates["rank0"]["own"] == pytest.approx(1.0)
    for g in range(found.num_ranks):
        codes = load_array(found, tmp_path / "p", f"feature_location_{g}")
        ids = load_array(found, tmp_path / "p", f"feature_own_ids_{g}")
        table = LocationTable(np.asarray(codes), found.strategy.features.sources)
        table.check({g: np.asarray(ids)}, g)


def test_a_plan_stops_where_gpus_were_not_measured_and_is_made_for_cores_when_asked(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    gpu = Processor(name="gpu0", kind="cuda", memory="gpu0.memory", uuid="GPU-0")
    memory = Memory(name="gpu0.memory", kind="device", capacity_bytes=2**30)
    plain = machine()
    lost = replace(
        plain, processors=[*plain.processors, gpu], memories=[*plain.memories, memory],
        notes=["GPUs: not measured: no answer in 120 s"],
    )  # fmt: skip
    with pytest.raises(MachineError, match=r"found GPUs: not measured: no answer in 120 s; .*--co"):
        make(small_graph, tmp_path / "p", model=lost)
    assert not (tmp_path / "p").exists()
    found = make(small_graph, tmp_path / "p", replace(SETTINGS, cores=True), model=lost)
    assert {device.kind for device in found.strategy.devices} == {"cpu"}


def test_a_device_budget_bounds_the_copies(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    slow = machine(mapped_row=20e-6)
    one = replace(SETTINGS, devices=1)
    free = make(small_graph, tmp_path / "free", one, slow).prediction.memory_bytes["rank0"]
    limit = free.total - free.parts["own rows"] + 100 * 64  # room for 100 rows of 16 floats
    tight = replace(one, device_memory_bytes=limit)
    found = make(small_graph, tmp_path / "tight", tight, slow)
    assert found.strategy.features.own_rows == [100]
    assert found.prediction.memory_bytes["rank0"].headroom >= 0
    # The hundred copies are of hot vertices, read nine times as often as the others.
    ids = load_array(found, tmp_path / "tight", "feature_own_ids_0")
    assert np.asarray(ids).max() < small_graph.num_nodes // 10
    assert found.shadow_prices["device memory +1 GiB"] > 0


def test_what_does_not_fit_is_refused_with_the_sum(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    tight = replace(SETTINGS, device_memory_bytes=100 * MIB)
    with pytest.raises(PlanDoesNotFit, match=r"rank0: context 200.0 MB \+ .* > 104.9 MB usable"):
        make(small_graph, tmp_path / "p", tight)
    assert not (tmp_path / "p").exists()
    small_host = replace(SETTINGS, host_memory_bytes=150 * MIB)
    with pytest.raises(PlanDoesNotFit, match="usable"):
        make(small_graph, tmp_path / "p", small_host)


@pytest.fixture
def little_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cost.host_memory", "assemble"):
        monkeypatch.setattr(f"gnnplan.planner.{module}.DISK_BUDGET_BYTES", READING)


@pytest.mark.usefixtures("little_reading")
def test_sparse_features_are_not_planned_on_a_disk_from_which_no_run_reads_them(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    sparse = with_sparse_rows(small_graph, tmp_path / "sparse")
    one = replace(SETTINGS, devices=1)
    free = make(sparse, tmp_path / "free", one).prediction.memory_bytes["host0"]
    short = replace(
        one, host_memory_bytes=free.total - free.parts["features"] + READING + 64 * 1000
    )
    with pytest.raises(PlanDoesNotFit, match=r"found sparse ones, .* --features dense"):
        make(sparse, tmp_path / "p", short)
    assert not (tmp_path / "p").exists()


def test_gpus_of_sparse_features_are_priced_as_fed_by_cores(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    sparse, box = with_sparse_rows(small_graph, tmp_path / "sparse"), load_preset("hgx-h100")
    search = pipeline.search_for(sparse, replace(SETTINGS, devices=2), box)
    explored = search.explore()
    tried = {
        (c.policy, c.topology.policy, c.batching, c.bulk_batches, c.threads.capture)
        for c in (each.candidate for each in explored.priced)
    }
    assert tried == {("none", "host", "independent", 1, 0)}
    assert {each.name for each in explored.left_out} == {each.name for each in CHOICES}
    batch, known = search.request.profile.batch(BATCH // 2), load_preset("cpu-2core")
    for each in explored.priced:
        stages, candidate = each.prediction.stages, each.candidate
        ref = search.request.graph
        edge, vertex = (rate(known, ref, candidate).seconds for rate in (edge_rate, vertex_rate))
        drawn = sum(e.mean for e in batch.edges) * edge + batch.vertices[-1].mean * vertex
        assert stages["sample"] == pytest.approx(drawn)
        assert "table sample_edge" in each.prediction.provenance["sample"]
        assert "table mapped_gather" in each.prediction.provenance["gather"]
        rows = batch.vertices[-1].mean * 4 * sparse.feature_dim
        assert stages["copy"] > rows * copy_seconds_per_byte(box, candidate)[0]
        loading = sum(stages[name] for name in ("sample", "gather", "copy", "batch"))
        assert each.seconds >= loading
        assert each.prediction.memory_bytes["rank0"].parts["topology"] == 0
    dense = pipeline.search_for(small_graph, replace(SETTINGS, devices=2), box)
    assert {p.candidate.topology.policy for p in dense.explore().priced} > {"host", "replicated"}
    for changes, words in (
        ({"policy": "degree"}, "policy auto or none with sparse features, .* --features dense"),
        ({"topology": "replicated"}, "topology auto or host with sparse features"),
        ({"batching": "cooperative"}, "batching auto or independent with sparse"),
        ({"replication": 1}, "--replication: expected the default with sparse features"),
    ):
        with pytest.raises(SettingsError, match=words):
            pipeline.search_for(sparse, replace(SETTINGS, **changes), box)


def test_gpus_whose_sampler_changes_while_training_are_priced_with_cores_that_draw(
    small_graph: Graph, skewed: Profile
) -> None:
    box, work = load_preset("hgx-h100"), replace(WORK, allow="approximate")
    fixed = replace(
        SETTINGS, devices=2, workload=work, sampler="las", sampler_parameters={"factor": 2}
    )
    changing = replace(fixed, sampler_parameters={"factor": 2, "schedule": "measured"})
    search = pipeline.search_for(small_graph, changing, box)
    explored = search.explore()
    assert {each.candidate.topology.policy for each in explored.priced} == {"host"}
    assert {each.candidate.policy for each in explored.priced} > {"none", "degree"}
    ref, batch = search.request.graph, search.request.profile.batch(BATCH // 2)
    known = load_preset("cpu-2core")
    for each in explored.priced:
        stages, candidate = each.prediction.stages, each.candidate
        edge, vertex = (rate(known, ref, candidate).seconds for rate in (edge_rate, vertex_rate))
        drawn = sum(e.mean for e in batch.edges) * edge + batch.vertices[-1].mean * vertex
        assert stages["sample"] == pytest.approx(drawn)
        assert "table sample_edge" in each.prediction.provenance["sample"]
        assert "lines per row over the machine's links" in each.prediction.provenance["gather"]
        assert each.prediction.memory_bytes["host0"].parts["sampling"] > 0
    by_gpus = pipeline.search_for(small_graph, fixed, box).explore().priced
    assert min(each.seconds for each in by_gpus) != min(each.seconds for each in explored.priced)
    assert {each.candidate.topology.policy for each in by_gpus} >= {"host", "replicated"}
    words = "topology auto or host with sampler las, by which cores draw .* another sampler, or add"
    with pytest.raises(SettingsError, match=words):
        pipeline.search_for(small_graph, replace(changing, topology="replicated"), box)


@pytest.mark.usefixtures("little_reading")
def test_features_beyond_the_host_go_to_disk(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    one = replace(SETTINGS, devices=1)
    free = make(small_graph, tmp_path / "free", one).prediction.memory_bytes["host0"]
    limit = free.total - free.parts["features"] + READING + 64 * 1000
    # Rows this short lie so near each other that a few requests read them all: slow ones here.
    slow = constant("seconds_per_read", ["read_bytes", "queue_depth"], 10e-3)
    model = machine().with_tables({"disk_read": slow})
    found = make(small_graph, tmp_path / "p", replace(one, host_memory_bytes=limit), model)
    assert found.prediction.hit_rates["rank0"]["disk"] > 0.1
    assert found.strategy.features.disk_budget_bytes > 0
    assert found.prediction.memory_bytes["host0"].headroom >= 0
    assert found.shadow_prices["host0 +1 GiB"] > 0


ATTENTION = replace(SETTINGS.workload, model="gat", allow="approximate")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_memory_bytes": 10}, "at least one feature row"),
        ({"devices": 64}, "at most 2 devices"),
        ({"mode": "full-graph", "sampler": "labor"}, "drop --sampler"),
        ({"sampler": "labor"}, "add --allow"),
        ({"sampler": "labor", "workload": ATTENTION}, "model gat: expected a sampler without edge"),
    ],
)
def test_wrong_settings_get_one_line(
    small_graph: Graph,
    skewed: Profile,
    tmp_path: Path,
    changes: dict[str, object],
    words: str,
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        make(small_graph, tmp_path / "p", replace(SETTINGS, **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "p").exists()


def test_more_ranks_than_seeds_are_refused(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    two = replace(SETTINGS, workload=replace(WORK, batch_size=1), devices=2)
    with pytest.raises(SettingsError, match="seeds of a batch"):
        make(small_graph, tmp_path / "p", two)


def test_a_foreign_folder_is_not_overwritten(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.tex").write_text("years of work")
    with pytest.raises(PlanError, match="other files"):
        make(small_graph, tmp_path / "p")
    assert (tmp_path / "p" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "auto"])
def test_every_named_policy_can_be_planned(
    small_graph: Graph, skewed: Profile, tmp_path: Path, policy: str
) -> None:
    found = make(small_graph, tmp_path / "p", replace(SETTINGS, policy=policy))
    assert found.strategy.features.policy == policy


def test_the_certificate_holds_and_every_loser_has_a_reason(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    found = make(small_graph, tmp_path / "p")
    certificate = found.certificate
    assert certificate.lower_bound <= certificate.objective
    assert certificate.gap == pytest.approx(
        1 - certificate.lower_bound / certificate.objective, abs=1e-9
    )
    best = found.prediction.step_seconds.value
    assert certificate.objective == best
    assert found.alternatives
    for other in found.alternatives:
        assert other.why
        if other.step_seconds is not None:
            assert other.step_seconds >= best * (1 - machine().noise) - 1e-12
    assert len({a.name for a in found.alternatives}) == len(found.alternatives)
    assert all(saved >= 0 for saved in found.shadow_prices.values())
    assert found.shadow_prices["memory0.read +10%"] > 0


def test_the_explanation_says_everything_the_plan_knows(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    found = make(small_graph, tmp_path / "p")
    told = explain(found)
    text = render(told)
    for stage in told.stages:
        assert stage.stage in text
        assert stage.provenance in text
    for words in ("runner-up", "rank0", "host0", "host's shared memory", told.alternatives[0].why):
        assert words in text
    assert told.step_seconds == found.prediction.step_seconds.value
    visible = sum(s.seconds for s in told.stages if not s.hidden)
    assert visible == pytest.approx(told.step_seconds, rel=1e-6)


def test_the_plan_is_plain_json(small_graph: Graph, skewed: Profile, tmp_path: Path) -> None:
    make(small_graph, tmp_path / "p")
    document = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert document["prediction"]["step_seconds"].keys() == {"value", "low", "high"}
    assert document["strategy"]["threads"]["compute"] >= 1


def test_oversubscription_is_only_on_request(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    found = make(small_graph, tmp_path / "p")
    busy = found.num_ranks * (found.strategy.threads.compute + found.strategy.threads.sample)
    assert busy <= machine().num_cores


def test_a_faster_exchange_is_worth_what_two_ranks_pay_for_it(
    small_graph: Graph, skewed: Profile, tmp_path: Path
) -> None:
    stepped = machine()
    stepped = stepped.with_tables({"all_reduce_stepped": stepped.tables["all_reduce"]})
    found = make(small_graph, tmp_path / "p", replace(SETTINGS, devices=2), stepped)
    # A tenth more bandwidth on a 2 ms all-reduce saves 2 - 2 / 1.1 ms, by hand.
    assert found.shadow_prices["gloo0 +10%"] == pytest.approx(2e-3 - 2e-3 / 1.1, rel=1e-6)


def test_a_partition_that_memory_cannot_hold_is_refused_before_it_is_made(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(pipeline._parts(small_graph, "metis", 2)) == small_graph.num_nodes
    monkeypatch.setattr(pipeline, "usable_ram_bytes", lambda: 1000)
    with pytest.raises(BudgetExceeded, match="choose ldg, fennel or hash"):
        pipeline._parts(small_graph, "metis", 2)
