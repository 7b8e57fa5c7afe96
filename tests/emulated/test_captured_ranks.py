"""What the ranks of captured steps owe each other: the same sums, and graphs that end in time."""

import os
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from gnnplan.runtime import worker
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.emulation.gpu import EmulatedGpu
from gnnplan.runtime.emulation.threads import start, stop
from gnnplan.runtime.errors import SlowerPathWarning, forget_warnings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.loader.device_place import PaddedStage
from gnnplan.runtime.loader.factory import LoaderParts
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.schema import MemoryUse, StepShapes
from gnnplan.runtime.processor import EMULATED
from gnnplan.runtime.report import RunReport, load_report
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.job import Events, Job
from tests.emulated.test_captured import (
    FANOUTS,
    HIDDEN,
    ROOMY,
    SEEDS,
    drawing_loader,
    drawn_loop,
    eager,
    loop_of,
    moved,
)
from tests.support.plans import change_strategy, make_plan
from tests.support.played_graphs import held, play_graphs
from tests.support.ranks import free_port, run_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate_sbm(
        tmp_path_factory.mktemp("captured") / "graph", num_nodes=120, degree=6.0, feature_dim=6,
        num_classes=3, seed=3, train_fraction=0.35,
    )  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    started = EmulatedGpu()
    start(started)
    yield started
    stop()


def pair_up(patch: pytest.MonkeyPatch) -> Communicator:
    """A communicator of two GPUs, one of them here; the other has the same, and nothing to add."""
    comm = Communicator()
    comm.size, comm._device = 2, EMULATED
    patch.setattr(comm, "all_gather_objects", lambda value: [value, value])
    patch.setattr(comm, "all_reduce_sum", lambda tensor: tensor)
    return comm


def plan_ranks(graph: Graph, folder: Path, shapes: StepShapes, **options: Any) -> None:
    """Write a plan of two emulated GPUs whose steps are captured."""
    made = make_plan(
        graph, folder, ranks=2, fanouts=FANOUTS, batch_size=SEEDS, hidden=HIDDEN, **options
    )
    devices = [replace(each, kind="cuda", emulated=True) for each in made.strategy.devices]
    change_strategy(made, folder, devices=devices, step="captured", shapes=shapes)


def train_ranks(folder: Path, without_room: int = -1) -> RunReport:
    """Train an epoch under a plan, graphs played; one rank may have no room for its lists."""
    (folder / "run").mkdir()
    run_on_ranks(_train, (free_port(), folder, without_room), 2)
    return load_report(folder / "run")


def _refuse_lists(patch: pytest.MonkeyPatch) -> None:
    """Let the device's memory end as it is given the lists."""
    make = LoaderParts._device_stage

    def fail(self: LoaderParts, schedule: Any) -> Any:
        make(self, schedule)  # what ranks do together is done
        raise torch.OutOfMemoryError("out of memory")

    patch.setattr(LoaderParts, "_device_stage", fail)


def _train(rank: int, port: int, folder: Path, without_room: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"
    }  # fmt: skip
    leave = dist.destroy_process_group
    with pytest.MonkeyPatch.context() as patch:
        graphs = play_graphs(patch)

        def leave_without_graphs(*groups: Any) -> None:
            assert not held(graphs), "NCCL would wait for these graphs for ever"
            leave(*groups)

        patch.setattr(dist, "destroy_process_group", leave_without_graphs)
        if rank == without_room:
            _refuse_lists(patch)
        worker.run(
            RunConfig(
                plan_folder=str(folder), run_folder=str(folder / "run"), eval_every=0, pin=False,
                force=True, keep_checkpoints=0, collective_seconds=60.0,
            )
        )  # fmt: skip
        assert graphs


