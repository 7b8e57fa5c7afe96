"""One rank in this process: it learns, resumes, reports, and refuses what does not fit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from gnnplan.runtime import codec, worker
from gnnplan.runtime.errors import GnnplanError, InputError, PlanError
from gnnplan.runtime.graph.dataset import Graph, write_graph
from gnnplan.runtime.graph.findings import GraphWarning
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.report import REPORT_FILE, TRACED_STEPS, RunReport, load_report
from gnnplan.runtime.train.evaluate import Score, evaluate
from gnnplan.runtime.train.recovery import list_checkpoints, newest_name
from tests.support.plans import make_plan


def train(plan: Path, run: Path, **settings: Any) -> RunReport:
    settings = {"epochs": 1, "eval_every": 0, "pin": False} | settings
    return worker.run(RunConfig(plan_folder=str(plan), run_folder=str(run), **settings))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def plain_losses(graph: Graph, seeds_of_steps: list[np.ndarray], hidden: int) -> list[float]:
    """GraphSAGE and Adam written out in dense PyTorch: no sampler, no blocks, no runtime.

    Full neighbourhoods make the sampled layers the full-graph ones: mean over in-neighbours.
    """
    from torch_geometric.nn import SAGEConv

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [SAGEConv(graph.feature_dim, hidden), SAGEConv(hidden, graph.num_classes)]
    mean = torch.zeros(graph.num_nodes, graph.num_nodes)
    for v in range(graph.num_nodes):
        around = graph.indices[graph.indptr[v] : graph.indptr[v + 1]].astype(np.int64)
        if len(around):
            mean[v].index_add_(
                0, torch.from_numpy(around), torch.full((len(around),), 1 / len(around))
            )
    assert graph.x is not None
    assert graph.y is not None
    x, y = torch.from_numpy(np.array(graph.x)), torch.from_numpy(np.array(graph.y))
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    losses = []
    for seeds in seeds_of_steps:
        h = functional.relu(layers[0].lin_l(mean @ x) + layers[0].lin_r(x))
        logits = layers[1].lin_l(mean @ h) + layers[1].lin_r(h)
        loss = functional.cross_entropy(logits[seeds], y[seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("dialect", ["first_seen", "every_hop"])
def test_with_all_neighbours_the_losses_are_those_of_plain_pytorch(
    small_graph: Graph, tmp_path: Path, run_folder: Path, dialect: Any
) -> None:
    from gnnplan.runtime.loader.loader import PlannedLoader

    plan = tmp_path / "plan"
    settings = {"batch_size": 64, "fanouts": [-1, -1], "learning_rate": 0.01}
    make_plan(small_graph, plan, dialect=dialect, sample_threads=1, **settings)
    report = train(plan, run_folder, epochs=4)
    loader = PlannedLoader(plan, small_graph)
    seeds = [batch.seeds for _ in range(4) for batch in loader]
    assert len(report.losses) == len(seeds) == 20
    np.testing.assert_allclose(report.losses, plain_losses(small_graph, seeds, 16), rtol=1e-4)


@pytest.mark.parametrize("stop_after", [4, 5, 7])
def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(
    small_graph: Graph, tmp_path: Path, stop_after: int
) -> None:
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, batch_size=64, dropout=0.5, sample_threads=1)
    for name in ("through", "stopped"):
        (tmp_path / name).mkdir()
    through = train(plan, tmp_path / "through", epochs=2, checkpoint_every_steps=2)
    train(
        plan, tmp_path / "stopped", epochs=2, max_steps=stop_after, checkpoint_every_steps=2
    )  # 5 steps an epoch: checkpoints after steps 2, 4, 5, 7, 9, 10
    saved = max(step for step in (2, 4, 5, 7, 9) if step <= stop_after)
    resumed = train(plan, tmp_path / "stopped", epochs=2, checkpoint_every_steps=2, resume=True)
    assert resumed.losses == through.losses[saved:]
    assert [e.loss for e in resumed.epochs] == [e.loss for e in through.epochs]


def test_a_truncated_newest_checkpoint_resumes_from_the_one_before(
    small_graph: Graph, tmp_path: Path, run_folder: Path
) -> None:
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, batch_size=64)
    through = train(plan, run_folder, epochs=3)
    newest = list_checkpoints(run_folder / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    resumed = train(plan, run_folder, epochs=3, resume=True)
    assert resumed.losses == through.losses[10:]


def test_a_checkpoint_of_another_plan_is_refused(
    small_graph: Graph, tmp_path: Path, run_folder: Path
) -> None:
    make_plan(small_graph, tmp_path / "a", batch_size=64)
    make_plan(small_graph, tmp_path / "b", batch_size=128)
    train(tmp_path / "a", run_folder)
    with pytest.raises(PlanError, match="expected checkpoints of plan"):
        train(tmp_path / "b", run_folder, resume=True)


def test_the_report_holds_what_the_run_did(
    small_graph: Graph, tmp_path: Path, run_folder: Path
) -> None:
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, batch_size=32, own_rows=500, learning_rate=0.01)
    report = train(plan, run_folder, epochs=5, eval_every=5)
    assert report == load_report(plan) == load_report(run_folder)
    assert report.plan_id == load_plan(plan).plan_id
    steps = -(-len(small_graph.train_idx) // 32)
    assert [e.steps for e in report.epochs] == [steps] * 5
    assert report.step_seconds.count == 4 * (steps - 1)  # whole ones after the first ten
    assert report.step_seconds.enough
    rank = report.ranks[0]
    assert set(rank.stages) == {
        *("seeds", "sample", "gather", "batch"),
        *("wait", "forward_backward", "optimizer", "step"),
    }
    # Of one rank the typical step is its own median.
    assert report.stages == pytest.approx({n: each.median for n, each in rank.stages.items()})
    training = sum(rank.stages[name].mean for name in ("wait", "forward_backward", "optimizer"))
    assert training <= rank.stages["step"].mean
    assert {each.step for each in rank.spans} == set(range(10, 10 + TRACED_STEPS))
    assert {each.stage for each in rank.spans} == set(rank.stages)
    assert rank.rows_by_source.keys() == {"own", "host"}
    assert math.isclose(sum(rank.hit_rates.values()), 1.0)
    for source, rows in rank.rows_by_source.items():
        assert rank.bytes_by_source[source] == rows * small_graph.row_bytes
    assert rank.peak_memory_bytes >= rank.private_memory_bytes > 0
    assert report.startup_seconds > 0
    assert report.epochs[-1].loss < report.epochs[0].loss
    assert report.epochs[-1].val is not None
    assert report.test_score is not None
    assert report.test_score > 0.5  # 5 balanced classes: chance is 0.2


def test_an_epochs_loss_is_the_mean_over_its_seeds_though_its_last_step_has_one(
    small_graph: Graph, tmp_path: Path, run_folder: Path
) -> None:
    most = len(small_graph.train_idx) - 1
    make_plan(small_graph, tmp_path / "plan", batch_size=most)
    report = train(tmp_path / "plan", run_folder, epochs=2)
    steps = np.reshape(report.losses, (2, 2))
    assert abs(steps[:, 0] - steps[:, 1]).max() > 0.01
    expected = (most * steps[:, 0] + steps[:, 1]) / (most + 1)
    assert [epoch.loss for epoch in report.epochs] == pytest.approx(expected.tolist(), rel=1e-12)


def test_a_finished_run_that_goes_on_says_so_and_keeps_its_report(
    small_graph: Graph, tmp_path: Path, run_folder: Path
) -> None:
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, batch_size=64)
    first = train(plan, run_folder, epochs=2)
    files = [folder / REPORT_FILE for folder in (run_folder, plan)]
    before = [(file.read_bytes(), file.stat().st_ino) for file in files]
    assert train(plan, run_folder, epochs=2, resume=True) == first
    assert [(file.read_bytes(), file.stat().st_ino) for file in files] == before
    said = (run_folder / "events.jsonl").read_text()
    assert said.count("the run is finished: its 2 epochs are trained, and its report is kept") == 1
    files[1].unlink()
    tested = train(plan, run_folder, epochs=1, eval_every=1, resume=True)
    assert tested.test_score is not None
    assert replace(first, test_score=tested.test_score) == tested == load_report(plan)
    more = train(plan, run_folder, epochs=3, resume=True)
    assert (more.first_step, len(more.losses)) == (10, 5)


def test_what_a_run_measured_outlives_its_test(
    small_graph: Graph, tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it goes on it has its test alone to do, and no step to measure."""
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, batch_size=64)

    def without_room(*arguments: Any, where: str, **settings: Any) -> Score:
        if where == "epoch 1, test":
            raise torch.OutOfMemoryError
        return evaluate(*arguments, where=where, **settings)

    with monkeypatch.context() as patch:
        patch.setattr("gnnplan.runtime.train.job.evaluate", without_room)
        with pytest.raises(torch.OutOfMemoryError):
            train(plan, run_folder, epochs=2, eval_every=1)
    ended = load_report(plan)
    # Half are discarded, and of the others the last is small.
    assert (ended.test_score, len(ended.losses), ended.step_seconds.count) == (None, 10, 4)
    resumed = train(plan, run_folder, epochs=2, eval_every=1, resume=True)
    assert resumed.test_score is not None
    assert replace(ended, test_score=resumed.test_score) == resumed == load_report(plan)


