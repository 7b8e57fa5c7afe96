"""Cooperative training on real gloo ranks: the losses and gradients of one process."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gnnplan.runtime import worker
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.minibatch import check_model, exchange_hidden
from tests.support.cooperative import make_cooperative_plan, open_rank
from tests.support.inprocess import run_in_process
from tests.support.plans import make_plan
from tests.support.ranks import free_port, run_on_ranks, train_on_ranks, train_under_torchrun

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "sage": {"model": "sage"},
    "sage-first-seen": {"model": "sage", "sampler": Sampler(dialect="first_seen")},
    "sage-labor": {
        "sampler": Sampler(name="labor", dialect="every_hop", parameters={"kappa": 2.0})
    },
    "sage-exact-k": {
        "sampler": Sampler(
            name="labor",
            dialect="every_hop",
            parameters={"form": "exact_k", "estimator": "horvitz-thompson"},
        )
    },
    "gcn": {"model": "gcn", "fanouts": [6, 4, 3]},
    "gat": {"model": "gat", "heads": 4},
    # Three of four ranks have no seed in a step, and one owns nothing at all.
    "empty-shares": {"model": "sage", "batch_size": 1, "partition": True},
    "prefetched": {"model": "gcn", "sample_threads": 3, "prefetch_depth": 3, "partition": True},
    "own-rows": {"model": "sage", "own_rows": 400},
}


def settings_of(case: str, graph: Graph) -> dict[str, Any]:
    settings = {"batch_size": 64, "learning_rate": 0.03} | CASES[case]
    if settings.pop("partition", False):
        parts = np.random.default_rng(0).integers(0, 4, graph.num_nodes)
        settings["partition"] = np.where(parts == 3, 0, parts).astype(np.int32)
    return settings


def plain_settings(case: str, graph: Graph) -> dict[str, Any]:
    settings = settings_of(case, graph)
    settings.pop("partition", None)
    settings.setdefault("sampler", Sampler(dialect="every_hop"))
    return settings


def take_steps(folder: Path, graph: Graph, comm: Communicator) -> tuple[Any, ...]:
    """Losses, gradients summed over ranks, and the loader, after some steps."""
    loader, loop = open_rank(load_plan(folder), folder, graph, comm)
    losses, gradients = [], []
    for index, batch in enumerate(loader.batches(STEPS)):
        losses.append(loop.step(batch, index))
        gradients.append(loop.gradients.flat[:-1].clone().numpy())
        del batch
    return np.array(losses), np.stack(gradients), loader


def _train_rank(rank: int, size: int, port: int, graph_folder: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=300))
    graph, comm = open_graph(graph_folder, validate=False), Communicator()
    for case in CASES:
        losses, gradients, loader = take_steps(folder / case, graph, comm)
        meter = loader.meter
        for stage in ("exchange_ids", "exchange_rows", "halo_exchange", "forward_backward"):
            assert len(meter.seconds(stage)) == STEPS, (case, stage)
            assert min(meter.seconds(stage)) >= 0
        rows, _ = meter.totals()
        np.savez(
            folder / f"{case}-{rank}.npz",
            losses=losses,
            gradients=gradients,
            rows=sum(rows.values()),
        )
        loader.close()
        comm.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_one_process(
    small_graph: Graph, tmp_path: Path, size: int
) -> None:
    alone = run_alone(small_graph, tmp_path)
    for case in CASES:
        settings = settings_of(case, small_graph)
        if "partition" in settings:
            settings["partition"] = settings["partition"] % size
        make_cooperative_plan(small_graph, tmp_path / case, ranks=size, **settings)
    port = free_port()
    arguments = (size, port, small_graph.path, tmp_path)
    run_on_ranks(_train_rank, arguments, size)
    for case in CASES:
        found = [np.load(tmp_path / f"{case}-{rank}.npz") for rank in range(size)]
        losses, gradients, rows = alone[case]
        for each in found:
            np.testing.assert_allclose(each["losses"], losses, rtol=1e-5, err_msg=case)
            scale = np.abs(gradients).max()
            worst = np.abs(each["gradients"] - gradients).max() / scale
            assert worst < 1e-5, (case, worst)
        # Each row is loaded once for all ranks: as many as one process loads.
        assert sum(int(each["rows"]) for each in found) == rows, case


@pytest.mark.distributed
@pytest.mark.parametrize(
    "train_two", [train_on_ranks, pytest.param(train_under_torchrun, marks=pytest.mark.slow)]
)
def test_a_cooperative_plan_trains_evaluates_and_reports(
    small_graph: Graph, tmp_path: Path, train_two: Callable[..., RunReport]
) -> None:
    settings: dict[str, Any] = {"batch_size": 64, "fanouts": [5, 3], "sample_threads": 2}
    make_cooperative_plan(small_graph, tmp_path / "plan", ranks=2, **settings)
    report = train_two(tmp_path / "plan", epochs=2)
    make_plan(small_graph, tmp_path / "one", dialect="every_hop", **settings)
    config = {"epochs": 2, "eval_every": 1, "pin": False}
    (tmp_path / "run").mkdir()
    alone = worker.run(
        RunConfig(plan_folder=str(tmp_path / "one"), run_folder=str(tmp_path / "run"), **config)
    )
    np.testing.assert_allclose(report.losses, alone.losses, rtol=1e-5)
    assert report.test_score == pytest.approx(alone.test_score, abs=2e-3)
    for rank in report.ranks:
        assert {"exchange_ids", "exchange_rows", "halo_exchange"} <= set(rank.stages)


def run_alone(graph: Graph, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Losses, gradients and rows loaded by one process that takes the whole batch."""
    found = {}
    for case in CASES:
        make_plan(graph, folder / f"alone-{case}", **plain_settings(case, graph))
        losses, gradients, loader = take_steps(folder / f"alone-{case}", graph, Communicator())
        rows, _ = loader.meter.totals()
        found[case] = (losses, gradients, sum(rows.values()))
        loader.close()
    return found


