"""Training through Ray Train, on a local cluster of two nodes of one core each."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cli.main import main
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.folders import hold
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch, ray as launch_ray
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.report import load_report
from gnnplan.runtime.train.recovery import save_checkpoint
from tests.support.plans import make_plan

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed; pip install 'gnnplan[ray]'",
)
CLUSTER = """
import importlib, json, os, sys
from pathlib import Path
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = importlib.import_module("ray")
utilities = importlib.import_module("ray.cluster_utils")
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.launch.ray import train_on_ray

cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print("nodes", len(ray.nodes()) if ray.is_initialized() else len(cluster.list_all_nodes()))
events = []
try:
    train_on_ray(
        Path(sys.argv[1]), address=cluster.address, progress=events.append,
        **json.loads(sys.argv[2]),
    )
    print("epochs", [e["epoch"] for e in events if e["event"] == "epoch"])
except GnnplanError as error:
    print(f"{type(error).__name__}: {error}")
finally:
    cluster.shutdown()
"""
SETTINGS: dict[str, Any] = {"batch_size": 128, "fanouts": [5, 3], "seed": 3, "learning_rate": 0.01}


def on_cluster(plan: Path, environment: dict[str, str] | None = None, options: str = "{}") -> str:
    """Train on a fresh cluster, in a process of its own; what it printed last."""
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(plan), options],
        env=os.environ | {"PYTHONPATH": root} | (environment or {}),
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nodes 2" in done.stdout
    return done.stdout.strip().splitlines()[-1]


@needs_ray
@pytest.mark.slow
@pytest.mark.distributed
def test_two_nodes_of_ray_and_torchrun_have_the_same_losses(
    small_graph: Graph, tmp_path: Path
) -> None:
    settings: dict[str, Any] = SETTINGS | {"ranks": 2, "peers": True, "own_rows": 300}
    make_plan(small_graph, tmp_path / "ray", hosts=[0, 1], **settings)
    options = '{"epochs": 2, "eval_every": 1}'
    assert on_cluster(tmp_path / "ray", options=options) == "epochs [0, 1]"
    make_plan(small_graph, tmp_path / "torchrun", **settings)
    single = launch.train(tmp_path / "torchrun", epochs=2, oversubscribe=True, pin=False)
    report = load_report(tmp_path / "ray")
    assert len(report.losses) == 2 * -(-len(small_graph.train_idx) // 128)
    np.testing.assert_allclose(report.losses, single.losses, rtol=1e-5)
    assert report.test_score == pytest.approx(single.test_score)
    assert [each.rank for each in report.ranks] == [0, 1]
    assert all(each.rows_by_source["peer"] > 0 for each in report.ranks)


@needs_ray
@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_dies_under_ray_starts_again_from_the_last_checkpoint(
    small_graph: Graph, tmp_path: Path
) -> None:
    settings: dict[str, Any] = SETTINGS | {"ranks": 2}
    model = "tests.support.models:faulty"
    make_plan(small_graph, tmp_path / "ray", hosts=[0, 1], model=model, **settings)
    fault = {"GNNPLAN_TEST_FAULT": "1:5:kill:once"}
    options = '{"epochs": 3, "eval_every": 0, "max_restarts": 1}'
    assert on_cluster(tmp_path / "ray", fault, options).startswith("epochs ")
    report = load_report(tmp_path / "ray")
    assert report.first_step > 0
    assert any(note.startswith("resumed after step ") for note in report.notes)
    make_plan(small_graph, tmp_path / "torchrun", model=model, **settings)
    whole = launch.train(
        tmp_path / "torchrun", epochs=3, eval_every=0, oversubscribe=True, pin=False
    )
    np.testing.assert_allclose(report.losses, whole.losses[report.first_step :], rtol=1e-5)


@needs_ray
@pytest.mark.slow
@pytest.mark.distributed
def test_a_ranks_error_under_ray_is_named(small_graph: Graph, tmp_path: Path) -> None:
    model = "tests.support.models:faulty"
    make_plan(small_graph, tmp_path / "ray", ranks=2, hosts=[0, 1], model=model, **SETTINGS)
    line = on_cluster(tmp_path / "ray", {"GNNPLAN_TEST_FAULT": "1:2:raise"}, '{"max_restarts": 0}')
    assert line.startswith("WorkerFailed: rank 1: RuntimeError: the model gave up; traceback in ")


def test_without_ray_one_line_says_what_to_install(
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_plan(small_graph, tmp_path / "plan")
    monkeypatch.setattr(launch_ray.importlib.util, "find_spec", lambda name: None)
    assert main(["train", str(tmp_path / "plan"), "--executor", "ray"]) == 2
    assert "pip install 'gnnplan[ray]'" in capsys.readouterr().err
    with pytest.raises(InputError, match="expected Ray Train, found none"):
        launch_ray.train_on_ray(tmp_path / "plan")


def test_a_second_training_in_a_runs_folder_is_refused_by_ray_too(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(small_graph, tmp_path / "plan")
    run = tmp_path / "plan" / "run"
    kept = save_checkpoint(run / "checkpoints", 7, {"steps": 7}, keep=1)
    monkeypatch.setattr(launch, "END_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(launch_ray.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with hold(run), pytest.raises(InputError, match="expected no other training in this folder"):
        launch_ray.train_on_ray(tmp_path / "plan")
    assert kept.is_file()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_worker_asks_for_a_gpu_where_its_plan_has_one_and_for_the_cores_of_its_threads(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plan = make_plan(small_graph, tmp_path, ranks=2, sample_threads=3, compute_threads=2)
    devices = [replace(device, kind=kind) for device in plan.strategy.devices]
    plan = replace(plan, strategy=replace(plan.strategy, devices=devices))
    given = {
        name: lambda *_, **fields: SimpleNamespace(**fields)
        for name in ("ScalingConfig", "RunConfig", "FailureConfig", "TorchConfig", "TorchTrainer")
    }
    for name in ("ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**given))
    config = RunConfig(plan_folder=str(tmp_path), run_folder=str(tmp_path / "run"))
    trainer = launch_ray._trainer(plan, tmp_path / "run", config, 1)
    scaling, gpus = trainer.scaling_config, int(kind == "cuda")
    assert (scaling.num_workers, scaling.use_gpu) == (2, kind == "cuda")
    assert scaling.resources_per_worker == {"CPU": 5, "GPU": gpus}
    assert trainer.torch_config.backend == ("nccl" if kind == "cuda" else "gloo")
