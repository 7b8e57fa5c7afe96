"""The two lanes of a GPU's communicator: nothing of the host's reaches the GPUs' collectives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gnnplan.runtime.comm import mesh as meshes
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import open_grid, open_mesh
from gnnplan.runtime.errors import CollectiveError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.metrics import metric_of
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.job import make_factor_control
from gnnplan.runtime.worker import run
from tests.support.gpu_groups import GPU, on_gpu_group
from tests.support.plans import make_plan

pytestmark = pytest.mark.distributed
OUTPUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "multiclass": ((6,), (6, 3)),
    "multilabel": ((6, 3), (6, 3)),
    "binary": ((6,), (6,)),
}


def _scores(task: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rank)
    labels, outputs = OUTPUTS[task]
    most = 3 if task == "multiclass" else 2
    return torch.randn(outputs, generator=made), torch.randint(0, most, labels, generator=made)


def _metrics_and_objects(_folder: Path) -> None:
    comm = Communicator(device=GPU)
    assert comm.device == GPU
    for task in OUTPUTS:
        metric, alone = metric_of(task), metric_of(task)
        metric.update(*_scores(task, comm.rank))
        for rank in range(comm.size):
            alone.update(*_scores(task, rank))
        found, expected = metric.compute(comm), alone.compute()
        assert found[1] == expected[1]
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    ranking = metric_of("link")
    ranking.update(torch.eye(4), torch.tensor([[0, comm.rank, 2]]))
    assert ranking.compute(comm) == ((1 + 1 / 1.5) / 2, 2)  # first, and level with the other

    meter = StageMeter()
    control = make_factor_control(Sampler(name="las", parameters={"schedule": "measured"}), meter)
    assert control is not None
    meter.add(Stage.GATHER, 0, 1.0)
    assert len(set(comm.all_gather_objects(control.after_epoch(comm)))) == 1

    for each in (comm, comm.duplicate(), comm.split([[1], [0]])):
        assert each.all_gather_objects(comm.rank) in ([0, 1], [comm.rank])
        assert each.broadcast_object("first") == "first"
        each.barrier()
        each.host_lane.all_reduce_sum(torch.ones(3))
        assert each.device == GPU
        if each is not comm:
            each.close()
    assert comm.traffic[Stage.ALL_REDUCE].calls > 0  # the host's lane is metered with the GPU's


def test_what_the_host_counts_goes_by_its_own_lane(tmp_path: Path) -> None:
    on_gpu_group(2, _metrics_and_objects, tmp_path)


def _send_from_the_host(_folder: Path) -> None:
    comm = Communicator(device=GPU)
    sends: list[Callable[[torch.Tensor], Any]] = [
        comm.all_reduce_sum,
        comm.start_all_reduce,
        comm.broadcast,
    ]
    for send in sends:
        with pytest.raises(
            CollectiveError, match=r"expected a tensor on cuda:0 .* found one on cpu"
        ):
            send(torch.ones(2))


def test_a_tensor_of_the_host_is_refused_between_gpus(tmp_path: Path) -> None:
    on_gpu_group(2, _send_from_the_host, tmp_path)


def _train(folder: Path) -> None:
    options: dict[str, Any] = {
        "plan_folder": str(folder / "plan"), "run_folder": str(folder / "run"),
        "eval_every": 1, "checkpoint_every_steps": 2, "collective_seconds": 60.0, "pin": False,
    }  # fmt: skip
    first = run(RunConfig(**options, epochs=1))
    second = run(RunConfig(**options, epochs=2, resume=True))
    if dist.get_rank() == 0:
        _check(first, second)


def _check(first: RunReport, second: RunReport) -> None:
    assert len(first.epochs) == 1
    assert first.epochs[0].val is not None
    assert second.first_step == len(first.losses) > 0
    assert [each.val is None for each in second.epochs] == [False] * len(second.epochs)
    assert second.test_score is not None


def test_cores_train_in_a_group_that_a_script_made_for_gpus(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2, own_rows=100, peers=True)
    (tmp_path / "run").mkdir()
    on_gpu_group(2, _train, tmp_path)
    assert len(list((tmp_path / "run").rglob("checkpoint-*.pt"))) > 0


def _plan_of_gpus(graph: Graph, folder: Path, ranks: int, per_host: int) -> Any:
    plan = make_plan(graph, folder, ranks=ranks, hosts=[r // per_host for r in range(ranks)])
    devices = [
        replace(each, kind="cuda", index=rank % per_host)
        for rank, each in enumerate(plan.strategy.devices)
    ]
    return replace(plan, strategy=replace(plan.strategy, devices=devices))


@pytest.mark.parametrize(("ranks", "rank"), [(16, 0), (16, 11), (64, 37), (64, 63)])
def test_a_rank_of_many_gpus_opens_bound_to_its_own(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, rank: int
) -> None:
    """Torch's fake group answers for the other ranks: who opens what, in which order."""
    plan = _plan_of_gpus(small_graph, tmp_path / "plan", ranks, 8)
    current: list[torch.device] = []
    asked: dict[str, Any] = {}
    real = dist.init_process_group

    def join(backend: str, *, device_id: torch.device, **options: Any) -> None:
        asked.update(options, backend=backend, device_id=device_id, current=list(current))
        real(backend.replace("gloo", "fake").replace("nccl", "fake"), **options)

    for name, value in (("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", rank % 8),
                        ("LOCAL_WORLD_SIZE", 8)):  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu{number}")
    )
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(meshes, "_store_of_attempt", lambda _timeout: FakeStore())
    mesh = open_mesh(plan, timeout_seconds=7)
    try:
        own = torch.device("cuda", rank % 8)
        assert asked["backend"] == "cpu:gloo,cuda:nccl"
        assert asked["current"] == [asked["device_id"]] == [own]  # current before it joins
        assert asked["timeout"].total_seconds() == 7
        assert (mesh.rank, mesh.size, mesh.host, mesh.device) == (rank, ranks, rank // 8, own)
        grid = open_grid(mesh.comm, 8)
        assert (grid.row, grid.column, grid.num_rows) == (rank // 8, rank % 8, ranks // 8)
        twin = mesh.comm.duplicate()
        assert (twin.rank, twin.size) == (rank, ranks)
        twin.close()
        grid.close()
    finally:
        mesh.close()
    assert not dist.is_initialized()
