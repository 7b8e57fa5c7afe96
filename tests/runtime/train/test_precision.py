"""Mixed precision trains, close to float32, and float16 survives gradients that overflow."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gnnplan.runtime import worker
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.train import precision
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
from gnnplan.runtime.train.precision import FIRST_SCALE, GROW_AFTER, Precision
from gnnplan.runtime.train.recovery import CHECKPOINTS, load_newest
from tests.support.plans import make_plan


def losses(graph: Graph, folder: Path, model: str, precision: str) -> tuple[list[float], TrainLoop]:
    make_plan(graph, folder, model=model, fanouts=[4, 3], batch_size=64, precision=precision)
    loader = PlannedLoader(folder, graph)
    torch.manual_seed(1)
    work = loader.plan.workload
    net = build_model(work, graph.feature_dim, graph.num_classes, str(graph.task))
    loop = TrainLoop(
        model=net,
        optimizer=make_optimizer(net, learning_rate=0.01, weight_decay=0.0),
        gradients=GradientBuffer(net),
        comm=Communicator(),
        meter=StageMeter(),
        task=str(graph.task),
        seed=0,
        precision=Precision(work.precision),
    )
    found = [loss for _ in range(3) for loss in loop.run(loader.batches(), 0, lambda loss: None)]
    loader.close()
    return found, loop


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_losses_stay_near_those_of_float32_and_fall(
    model: str, precision: str, small_graph: Graph, tmp_path: Path
) -> None:
    exact, _ = losses(small_graph, tmp_path / "exact", model, "float32")
    mixed, loop = losses(small_graph, tmp_path / "mixed", model, precision)
    # bfloat16 rounds to 2^-8: a loss of unit size is off by that much in a first step.
    assert mixed[0] == pytest.approx(exact[0], rel=2**-7)
    assert mixed != exact
    assert sum(exact[-5:]) < 0.95 * sum(exact[:5])
    assert sum(mixed[-5:]) == pytest.approx(sum(exact[-5:]), rel=2**-6)
    assert all(p.dtype == torch.float32 for p in loop.model.parameters())
    assert loop.gradients.flat.dtype == torch.float32


def test_a_step_whose_gradients_overflow_is_left_out_and_the_factor_halved() -> None:
    found, gradients = Precision("float16"), torch.tensor([1.0, float("inf"), 2.0])
    assert found.scale == FIRST_SCALE
    assert not found.unscale(gradients)
    assert gradients.tolist() == [0.0, 0.0, 0.0]
    assert (found.scale, found.skipped) == (FIRST_SCALE / 2, 1)
    gradients = torch.tensor([FIRST_SCALE, -FIRST_SCALE / 2])
    assert found.unscale(gradients)
    assert gradients.tolist() == [2.0, -1.0]
    for _ in range(GROW_AFTER - 1):
        found.unscale(torch.ones(1))
    assert found.scale == FIRST_SCALE


def train(plan: Path, run: Path, **settings: Any) -> RunReport:
    settings = {"epochs": 3, "eval_every": 0, "pin": False, "checkpoint_every_steps": 4} | settings
    run.mkdir(exist_ok=True)
    return worker.run(RunConfig(plan_folder=str(plan), run_folder=str(run), **settings))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_resumed_run_has_the_factor_and_the_losses_of_an_undisturbed_one(
    name: str, small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A factor that overflows at first and grows again soon: steps are left out on both sides of
    # the stop, and more of them would be from the first factor on.
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**24)
    monkeypatch.setattr(precision, "GROW_AFTER", 3)
    plan = tmp_path / "plan"
    make_plan(small_graph, plan, fanouts=[4, 3], batch_size=64, precision=name, dropout=0.5)
    through = train(plan, tmp_path / "through")
    train(plan, tmp_path / "stopped", max_steps=8)
    stopped = load_newest(tmp_path / "stopped" / CHECKPOINTS)
    assert stopped is not None
    resumed = train(plan, tmp_path / "stopped", resume=True)
    assert resumed.losses == through.losses[8:]
    assert len(resumed.losses) == 7
    ends = [load_newest(tmp_path / run / CHECKPOINTS) for run in ("through", "stopped")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0]["precision"] == ends[1]["precision"]
    for key, tensor in ends[0]["model"].items():
        assert torch.equal(tensor, ends[1]["model"][key])
    if name == "float16":
        assert 0 < stopped["precision"]["skipped"] < 8
        assert stopped["precision"]["scale"] < 2.0**24
    else:
        assert stopped["precision"] == {"scale": 1.0, "good": 0, "skipped": 0}


def test_float32_changes_nothing_and_other_names_are_refused() -> None:
    gradients = torch.tensor([float("nan"), 3.0])
    assert Precision().unscale(gradients)
    assert gradients[1] == 3.0
    with pytest.raises(PlanError, match="found float8"):
        Precision("float8")


def test_tf32_is_float32_on_cores_and_set_for_a_gpus_products(
    small_graph: Graph, tmp_path: Path
) -> None:
    exact, _ = losses(small_graph, tmp_path / "exact", "sage", "float32")
    rounded, _ = losses(small_graph, tmp_path / "rounded", "sage", "tf32")
    assert rounded == exact
    Precision("tf32").set_up(torch.device("cpu"))
    assert not torch.backends.cuda.matmul.allow_tf32
    Precision("tf32").set_up(torch.device("cuda", 0))
    assert torch.backends.cuda.matmul.allow_tf32
    Precision("float32").set_up(torch.device("cuda", 0))
    assert not torch.backends.cuda.matmul.allow_tf32
