"""Steps that are replayed as one graph: priced by the GPU's own seconds, chosen, and explained."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cost.backends.gpu_lanes import (
    MARGINS,
    captured_starts,
    captured_step_bytes,
    lost_replays,
    padding_ratio,
    step_compute,
    step_shapes,
)
from gnnplan.planner.cost.stages.host import start_seconds
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.queries.whatif import whatif
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import BatchProfile, ModelTiming, Spread
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.schema import GraphRef, Plan, StepShapes, Threads, Workload
from tests.support.candidates import candidate_of_ranks
from tests.support.emulated_ranks import make_graph
from tests.support.machines import constant

WORK = Workload(batch_size=16, hidden=8, fanouts=[3, 2])
ONE = candidate_of_ranks(threads=Threads(sample=1), gpus=("gpu0",))


GRAPH = GraphRef(
    name="g", path="/data/g", fingerprint="f", num_nodes=10_000, num_edges=60_000,
    feature_dim=10, feature_dtype="float32", num_classes=3, task="node", num_train=5_000,
)  # fmt: skip


def spread(mean: float, std: float) -> Spread:
    return Spread(mean=mean, std=std, p99=mean + 2.326 * std, largest=mean + 2 * std)


def batch() -> BatchProfile:
    return BatchProfile(
        seeds_per_rank=100, num_batches=50,
        vertices=[spread(100, 0), spread(1000, 10), spread(5000, 50)],
        edges=[spread(1200, 12), spread(6000, 60)],
        block_edges=[spread(7200, 72), spread(1200, 12)],
        input_standard_error=0.0, half_epoch_error=0.0,
    )  # fmt: skip


def timing(device_seconds: float) -> ModelTiming:
    axes = ["scale", "ranks", "threads"]
    return ModelTiming(
        forward_backward=constant("seconds", axes, 3e-3),
        optimizer=constant("seconds", axes[1:], 1e-4),
        num_parameters=1000, activation_bytes=10**6, host_seconds=2.9e-3,
        device_seconds=device_seconds,
    )  # fmt: skip


def test_shapes_are_a_margin_above_what_one_batch_in_a_thousand_exceeds() -> None:
    found = step_shapes(batch())
    # A thousand draws of a normal law reach 3.24 standard deviations.
    assert found.rows[0] == 128
    for size, limit in ((1000, found.rows[1]), (5000, found.rows[2]), (1200, found.edges[0])):
        least = 1.1 * size * (1 + 3.24 * 0.01)
        assert least < limit < least + 66
        assert limit % 64 == 0
    assert 0 < found.overflow_share < 1e-12


def test_a_share_of_overflows_is_the_tail_of_the_sizes() -> None:
    wide = replace(batch(), vertices=[spread(100, 0), spread(1000, 400), spread(5000, 50)])
    found = step_shapes(wide)
    assert 0 < found.overflow_share < 1e-3
    # The margin is a tenth of the quantile, here about a standard deviation less than four.
    assert found.rows[1] > 1.1 * (1000 + 3 * 400)


def test_a_captured_step_takes_the_gpus_seconds_times_its_padding() -> None:
    found, known = load_preset("h200x1"), timing(1e-3)
    shapes = StepShapes(rows=[128, 1280, 6000], edges=[1400, 8000])
    captured = replace(ONE, step="captured", shapes=shapes)
    now = step_compute(found, captured, batch(), known)
    ratio = (128 + 1280 + 6000) / (100 + 1000 + 5000)
    assert padding_ratio(shapes, batch()) == pytest.approx(ratio)
    assert now.device == pytest.approx(1e-3 * ratio)
    assert now.host == pytest.approx(captured_starts(2) * start_seconds(found))
    assert now.forward_backward == pytest.approx(now.host + 1e-3 * ratio)
    before = step_compute(found, ONE, batch(), known)
    found_before = (before.forward_backward, before.optimizer, before.host)
    assert found_before == pytest.approx((3e-3, 1e-4, 2.9e-3))
    two = replace(captured, shapes=replace(shapes, ahead=1))
    one, both = (captured_step_bytes(each, GRAPH, batch(), known, 40) for each in (captured, two))
    # Rows of 10 columns; ends of rows, and edges with those that a model may add.
    assert both - one == 4 * 10 * 6000 + 8 * 7408 + 12 * (9400 + 1408)
    unknown = step_compute(found, captured, batch(), timing(0.0))
    assert unknown.forward_backward == pytest.approx(3e-3)


def test_labels_and_ends_of_links_lie_on_a_gpu_that_draws_batches() -> None:
    shapes = StepShapes(rows=[128, 1280, 6000], edges=[1400, 8000], drawn=True)
    candidate, known = replace(ONE, step="captured", shapes=shapes), timing(1e-3)
    tasks = {"multiclass": 8, "binary": 8, "multilabel": 8 * GRAPH.num_classes, "link": 16}
    for drawn in (True, False):
        each = replace(candidate, shapes=replace(shapes, drawn=drawn))
        found = {
            task: captured_step_bytes(each, replace(GRAPH, task=task), batch(), known, 40)
            for task in tasks
        }
        for task, size in tasks.items():
            more = (size - tasks["multiclass"]) * GRAPH.num_train if drawn else 0
            assert found[task] - found["multiclass"] == more
            bare = replace(GRAPH, task=task, num_train=0)
            least = captured_step_bytes(each, bare, batch(), known, 40)
            assert found[task] - least == (16 + size) * GRAPH.num_train * drawn


def test_steps_that_do_not_fit_are_priced_with_the_replays_that_wait_for_the_host() -> None:
    found, known = load_preset("h200x1"), timing(1e-3)
    shapes = StepShapes(rows=[128, 1280, 6000], edges=[1400, 8000], drawn=True)
    fitting, failing = (
        step_compute(found, replace(ONE, step="captured", shapes=each), batch(), known)
        for each in (shapes, replace(shapes, overflow_share=0.1))
    )
    alone, seconds = 3.1e-3, fitting.forward_backward
    assert failing.forward_backward == pytest.approx(seconds + 0.1 * (alone + 7.5 * seconds))
    copied = replace(ONE, step="captured", shapes=replace(shapes, drawn=False))
    assert lost_replays(copied) == 0.0


def test_tighter_shapes_pad_less_and_fit_less_often() -> None:
    wide = replace(batch(), vertices=[spread(100, 0), spread(1000, 50), spread(5000, 250)])
    made = [step_shapes(wide, margin) for margin in MARGINS]
    assert [(each.reached_by, each.margin) for each in made] == list(MARGINS)
    usual, tight, middle, _ = made
    assert sum(usual.rows) > sum(middle.rows) > sum(tight.rows)
    assert usual.overflow_share < middle.overflow_share < tight.overflow_share


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    return generate_rmat(tmp_path / "g", num_nodes=512, degree=6, feature_dim=7, seed=2)


def made(graph: Graph, out: Path, found: MachineModel | None = None, **changes: Any) -> Plan:
    settings = PlanSettings(**{"workload": WORK, "devices": 1, "policy": "none", **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(graph.path, settings, machine=found or load_preset("h200x1"), out=out)


def test_a_plan_says_what_capture_saves_and_what_padding_costs(
    graph: Graph, tmp_path: Path
) -> None:
    eager = made(graph, tmp_path / "eager")
    written = json.loads((tmp_path / "eager" / "plan.json").read_text())["strategy"]
    assert not {"step", "shapes"} & set(written)
    found = made(graph, tmp_path / "captured", step="captured")
    strategy, parts = found.strategy, found.prediction.memory_bytes["rank0"].parts
    assert strategy.step == "captured"
    assert strategy.shapes is not None
    assert strategy.shapes.drawn
    assert strategy.shapes.ahead == 1
    assert "a lane of its own" in found.prediction.provenance["wait"]
    assert parts["captured step"] > 0
    assert found.prediction.step_seconds.value < eager.prediction.step_seconds.value
    assert "steps captured" in explain(found).summary
    text = render(explain(found))
    assert "replayed as one graph of kernels" in text
    assert "padding (" in text
    assert "captured step" not in render(explain(eager))
    again = whatif(found, []).after
    assert again is not None
    assert again.step_seconds.value == pytest.approx(found.prediction.step_seconds.value)


def test_auto_captures_where_the_machines_rates_say_that_it_pays(
    graph: Graph, tmp_path: Path
) -> None:
    assert made(graph, tmp_path / "a", step="auto").strategy.step == "captured"
    quick = load_preset("h200x1").with_tables({"gpu_start": constant("seconds", ["ranks"], 1e-10)})
    slow = made(graph, tmp_path / "b", quick, step="auto").strategy
    assert (slow.step, slow.shapes) == ("eager", None)


def test_gcn_draws_its_batches_within_the_step_and_the_margin_is_told(
    graph: Graph, tmp_path: Path
) -> None:
    found = made(graph, tmp_path / "gcn", step="captured", workload=replace(WORK, model="gcn"))
    shapes = found.strategy.shapes
    assert shapes is not None
    assert shapes.drawn
    assert (shapes.reached_by, shapes.margin) in MARGINS
    assert f"what one batch in {shapes.reached_by:,} needs" in render(explain(found))


def test_batches_with_rows_from_the_disk_are_copied_into_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    for module in ("cost.host_memory", "assemble"):  # so little that few rows make room for it
        monkeypatch.setattr(f"gnnplan.planner.{module}.DISK_BUDGET_BYTES", 1 << 16)
    graph = generate_rmat(tmp_path / "g", num_nodes=2048, degree=6, feature_dim=100, seed=2)
    free = made(graph, tmp_path / "free", step="captured")
    host = next(use for name, use in free.prediction.memory_bytes.items() if name == "host0")
    room = host.total - 100 * graph.row_bytes
    found = made(graph, tmp_path / "tight", step="captured", host_memory_bytes=room)
    assert {source.kind for source in found.strategy.features.sources} == {"host", "disk"}
    shapes, wait = found.strategy.shapes, found.prediction.provenance["wait"]
    assert shapes is not None
    assert (shapes.drawn, shapes.ahead) == (False, 0)
    assert "a lane of its own" not in wait
    eager = made(graph, tmp_path / "eager", step="eager", host_memory_bytes=room)
    assert found.prediction.stages["gather"] >= 0.9 * eager.prediction.stages["gather"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["links", "typed"])
def test_links_and_types_are_drawn_within_the_step(kind: str, graph: Graph, tmp_path: Path) -> None:
    of_kind = make_graph(tmp_path / kind, kind)
    work = replace(WORK, model="rgcn" if kind == "typed" else "sage")
    if kind == "typed":
        work = replace(work, type_fanouts={"author__writes__paper": [1, 2]})
    shapes = made(of_kind, tmp_path / "plan", step="captured", workload=work).strategy.shapes
    assert shapes is not None
    assert shapes.drawn
    whole = {name: [-1, 1] for name in work.type_fanouts}
    if whole:
        work = replace(work, type_fanouts=whole)
        copied = made(of_kind, tmp_path / "copied", step="captured", workload=work).strategy.shapes
        assert copied is not None
        assert not copied.drawn


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cores": True}, "--cores asks for none"),
        ({"mode": "full-graph", "workload": replace(WORK, fanouts=[-1, -1])}, "whole graph"),
        ({"batching": "cooperative"}, "share a batch"),
        ({"workload": replace(WORK, model="mine:make")}, "mine:make is not"),
        ({"workload": replace(WORK, precision="float16")}, "float16"),
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_is_measured(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=f"--step captured: .*{words}"):
        PlanSettings(**{"workload": WORK, "step": "captured", **changes})


@pytest.mark.slow
def test_a_machine_without_gpus_has_no_captured_step(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--step captured: a step is captured on GPUs alone"):
        made(graph, tmp_path / "p", load_preset("cpu-2core"), step="captured")
