"""Bulk loading: the batches step by step, whatever k, the budget, the threads and the grid."""

import itertools
import json
import os
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import ProcessGrid
from gnnplan.runtime.errors import PlanError, SamplerError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.loader.bulk import BulkSampleStage, with_own_arrays
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.loader.stages import seed_batch
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import Plan, Sampler, TopologyPlacement
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.support.batches import contents, skewed_graph
from tests.support.blocks import block_placement
from tests.support.inprocess import run_in_process
from tests.support.plans import make_plan
from tests.support.ranks import free_port, run_on_ranks

BATCH = 64


def bulk_plan(
    graph: Graph, folder: Path, *, ranks: int = 1, copies: int = 0, blocks: bool = False,
    bulk_batches: int = 1, bulk_bytes: int = 0, **settings: Any,
) -> Plan:  # fmt: skip
    """A plan with bulks; with `copies` partitioned topology, with `blocks` features likewise."""
    plan = make_plan(graph, folder, ranks=ranks, batch_size=BATCH, **settings)
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    strategy = replace(plan.strategy, bulk_batches=bulk_batches, bulk_bytes=bulk_bytes)
    if copies:
        topology = TopologyPlacement(policy="partitioned", replication=copies)
        strategy = replace(strategy, topology=topology)
    if blocks:
        features, arrays = block_placement(
            graph.num_nodes, ranks, copies, row_bytes=graph.row_bytes,
            storage_dtype=graph.feature_dtype,
        )  # fmt: skip
        strategy = replace(strategy, features=features)
    return save_plan(replace(plan, strategy=strategy), arrays, folder)


def load(loader: PlannedLoader) -> list[list[bytes | str]]:
    """Everything in the batches of two epochs, rows and labels included."""
    found = []
    for batch in itertools.chain(loader, loader):
        assert isinstance(batch, MiniBatch)
        found.append([*contents(batch), batch.x.numpy().tobytes(), batch.y.numpy().tobytes()])
    return found


SAMPLERS = [
    Sampler(dialect="first_seen"),
    Sampler(dialect="every_hop"),
    Sampler(name="full", dialect="first_seen"),
    Sampler(name="ladies", dialect="every_hop", parameters={"sizes": "60,80"}),
    Sampler(name="pladies", dialect="every_hop", parameters={"sizes": "60,80", "kappa": 4.0}),
    Sampler(name="fastgcn", dialect="every_hop", parameters={"sizes": "200,300"}),
]


def named(sampler: Sampler) -> str:
    return f"{sampler.name}-{sampler.dialect}"


@pytest.mark.parametrize("sampler", SAMPLERS, ids=named)
def test_bulks_are_the_batches_step_by_step(
    small_graph: Graph, tmp_path: Path, sampler: Sampler
) -> None:
    bulk_plan(small_graph, tmp_path / "single", sampler=sampler)
    expected = load(PlannedLoader(tmp_path / "single", small_graph))
    cases: list[dict[str, Any]] = [
        {"bulk_batches": 3},
        {"bulk_batches": 1000, "sample_threads": 2, "prefetch_depth": 3},
        {"bulk_batches": 4, "bulk_bytes": 40_000_000},
        {"bulk_batches": 2, "topology": TopologyPlacement(policy="replicated")},
        {"bulk_batches": 3, "copies": 1},
        {"bulk_batches": 1, "copies": 1},
    ]
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        bulk_plan(small_graph, folder, sampler=sampler, **case)
        loader = PlannedLoader(folder, small_graph)
        assert load(loader) == expected
        loader.close()


def test_a_position_in_the_middle_of_a_bulk_is_resumed(small_graph: Graph, tmp_path: Path) -> None:
    bulk_plan(small_graph, tmp_path / "plan", bulk_batches=3, sample_threads=1)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    assert len(loader) > 4
    through = [contents(batch) for batch in loader]
    first = list(loader.batches(4))  # one step into the second bulk of the next epoch
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (1, 4)
    rest = [contents(batch) for batch in loader.batches()]
    other = PlannedLoader(tmp_path / "plan", small_graph)
    other.load_state_dict(state)
    assert [contents(batch) for batch in other] == rest
    loader.set_epoch(0)  # and back again
    assert [contents(batch) for batch in loader] == through
    assert len(first) + len(rest) == len(loader)


def test_stacks_are_drawn_once_and_their_last_batches_do_not_keep_them() -> None:
    bulk = BulkSampler(*skewed_graph(), [5, 4], dialect=Dialect.FIRST_SEEN, edge_ids=True)
    drawn: list[tuple[int, range]] = []

    def draw(epoch: int, steps: range) -> Any:
        drawn.append((epoch, steps))
        seeds = [np.arange(step, step + 20, dtype=np.int64) for step in steps]
        yield bulk.sample_many(seeds, epoch=epoch, first_step=steps.start)

    stage = BulkSampleStage(draw, num_steps=7, bulk_batches=4, in_flight=2)

    def at(epoch: int, step: int) -> MiniBatch:
        return stage.submit(seed_batch(epoch, step, Dialect.FIRST_SEEN), 0)

    found = [at(0, step) for step in range(7)] + [at(1, 2)]
    assert drawn == [(0, range(4)), (0, range(4, 7)), (1, range(2, 4))]
    assert [(b.epoch, b.step) for b in found] == [*((0, s) for s in range(7)), (1, 2)]
    owns = [batch.n_id.base is None for batch in found]
    assert owns == [False, False, True, True, False, True, True, True]
    copied = found[3].blocks
    assert copied[0].indices.base is None
    assert copied[1].indices.base is copied[0].indices  # a prefix of the same CSR
    before = contents(found[0])
    assert contents(with_own_arrays(found[0])) == before


