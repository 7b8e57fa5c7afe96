"""Sampling with the graph partitioned 1.5D gives the batches of one process, on every grid."""

import itertools
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import open_grid
from gnnplan.runtime.errors import BudgetExceeded, SamplerError
from gnnplan.runtime.sampling.distributed.grid import GridSampler, empty_graph
from gnnplan.runtime.sampling.distributed.grid_rows import (
    Exchange,
    FetchedRows,
    GridRows,
    Words,
    cut_shard,
)
from gnnplan.runtime.sampling.gpu.stack import DeviceGridRows, FetchedLists, stack_of
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.sampling.minibatch import MiniBatch
from tests.support.batches import contents, skewed_graph
from tests.support.grids import (
    CASES,
    Case,
    device_sampler,
    edge_weights,
    request,
    sample_alone,
    sample_on_device_grid,
    sample_on_grid,
)
from tests.support.inprocess import run_in_process
from tests.support.ranks import free_port, run_on_ranks

STEPS = [4, 5, 6]


def slow(*values: object) -> object:
    """What takes Triton's interpreter long."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "copies", "exchange"),
    [
        (8, 2, "one_shot"),
        (6, 2, "staged"),
        (9, 3, "one_shot"),
        (4, 4, "staged"),
        (1, 1, "one_shot"),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_gets_the_batches_of_the_single_process(
    case: Case, ranks: int, copies: int, exchange: str
) -> None:
    graph = skewed_graph(601)  # 601 rows divide into no grid
    found = run_in_process(
        ranks,
        lambda comm: sample_on_grid(open_grid(comm, copies), graph, case, STEPS, exchange=exchange),
    )
    for rank, (batches, _, _) in enumerate(found):
        assert batches == sample_alone(graph, case, rank, STEPS)


@pytest.mark.parametrize(("ranks", "copies"), [(4, 2), slow(3, 1), slow(6, 3), slow(4, 4)])
@pytest.mark.parametrize("case", [*CASES[:2], *map(slow, CASES[2:])], ids=str)
def test_devices_draw_what_one_process_draws(
    case: Case, ranks: int, copies: int, kernel_device: torch.device
) -> None:
    graph, steps = skewed_graph(101), [3, 4]

    def body(comm: Communicator) -> list[MiniBatch]:
        grid = open_grid(comm, copies)
        return [b.to_host() for b in sample_on_device_grid(grid, graph, case, steps, kernel_device)]

    weight = edge_weights(graph) if case.weighted else None
    alone = device_sampler(DeviceTopology.load(*graph, kernel_device), case, kernel_device, weight)
    for rank, batches in enumerate(run_in_process(ranks, body, in_turn=True)):
        expected = [stack_of(alone).sample_stack([request(101, s, rank)])[0] for s in steps]
        assert [contents(b) for b in batches] == [contents(b.to_host()) for b in expected]
        if not case.weighted:  # then factors are those of cores to the last bit too
            assert [contents(b) for b in batches] == sample_alone(graph, case, rank, steps)


@pytest.mark.parametrize(
    ("ranks", "copies"),
    [(1, 1), (4, 1), (4, 2), (8, 2), (9, 3), (6, 2), (16, 4), (6, 1), (12, 2)],
)
def test_m7_the_product_is_exact_on_any_grid(ranks: int, copies: int) -> None:
    # [M7], formulas 4.6: n = 13, ten non-zeros of Q, also where c^2 does not divide p.
    rng = np.random.default_rng(1)
    dense = rng.random((13, 13)) < 0.3
    indptr = np.concatenate([[0], np.cumsum(dense.sum(1))]).astype(np.int64)
    indices = np.nonzero(dense)[1].astype(np.int32)
    columns = rng.integers(0, 13, 10)

    def body(comm: Communicator) -> None:
        grid = open_grid(comm, copies)
        shard = cut_shard(indptr, indices, None, grid)
        nodes = columns[10 * grid.row // grid.num_rows : 10 * (grid.row + 1) // grid.num_rows]
        held = {k: torch.from_numpy(getattr(shard, k)) for k in ("indptr", "indices")}
        in_tensors, asked = replace(shard, **held), torch.from_numpy(nodes)
        for exchange, kind in itertools.product(Exchange, (GridRows, DeviceGridRows)):
            on_host = kind is GridRows
            rows = kind(
                shard=shard if on_host else in_tensors, grid=grid, exchange=exchange, edge_ids=True
            )
            found = rows.fetch(nodes if on_host else asked, Ledger())
            assert isinstance(found.cols, np.ndarray if on_host else torch.Tensor)
            assert found.ids.tolist() == sorted(set(nodes.tolist()))
            for i, node in enumerate(found.ids):
                columns_of = found.cols[found.ptr[i] : found.ptr[i + 1]]
                assert columns_of.tolist() == np.flatnonzero(dense[node]).tolist()
            places = (
                found.global_edges(np.arange(found.cols.shape[0]))
                if on_host
                else lists_of(rows, found).edge_ids(torch.arange(found.cols.shape[0]))
            )
            assert indices[np.asarray(places)].tolist() == found.cols.tolist()
            seen = rows.view(found)
            assert [int(seen[v]) for v in found.ids] == found.ptr[:-1].tolist()
            assert [int(seen[v + 1]) for v in found.ids] == found.ptr[1:].tolist()

    run_in_process(ranks, body)


def lists_of(rows: Any, found: FetchedRows) -> FetchedLists:
    """What was fetched as kernels see it; its counters are not looked at."""
    view, nothing = rows.view(found), torch.zeros(6, dtype=torch.int64)
    cols: Any = found.cols
    return FetchedLists(view, cols, None, None, (0, 0), (0, 0), nothing, 0, found=found)


@pytest.mark.parametrize("exchange", list(Exchange))
def test_m8_words_on_a_ring(exchange: Exchange) -> None:
    # [M8], formulas 4.7: p = 4, c = 2, ring of 8 (d = 2), kb = 8 spread evenly.
    ring = np.array([[(v - 1) % 8, (v + 1) % 8] for v in range(8)], dtype=np.int32)
    columns = np.array([[0, 4, 1, 5], [2, 6, 3, 7]])

    def body(comm: Communicator) -> Words:
        grid = open_grid(comm, 2)
        shard = cut_shard(np.arange(0, 17, 2), ring.reshape(-1), None, grid)
        rows = GridRows(shard=shard, grid=grid, exchange=exchange)
        rows.fetch(columns[grid.row], Ledger())
        return rows.words

    for rank, words in enumerate(run_in_process(4, body)):
        serves = rank // 2 == rank % 2  # column j handles stage j: R = c
        assert words.ids == (4 if serves else 0)  # kbc/p
        assert words.rows == (8 if serves else 0)  # ckbd/p = kbd/c
        assert words.reduced == 8  # ckbd/p
        assert words.link_rows == words.rows // 2
        assert words.link_reduced == 4  # half of P_i, from the other column


def test_a_budget_cuts_k_on_all_ranks_alike_and_changes_no_batch() -> None:
    graph, case, steps = skewed_graph(601), CASES[0], list(range(12))

    def sizes(budget: int) -> list[int]:
        found = run_in_process(
            4,
            lambda comm: sample_on_grid(
                open_grid(comm, 2), graph, case, steps, budget_bytes=budget
            ),
        )
        for rank, (batches, stacks, _) in enumerate(found):
            assert stacks == found[0][1]
            assert batches == sample_alone(graph, case, rank, steps)
        return found[0][1]

    small, large = sizes(100_000), sizes(1 << 30)
    assert large == [1, 11]
    assert small[0] == 1
    assert 1 < max(small) < 11
    with pytest.raises(BudgetExceeded, match="one step to fit 1000 bytes on every rank, found"):
        sizes(1000)


def test_samplers_without_a_stack_are_refused() -> None:
    def body(comm: Communicator) -> None:
        graph = skewed_graph(50)
        empty = empty_graph(50, graph[1].dtype)
        grid = open_grid(comm, 1)
        GridSampler(LaborSampler(*empty, [2]), cut_shard(*graph, None, grid), grid)

    with pytest.raises(SamplerError, match=r"found LaborSampler; plan with bulk_batches 1"):
        run_in_process(1, body)


def _on_rank(rank: int, size: int, port: int, copies: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=300))
    graph = skewed_graph(601)
    grid = open_grid(Communicator(), copies)
    for case, exchange in zip(CASES, itertools.cycle(Exchange), strict=False):
        found = sample_on_grid(grid, graph, case, STEPS, exchange=exchange)
        assert found[0] == sample_alone(graph, case, rank, STEPS)
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "copies"), [(1, 1), (2, 1), (4, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_real_processes_get_the_batches_of_the_single_process(
    tmp_path: Path, ranks: int, copies: int
) -> None:
    port = free_port()
    run_on_ranks(_on_rank, (ranks, port, copies, tmp_path), ranks)
    assert len(list(tmp_path.glob("done-*"))) == ranks