def test_a_jobs_graphs_are_given_back_before_what_they_read(
    graph: Graph, gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = play_graphs(monkeypatch)
    loader, loop = drawn_loop(graph, tmp_path, ROOMY)
    assert len(loop.run(loader.batches(1), 0, lambda _: None)) == 1
    assert held(graphs) == len(graphs) == 1
    close, left = loader.close, list[int]()

    def close_loader() -> None:
        left.append(held(graphs))
        close()

    monkeypatch.setattr(loader, "close", close_loader)
    Job(
        config=RunConfig(plan_folder=str(tmp_path), run_folder=str(tmp_path)), plan=loader.plan,
        loader=loader, loop=loop, events=Events(None), cores=[],
    ).close()  # fmt: skip
    assert left == [0]


@pytest.mark.parametrize("drawn", [False, True])
def test_sums_wait_for_no_batch_where_steps_draw_their_own(
    drawn: bool, graph: Graph, gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches meet the other rank's in the gather, as where a peer's rows are read."""
    gather, comm = LoaderParts._gather_stage, pair_up(monkeypatch)
    monkeypatch.setattr(
        LoaderParts, "_gather_stage", lambda self, *, ordered: gather(self, ordered=True)
    )
    shapes = replace(ROOMY, drawn=drawn)
    loader = drawing_loader(graph, tmp_path, shapes, comm=comm, sample_threads=1)
    assert [type(stage) is PaddedStage for stage in loader.stages].count(True) == drawn
    assert (len(loader.stages) == 1) == drawn
    # In the order's turns a sum waits for batches, and no graph may hold it.
    assert comm.captures == drawn
    loader.close()
    assert comm.captures


def test_ranks_draw_within_their_steps_together_or_not_at_all(
    graph: Graph, gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree once, as the loop is made."""
    forget_warnings()
    comm, told = pair_up(monkeypatch), list[str]()

    def gather(why: str) -> list[str]:
        told.append(why)
        return [why, "no room for lists"]

    monkeypatch.setattr(comm, "all_gather_objects", gather)
    with pytest.warns(SlowerPathWarning, match=r"on all ranks, because rank 1 .*\(no room for li"):
        loader = drawing_loader(graph, tmp_path, ROOMY, comm=comm)
    assert told == [""]
    assert PaddedStage not in map(type, loader.stages)
    loader.close()


@pytest.mark.parametrize(("free_bytes", "most"), [(0, 1), (-1, 1), (13_000, 2), (None, 4)])
def test_ranks_keep_copied_batches_as_far_as_the_plan_has_room(
    free_bytes: int | None, most: int, graph: Graph, gpu: EmulatedGpu, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A batch of these shapes takes 12.5 KB at most; the other rank has room for more."""
    plan = make_plan(graph, tmp_path, fanouts=FANOUTS, batch_size=SEEDS, hidden=HIDDEN)
    with closing(PlannedLoader(tmp_path, graph)) as loader:
        drawn = list(loader.batches(4))
    if free_bytes is not None:
        use = MemoryUse(parts={}, total=0, capacity=free_bytes, headroom=free_bytes)
        uses = {"rank0": use, "rank1": replace(use, headroom=10**9), "host0": use}
        plan = replace(plan, prediction=replace(plan.prediction, memory_bytes=uses))
    plain, loop = (loop_of(plan, graph, ROOMY, every=4) for _ in range(2))
    loop = replace(loop, comm=pair_up(monkeypatch))
    rows, kept = list[weakref.ref[torch.Tensor]](), list[int]()

    def hand_out(batch: MiniBatch) -> MiniBatch:
        kept.append(sum(each() is not None for each in rows))
        found = moved(batch)
        rows.append(weakref.ref(found.x))
        return found

    losses = loop.run(map(hand_out, drawn), 0, lambda _: None)
    assert losses == pytest.approx(eager(plain, drawn), rel=1e-6)
    assert max(kept) == most - 1


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_without_room_for_lists_changes_no_loss(graph: Graph, tmp_path: Path) -> None:
    """Runs before a capture send as many sums on all ranks, and all leave their group."""
    found: list[list[float]] = []
    for name, without_room in (("all", -1), ("one", 1)):
        plan_ranks(graph, tmp_path / name, replace(ROOMY, ahead=1))
        found.append(train_ranks(tmp_path / name, without_room).losses)
    assert len(found[0]) == 4
    assert found[0][-1] != found[0][0]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