def test_the_budget_holds_while_batches_are_in_flight() -> None:
    graph, in_flight, steps = skewed_graph(20000, exponent=1.9), 3, 30
    seeds = [np.arange(256 * step, 256 * (step + 1), dtype=np.int64) for step in range(steps)]
    predicted = BulkSampler(*graph, [10, 5]).predict_bytes(seeds)
    budget = predicted.peak_bytes(16)
    single = NeighborSampler(*graph, [10, 5], dialect=Dialect.EVERY_HOP)
    bulk = BulkSampler.of(single, budget_bytes=budget, kept_batches=2 * in_flight)
    bulk.predict_bytes(seeds)  # what the thread keeps is there before the measurement
    sizes: list[int] = []

    def draw(epoch: int, steps: range) -> Any:
        for stack in bulk.stacks([Request(seeds=seeds[s], epoch=epoch, step=s) for s in steps]):
            sizes.append(len(stack))
            yield stack

    stage = BulkSampleStage(draw, num_steps=steps, bulk_batches=steps, in_flight=in_flight)
    held: deque[MiniBatch] = deque(maxlen=in_flight)
    tracemalloc.start()
    try:
        for step in range(steps):
            held.append(stage.submit(seed_batch(0, step, Dialect.EVERY_HOP), step))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 5 <= max(sizes) <= 16 - 2 * in_flight
    assert peak + bulk.scratch_bytes() <= budget


@pytest.mark.parametrize(("ranks", "copies"), [(4, 2), (6, 3), (3, 1)])
@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[3]], ids=named)
def test_a_grid_gives_each_rank_its_batches_with_features_in_process_columns(
    small_graph: Graph, tmp_path: Path, ranks: int, copies: int, sampler: Sampler
) -> None:
    bulk_plan(small_graph, tmp_path / "single", ranks=ranks, sampler=sampler)
    bulk_plan(
        small_graph, tmp_path / "grid", ranks=ranks, sampler=sampler, copies=copies, blocks=True,
        bulk_batches=3,
    )  # fmt: skip

    def body(comm: Communicator) -> tuple[list[list[bytes | str]], int, int]:
        loader = PlannedLoader(
            tmp_path / "grid", small_graph, rank=comm.rank, size=ranks, comm=comm
        )
        kept = list(loader.batches(2))
        peer = sum(batch.rows_by_source.get("peer", 0) for batch in kept)
        rows = sum(len(batch.n_id) for batch in kept)
        loader.set_epoch(0)
        return load(loader), peer, rows

    found = run_in_process(ranks, body)
    for rank, (batches, _, _) in enumerate(found):
        single = PlannedLoader(tmp_path / "single", small_graph, rank=rank, size=ranks)
        assert batches == load(single)
    # [M10]: the remote fraction of feature rows is 1 - c/p, here over random ids.
    remote = sum(peer for _, peer, _ in found) / sum(rows for _, _, rows in found)
    assert remote == pytest.approx(1 - copies / ranks, abs=0.03)


def test_plans_that_cannot_be_stacked_are_refused(small_graph: Graph, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"bulk_batches": 2, "sampler": Sampler(name="labor")}, SamplerError, "found LaborSampler"),
        ({"copies": 2}, PlanError, "divide the 1 ranks, found replication 2"),
        ({"copies": 1, "sampler": Sampler(name="labor")}, SamplerError, "found LaborSampler"),
    ]
    for number, (case, error, message) in enumerate(cases):
        bulk_plan(small_graph, tmp_path / str(number), **case)
        with pytest.raises(error, match=message):
            PlannedLoader(tmp_path / str(number), small_graph)


def test_a_closed_loader_gives_back_the_groups_of_its_grid(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ProcessGrid] = []
    monkeypatch.setattr(ProcessGrid, "close", lambda grid: closed.append(grid))
    bulk_plan(small_graph, tmp_path / "plan", copies=1, bulk_batches=2)
    loader = PlannedLoader(tmp_path / "plan", small_graph)
    next(iter(loader))
    # Loaders of other tests may be collected meanwhile.
    own: Any = loader._parts._bulk
    assert not [grid for grid in closed if grid is own._grid]
    loader.close()
    assert [grid.num_rows for grid in closed if grid is own._grid] == [1]


def _train_on_rank(rank: int, size: int, port: int, graph: Path, folder: Path) -> None:
    from gnnplan.runtime.launch.config import RunConfig
    from gnnplan.runtime.worker import run

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=300))
    open_graph(graph, validate=False)
    report = run(
        RunConfig(
            plan_folder=str(folder / "plan"), run_folder=str(folder / "run"), epochs=2,
            eval_every=0, pin=False,
        )
    )  # fmt: skip
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(report.losses))
    dist.destroy_process_group()


def losses(run: Callable[..., None], graph: Graph, folder: Path, size: int) -> list[float]:
    port = free_port()
    run_on_ranks(run, (size, port, graph.path, folder), size)
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.distributed
def test_partitioned_topology_trains_as_the_whole_one_does(
    small_graph: Graph, tmp_path: Path
) -> None:
    for name in ("whole", "grid"):
        (tmp_path / name / "run").mkdir(parents=True)
    bulk_plan(small_graph, tmp_path / "whole" / "plan", ranks=2)
    bulk_plan(
        small_graph, tmp_path / "grid" / "plan", ranks=2, copies=1, blocks=True, bulk_batches=3,
        sample_threads=1,
    )  # fmt: skip
    expected = losses(_train_on_rank, small_graph, tmp_path / "whole", 2)
    found = losses(_train_on_rank, small_graph, tmp_path / "grid", 2)
    assert len(found) == len(expected) > 8
    assert found == expected
