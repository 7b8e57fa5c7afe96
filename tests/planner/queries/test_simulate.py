"""The simulator counts what the runtime counts, to the row and the byte, and keeps time apart."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.cost.rank_times import RankTimes, RankWork
from gnnplan.planner.cost.terms import TERMS
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import with_one_kind
from gnnplan.planner.machine.routes import lines
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.simulate import Simulation, simulate
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.launch import train
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import DynamicCache, Sampler, Threads, TopologyPlacement
from gnnplan.runtime.report import RankReport
from gnnplan.runtime.stages import Stage
from tests.support.locations import cached_arrays
from tests.support.machines import machine
from tests.support.plans import change_strategy, make_plan, with_sparse_rows

OWN = np.arange(0, 3000, 3, dtype=np.int64)


def with_cached_topology(ranks: int) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for rank in range(ranks):
        codes, own = cached_arrays(3000, OWN + rank % 2)
        arrays |= {f"topology_location_{rank}": codes, f"topology_own_ids_{rank}": own}
    topology = TopologyPlacement(policy="cached", own_rows=[OWN.size] * ranks)
    return {"topology": topology, "more_arrays": arrays}


def nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {k: n for k, n in counts.items() if n}


def agree(found: Simulation, reports: list[RankReport]) -> None:
    for mine, theirs in zip(found.ranks, reports, strict=True):
        assert mine.rows_by_source == nonzero(theirs.rows_by_source)
        assert mine.bytes_by_source == nonzero(theirs.bytes_by_source)
        assert mine.lists_by_source == nonzero(theirs.lists_by_source)
        assert mine.list_bytes_by_source == nonzero(theirs.list_bytes_by_source)


@pytest.mark.distributed
@pytest.mark.slow
def test_one_ranks_counters_are_the_simulators(small_graph: Graph, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    make_plan(
        small_graph,
        folder,
        own_rows=900,
        disk_budget_bytes=1 << 20,
        cache=DynamicCache(policy="lru", rows=[200]),
        **with_cached_topology(1),
    )
    report = train(folder, epochs=2, eval_every=0)
    steps = sum(e.steps for e in report.epochs)
    found = simulate(folder, machine(), batches=steps)
    assert found.batches == steps
    assert set(found.ranks[0].rows_by_source) == {"own", "disk", "cache"}
    assert set(found.ranks[0].lists_by_source) == {"own", "host"}
    agree(found, report.ranks)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_counters_are_the_simulators(small_graph: Graph, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    make_plan(
        small_graph,
        folder,
        ranks=2,
        own_rows=700,
        peers=True,
        disk_budget_bytes=1 << 20,
        sample_threads=1,
        sampler=Sampler(name="labor"),
        cache=DynamicCache(policy="clock", rows=[100, 150]),
        **with_cached_topology(2),
    )
    report = train(folder, epochs=1, eval_every=0, oversubscribe=True)
    found = simulate(folder, machine())
    assert set(found.ranks[0].rows_by_source) == {"own", "peer", "disk", "cache"}
    agree(found, report.ranks)


@pytest.mark.parametrize(
    "settings",
    [
        {"own_rows": 500},
        {"sampler": Sampler(name="ladies", dialect="every_hop"), "own_rows": 100},
        {"sampler": Sampler(name="las", parameters={"factor": 2.0}), "own_rows": 300},
        {"dialect": "every_hop", "topology": TopologyPlacement(policy="replicated")},
        {"cache": DynamicCache(policy="clock", rows=[64]), "disk_budget_bytes": 1 << 20},
    ],
)
def test_every_tier_and_sampler_is_counted_as_the_loader_counts_it(
    settings: dict[str, Any], small_graph: Graph, tmp_path: Path
) -> None:
    folder = tmp_path / "plan"
    make_plan(small_graph, folder, **settings)
    meter = StageMeter()
    loader = PlannedLoader(folder, small_graph, rank=0, size=1, meter=meter)
    edges = sum(sum(batch.num_sampled_edges) for batch in loader)
    loader.close()
    rows, num_bytes = meter.totals()
    found = simulate(folder, machine()).ranks[0]
    assert found.rows_by_source == nonzero(rows)
    assert found.bytes_by_source == nonzero(num_bytes)
    assert (found.lists_by_source, found.list_bytes_by_source) == meter.list_totals()
    assert found.edges == edges
    assert found.vertices == sum(rows.values())


def test_rows_cross_the_links_of_a_machine_one_does_not_have(
    small_graph: Graph, tmp_path: Path
) -> None:
    folder = tmp_path / "plan"
    make_plan(small_graph, folder, ranks=2, own_rows=700, peers=True)
    found = simulate(folder, load_preset("dgx-v100"))
    rows = {
        s: sum(r.rows_by_source.get(s, 0) for r in found.ranks) for s in ("own", "peer", "host")
    }
    hbm = sum(found.links[f"gpu{g}.hbm"].rows for g in (0, 1))
    assert hbm >= sum(rows.values())  # every row ends in, and passes, its reader's memory
    # formulas [C7]: a row of 16 floats touches (64 - 64) / 64 + 1 lines of 64 bytes.
    pcie = [use for name, use in found.links.items() if name in ("pcie0.h2d", "pcie1.h2d")]
    assert sum(u.pcie_lines for u in pcie) == pytest.approx(rows["host"] * lines(64, 64))
    assert sum(u.bytes for u in pcie) == pytest.approx(rows["host"] * 64)
    assert found.times.movement_seconds > 0


def test_rows_of_each_host_are_read_from_its_own_memory(small_graph: Graph, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    make_plan(small_graph, folder, ranks=2, own_rows=0, hosts=[0, 1])
    found = simulate(folder, load_preset("hgx-h100:2"))
    assert [device.processor for device in found.devices] == ["gpu0", "h1.gpu0"]
    rows = [rank.rows_by_source["host"] for rank in found.ranks]
    for host, prefix in enumerate(("", "h1.")):
        assert found.links[f"{prefix}gpu0.hbm"].rows == pytest.approx(rows[host])
    assert not [name for name in found.links if name.startswith(("nic", "network"))]
    reads = [name for name in found.topology_links if name.startswith(("nic", "network"))]
    assert reads == []


def test_ranks_are_on_the_gpus_of_their_numbers_where_others_are_not_planned(
    small_graph: Graph, tmp_path: Path
) -> None:
    """CUDA's first GPU is of another kind, so the plan's are 1 and 2."""
    folder = tmp_path / "plan"
    plan = make_plan(small_graph, folder, ranks=2, own_rows=700)
    devices = [replace(each, index=1 + each.index) for each in plan.strategy.devices]
    change_strategy(plan, folder, devices=devices)
    whole = load_preset("dgx-v100")
    kinds = [
        replace(each, model="another") if each.name == "gpu0" else each for each in whole.processors
    ]
    found = simulate(folder, with_one_kind(replace(whole, processors=kinds)))
    assert [device.processor for device in found.devices] == ["gpu1", "gpu2"]


def test_a_presets_gpus_get_step_seconds_marked_as_derived(
    small_graph: Graph, tmp_path: Path
) -> None:
    folder = tmp_path / "plan"
    make_plan(small_graph, folder, ranks=2, own_rows=700, peers=True)
    preset = load_preset("dgx-v100")
    found = simulate(folder, preset)
    times = found.times
    assert times.step_seconds is not None
    assert times.step_seconds > times.movement_seconds
    assert set(times.stages) == {
        "sample", "gather", "copy", "batch", "forward_backward", "all_reduce", "optimizer"
    }  # fmt: skip
    # The slowest rank of each step is no faster than the mean rank.
    assert times.step_seconds >= sum(times.stages.values()) * (1 - 1e-9)
    assert all("derived" in words for words in times.provenance.values())
    halved = [
        replace(link, gather_bytes_per_second=link.gather_bytes_per_second / 2)
        if "h2d" in link.name or "dram" in link.name or "bridge" in link.name
        else link
        for link in preset.links
    ]
    slow = simulate(folder, replace(preset, links=halved))
    assert slow.ranks == found.ranks
    # Kernels' starts stay, in which the gather hides; reads over the halved links take longer.
    assert slow.times.movement_seconds > times.movement_seconds
    assert slow.times.stages["sample"] > times.stages["sample"]
    assert slow.times.stages["gather"] == times.stages["gather"]
    assert slow.times.stages["forward_backward"] == times.stages["forward_backward"]


@pytest.mark.parametrize("kappa", [4.0, "inf"])
def test_dependent_batches_start_more_kernels_on_gpus(
    small_graph: Graph, tmp_path: Path, kappa: float | str
) -> None:
    seconds: list[float] = []
    for each in (1.0, kappa):
        folder = tmp_path / f"{each}"
        make_plan(small_graph, folder, sampler=Sampler(name="labor", parameters={"kappa": each}))
        seconds.append(simulate(folder, load_preset("dgx-v100")).times.stages["sample"])
    assert seconds[0] < seconds[1]


def test_batches_made_ahead_on_lanes_are_modelled_so(small_graph: Graph, tmp_path: Path) -> None:
    plan = make_plan(small_graph, tmp_path / "plan", ranks=2, own_rows=700)
    arrays = {name: np.load(tmp_path / "plan" / ref.file) for name, ref in plan.arrays.items()}
    ahead = replace(plan.strategy, threads=Threads(compute=1, sample=1))
    save_plan(replace(plan, strategy=ahead), arrays, tmp_path / "ahead")
    line, lanes = (simulate(tmp_path / n, load_preset("siton")).times for n in ("plan", "ahead"))
    # In line the gather hides behind the starts of the model's kernels, which is told apart.
    assert lanes.stages["gather"] > line.stages["gather"]
    assert line.stages["gather"] + line.hidden["gather"] == pytest.approx(lanes.stages["gather"])
    assert lanes.hidden == {}
    assert lanes.stages | {"gather": 0.0} == line.stages | {"gather": 0.0}
    assert line.step_seconds is not None
    assert lanes.step_seconds is not None
    assert max(line.stages.values()) < lanes.step_seconds < line.step_seconds
    assert "on lanes, ahead of training" in lanes.provenance["step"]


def test_what_a_gather_hides_and_a_single_step_are_printed(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(small_graph, tmp_path / "plan", own_rows=700)
    plan = str(tmp_path / "plan")
    assert main(["simulate", plan, "--machine", "siton", "--batches", "1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"  gather: [\d.]+ .s and [\d.]+ .s beside the start of the model's", said)
    assert "\n1 step on siton" in said


def test_devices_and_topology_reads_add_up_to_what_was_counted(
    small_graph: Graph, tmp_path: Path
) -> None:
    folder = tmp_path / "plan"
    make_plan(small_graph, folder, ranks=2, own_rows=700, peers=True)
    found = simulate(folder, load_preset("siton"))
    for rank, device in zip(found.ranks, found.devices, strict=True):
        assert device.read_bytes == rank.bytes_by_source
        # [C7]: one line for each row of 64 bytes; siton's bridged pair reads peers over NVLink.
        assert device.pcie_lines == pytest.approx(rank.rows_by_source["host"] * lines(64, 64))
    assert [d.served_bytes for d in found.devices] == [
        found.ranks[1 - g].bytes_by_source["peer"] for g in (0, 1)
    ]
    edges = sum(r.edges for r in found.ranks)
    slots = [u for name, u in found.topology_links.items() if name in ("pcie0.h2d", "pcie1.h2d")]
    # A neighbour's id of 4 bytes moves one line; every expanded list's offsets one more.
    assert sum(u.pcie_lines for u in slots) > edges
    assert sum(u.rows for u in slots) == pytest.approx(sum(u.pcie_lines for u in slots))


def test_a_model_without_a_roofline_gets_counts_and_no_seconds(
    small_graph: Graph, tmp_path: Path
) -> None:
    folder = tmp_path / "plan"
    plan = make_plan(small_graph, folder)
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    own_model = replace(plan.workload, model="somewhere:factory")
    save_plan(replace(plan, workload=own_model), arrays, tmp_path / "own")
    times = simulate(tmp_path / "own", load_preset("siton")).times
    assert times.step_seconds is None
    assert "has no roofline" in times.provenance["step"]


def test_modelled_time_follows_the_machines_rates(small_graph: Graph, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    make_plan(small_graph, folder)
    fast, slow = (simulate(folder, machine(mapped_row=r)) for r in (1e-7, 1e-5))
    assert fast.ranks == slow.ranks
    assert fast.times.step_seconds is not None
    assert slow.times.step_seconds is not None
    rows = fast.ranks[0].vertices / fast.batches
    gain = slow.times.step_seconds - fast.times.step_seconds
    assert gain == pytest.approx(rows * (1e-5 - 1e-7), rel=1e-6)
    ahead = replace(load_plan(folder).strategy, threads=Threads(compute=1, sample=1))
    plan = load_plan(folder)
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    save_plan(replace(plan, strategy=ahead), arrays, tmp_path / "ahead")
    other = simulate(tmp_path / "ahead", machine())
    assert other.ranks == fast.ranks  # threads change the time, never what is drawn


def test_cost_terms_change_counted_batches_on_cores_too(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(small_graph, tmp_path / "plan")
    without = simulate(tmp_path / "plan", machine()).times
    seen: list[RankWork] = []

    def add_clerk(work: RankWork, times: RankTimes) -> RankTimes:
        seen.append(work)
        gather = times.stages[Stage.GATHER]
        return times.with_stages(
            {
                Stage.GATHER: replace(gather, seconds=gather.seconds + 5e-3),
                Stage.FORWARD_BACKWARD: replace(gather, seconds=9.0),  # is in the plan's already
            }
        )

    monkeypatch.setattr("gnnplan.planner.cost.terms.TERMS", (*TERMS, add_clerk))
    found = simulate(tmp_path / "plan", machine())
    times = found.times
    assert times.stages["gather"] == pytest.approx(without.stages["gather"] + 5e-3)
    assert times.stages["sample"] == without.stages["sample"]
    assert times.stages["forward_backward"] == without.stages["forward_backward"]
    assert times.step_seconds is not None
    assert without.step_seconds is not None
    assert times.step_seconds == pytest.approx(without.step_seconds + 5e-3)
    assert len(seen) == found.batches
    first = seen[0]
    assert sum(work.batch.vertices[-1].mean for work in seen) == found.ranks[0].vertices
    assert first.workload == plan.workload
    assert first.batch.seeds_per_rank == plan.workload.batch_size


def test_a_cache_that_fills_itself_has_its_upkeep_in_counted_batches(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DynamicCache(policy="lru", rows=[500])
    plan = make_plan(small_graph, tmp_path / "plan", cache=cache)
    features = replace(plan.strategy.features, policy="lru")
    change_strategy(plan, tmp_path / "plan", features=features)
    priced = simulate(tmp_path / "plan", machine()).times.stages["gather"]
    monkeypatch.setattr("gnnplan.planner.cost.terms.TERMS", ())
    assert priced > simulate(tmp_path / "plan", machine()).times.stages["gather"]


def test_batches_made_ahead_are_waited_for_once_and_trained_on_one_by_one(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = make_plan(small_graph, tmp_path / "plan")
    arrays = {name: np.load(tmp_path / "plan" / ref.file) for name, ref in plan.arrays.items()}
    trained = {"forward_backward": 0.02, "all_reduce": 0.001, "optimizer": 0.004}
    total: list[float] = []
    for loaders in (0, 1):
        threads = Threads(compute=1, sample=loaders)
        timed = replace(
            plan,
            strategy=replace(plan.strategy, threads=threads),
            prediction=replace(plan.prediction, stages=trained),
        )
        save_plan(timed, arrays, tmp_path / str(loaders))
        found = simulate(tmp_path / str(loaders), machine())
        assert found.batches > 1
        assert found.times.total_seconds is not None
        total.append(found.times.total_seconds)
        training = found.batches * sum(trained.values())
        loading = sum(v for k, v in found.times.stages.items() if k not in trained)
    assert total[0] == pytest.approx(training + found.batches * loading)
    # Training takes longer than loading here, so that only the first of two batches is waited for,
    # and the second one is smaller.
    assert loading < total[1] - training < 2 * loading


def test_what_cannot_be_replayed_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    plan = make_plan(small_graph, folder, ranks=2)
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    together = replace(plan, strategy=replace(plan.strategy, batching="cooperative"))
    save_plan(together, arrays, tmp_path / "together")
    with pytest.raises(SettingsError, match="found cooperative batches"):
        simulate(tmp_path / "together", machine())
    gone = replace(plan, graph=replace(plan.graph, path=str(tmp_path / "gone")))
    save_plan(gone, arrays, tmp_path / "moved")
    with pytest.raises(PlanError, match="found nothing there"):
        simulate(tmp_path / "moved", machine())
    with pytest.raises(SettingsError, match="expected a GPU for each of the plan's 2 ranks"):
        simulate(folder, load_preset("h200x1"))


def test_the_command_prints_one_json_document(
    small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plan"
    make_plan(small_graph, folder)
    call = ["simulate", str(folder), "--machine", "cpu-2core", "--batches", "2"]
    assert main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"] == 2
    assert found["ranks"][0]["rows_by_source"]["host"] > 0
    assert main(call) == 0
    assert "counted" in capsys.readouterr().out
    assert main(["simulate", str(folder), "--machine", "cpu-2core", "--batches", "0"]) == 2
    assert main(["simulate", str(tmp_path / "nowhere")]) == 2


def test_sparse_rows_are_counted_on_cores_and_refused_on_gpus_which_do_not_gather_them(
    small_graph: Graph, tmp_path: Path
) -> None:
    sparse, folder = with_sparse_rows(small_graph, tmp_path / "sparse"), tmp_path / "plan"
    make_plan(sparse, folder)
    meter = StageMeter()
    loader = PlannedLoader(folder, sparse, rank=0, size=1, meter=meter)
    for _ in loader:
        pass
    loader.close()
    found = simulate(folder, machine())
    assert found.ranks[0].rows_by_source == nonzero(meter.totals()[0])
    assert found.ranks[0].bytes_by_source == nonzero(meter.totals()[1])
    assert found.times.step_seconds is not None
    with pytest.raises(SettingsError, match=r"found sparse .* --machine of cores alone"):
        simulate(folder, load_preset("siton"))


def test_a_sampler_whose_batches_cores_draw_is_refused_on_gpus(
    small_graph: Graph, tmp_path: Path
) -> None:
    parameters = {"factor": 2.0, "schedule": "measured"}
    make_plan(small_graph, tmp_path, sampler=Sampler(name="las", parameters=parameters))
    with pytest.raises(SettingsError, match="found sampler las, by which cores draw"):
        simulate(tmp_path, load_preset("siton"), batches=1)
    found = simulate(tmp_path, machine(), batches=1)
    assert found.notes[-1].startswith("the locality factor of later epochs follows")