def test_the_report_of_an_earlier_run_is_not_taken_for_that_of_a_finished_one(
    small_graph: Graph, tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run trains the same, but finds no room for its report."""
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, batch_size=64)
    first = train(plan, run_folder, epochs=2)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path), text[:0])

    with monkeypatch.context() as patch:
        patch.setattr(codec, "write_text_atomically", full)
        with pytest.raises(GnnplanError, match="the report cannot be written"):
            train(plan, run_folder, epochs=2)
    assert load_report(run_folder) == first
    second = train(plan, run_folder, epochs=2, resume=True)
    assert second.losses == []
    assert [e.loss for e in second.epochs] == [e.loss for e in first.epochs]
    assert [e.seconds for e in second.epochs] != [e.seconds for e in first.epochs]


def test_splits_without_a_score_cost_no_training_and_are_named_once(
    tmp_path: Path, run_folder: Path
) -> None:
    """Of one no label is known, as of tests that others keep; the other has one kind of label."""
    with pytest.warns(GraphWarning, match="no known label"):
        graph = write_graph(
            tmp_path / "graph",
            name="hidden",
            indptr=np.arange(31),
            indices=np.roll(np.arange(30, dtype=np.int32), 1),
            x=np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32),
            y=np.array([0, 1] * 10 + [1] * 5 + [-1] * 5),
            train_idx=np.arange(20),
            val_idx=np.arange(20, 25),
            test_idx=np.arange(25, 30),
            task="binary",
            num_classes=2,
        )
    make_plan(graph, tmp_path / "plan", batch_size=16)
    report = train(tmp_path / "plan", run_folder, epochs=2, eval_every=1)
    assert report == load_report(run_folder)
    assert [epoch.val for epoch in report.epochs] == [None, None]
    assert report.test_score is None
    assert report.notes == [
        "validation has no score: of 5 nodes or links, roc_auc is not defined where all known "
        "labels are alike",
        "test has no score: of 5 nodes or links, none of them has a known label",
    ]
    resumed = train(tmp_path / "plan", run_folder, epochs=3, eval_every=1, resume=True)
    assert [epoch.epoch for epoch in resumed.epochs] == [0, 1, 2]


def test_max_steps_is_kept(small_graph: Graph, tmp_path: Path, run_folder: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=64, sample_threads=1)
    report = train(tmp_path / "plan", run_folder, epochs=100, max_steps=7)
    assert len(report.losses) == 7
    assert [e.steps for e in report.epochs] == [5]
    assert report.ranks[0].stages["sample"].count == 7 - 3 - 1  # 3 of 7 discarded, one small


def test_steps_in_all_count_those_before_a_run_was_resumed(
    small_graph: Graph, tmp_path: Path, run_folder: Path
) -> None:
    make_plan(small_graph, tmp_path / "plan", batch_size=64)
    often: dict[str, Any] = {"epochs": 100, "eval_every": 0, "checkpoint_every_steps": 2}
    train(tmp_path / "plan", run_folder, max_steps=4, **often)
    found = [
        train(tmp_path / "plan", run_folder, max_steps=7, steps_in_all=True, resume=True, **often)
        for _ in range(2)
    ]
    assert len(found[0].losses) == 3
    assert found[1] == found[0]  # no step was left: the report is kept
    assert len(train(tmp_path / "plan", run_folder, max_steps=2, resume=True, **often).losses) == 2


def test_a_loss_that_is_not_finite_stops_the_run(
    small_graph: Graph, tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_TEST_FAULT", "0:1:nan")
    make_plan(small_graph, tmp_path / "plan", model="tests.support.models:faulty")
    with pytest.raises(GnnplanError, match=r"epoch 0 step 0: the loss is nan"):
        train(tmp_path / "plan", run_folder)


@pytest.mark.parametrize("what", ["graph", "machine"])
def test_another_graph_or_machine_is_refused_unless_forced(
    small_graph: Graph, tmp_path: Path, run_folder: Path, what: str
) -> None:
    plan = make_plan(small_graph, tmp_path / "plan")
    other = replace(plan, **{what: replace(getattr(plan, what), fingerprint="0" * 32)})
    arrays = {name: np.load(tmp_path / "plan" / ref.file) for name, ref in plan.arrays.items()}
    save_plan(other, arrays, tmp_path / "plan")
    with pytest.raises(PlanError, match=f"expected the {what} the plan was made for.*--force"):
        train(tmp_path / "plan", run_folder)
    report = train(tmp_path / "plan", run_folder, force=True)
    assert any(f"the {what} the plan was made for" in note for note in report.notes)
    (line,) = load_report(run_folder).forced
    assert f"expected the {what} the plan was made for" in line
    make_plan(small_graph, tmp_path / "plan")
    assert train(tmp_path / "plan", run_folder, force=True).forced == []


def test_an_evaluation_that_lacks_room_is_said_once(
    small_graph: Graph, tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(small_graph, tmp_path / "plan")
    score = Score(metric="accuracy", value=0.5, count=1, note="in smaller pieces")
    monkeypatch.setattr("gnnplan.runtime.train.job.evaluate", lambda *a, **k: score)
    report = train(tmp_path / "plan", run_folder, epochs=2, eval_every=1)
    assert (report.notes, report.test_score) == ([score.note], 0.5)
    lines = (run_folder / "events.jsonl").read_text().splitlines()
    assert sum('"in smaller pieces"' in line for line in lines) == 1


@pytest.mark.parametrize("eval_every", [1, 0])
def test_an_epoch_outlives_its_own_evaluation(
    small_graph: Graph, tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch,
    eval_every: int,
) -> None:  # fmt: skip
    """It is evaluated first when the run goes on, unless nothing is evaluated any more."""
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, batch_size=64, dropout=0.5, sample_threads=1)
    (tmp_path / "through").mkdir()
    through = train(plan, tmp_path / "through", epochs=3, eval_every=1)

    def without_room(*arguments: Any, where: str, **settings: Any) -> Score:
        if where == "epoch 1, validation":
            raise torch.OutOfMemoryError
        return evaluate(*arguments, where=where, **settings)

    names = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr("gnnplan.runtime.train.job.evaluate", without_room)
        for resume in (False, True):
            with pytest.raises(torch.OutOfMemoryError):
                train(plan, run_folder, epochs=3, eval_every=1, resume=resume)
            names.append(newest_name(run_folder / "checkpoints"))
    assert names[0] == names[1]  # no progress: the same error again is final
    assert saved_steps(run_folder) == [5, 10]
    resumed = train(plan, run_folder, epochs=3, eval_every=eval_every, resume=True)
    assert (resumed.first_step, resumed.losses) == (10, through.losses[10:])
    assert [(e.epoch, e.steps, e.loss) for e in resumed.epochs] == [
        (e.epoch, e.steps, e.loss) for e in through.epochs
    ]
    scores = [e.val for e in through.epochs] if eval_every else [through.epochs[0].val, None, None]
    assert [e.val for e in resumed.epochs] == scores
    assert resumed.test_score == (through.test_score if eval_every else None)
    assert saved_steps(run_folder) == [10, 15]


def saved_steps(run: Path) -> list[int]:
    return [int(path.name[11:21]) for path in list_checkpoints(run / "checkpoints")]


def test_a_model_is_not_scored_on_fewer_layers_than_it_has(
    small_graph: Graph, tmp_path: Path, run_folder: Path
) -> None:
    """The model does not count its blocks; all neighbours are all of every hop, however many."""
    make_plan(small_graph, tmp_path / "plan", model="tests.support.models:uncounted")
    with pytest.raises(InputError, match=r"--eval-fanouts: expected 2 fan-outs .* found 9; "):
        train(tmp_path / "plan", run_folder, eval_every=1, eval_fanouts=[9])
    assert list_checkpoints(run_folder / "checkpoints") == []
    for fanouts in ([9, -1], [-1], [-1, -1]):
        train(tmp_path / "plan", run_folder, eval_every=1, eval_fanouts=fanouts)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(InputError, match="expected at least 1 epoch, found 0"):
        RunConfig(plan_folder="p", run_folder="r", epochs=0)
    with pytest.raises(InputError, match="expected at least 1 step, found 0"):
        RunConfig(plan_folder="p", run_folder="r", max_steps=0)