def test_gradients_of_one_vertex_are_added_over_all_who_asked_for_it() -> None:
    """A star whose centre rank 0 owns and all aggregate; by hand, its gradient is the sum."""
    indptr = np.array([0, 0, 1, 2, 3, 4], np.int64)
    indices = np.zeros(4, np.int32)
    owners = Owners(3, np.array([0, 0, 1, 2, 2], np.int32), num_nodes=5)
    seeds = np.array([1, 2, 3, 4])

    def rank(comm: Any) -> tuple[list[float], float]:
        sampler = CooperativeSampler(
            Sampler(name="full", dialect="every_hop"), indptr, indices, [-1], 0, owners=owners,
            comm=comm,
        )  # fmt: skip
        batch = sampler.sample(seeds[owners.of(seeds) == comm.rank], epoch=0, step=0)
        exchange = batch.exchanges[0]
        own = torch.from_numpy(exchange.ids[: exchange.num_own].astype(np.float32))
        own = own.reshape(-1, 1).requires_grad_()
        rows = exchange_hidden(own, exchange, comm)
        assert rows[:, 0].tolist() == exchange.ids.tolist()
        weight = torch.tensor([[float(10**comm.rank)]])
        (rows[exchange.ids == 0] * weight).sum().backward()
        assert own.grad is not None
        sent = comm.traffic[Stage.HALO_EXCHANGE].sent_bytes
        return own.grad[exchange.ids[: exchange.num_own] == 0, 0].tolist(), sent

    results = run_in_process(3, rank)
    # Rank 0 once (its own row), rank 1 once, rank 2 once although two of its vertices want it.
    assert results[0][0] == [1 + 10 + 100]
    # Forward: two rows of 4 bytes leave rank 0; backward: one row leaves each of the others.
    assert [sent for _, sent in results] == [8, 4, 4]


def test_a_model_that_cannot_stop_between_layers_is_refused() -> None:
    with pytest.raises(InputError, match="forward_layer"):
        check_model(nn.Linear(2, 2))
