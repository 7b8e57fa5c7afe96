"""A topology in parts over GPUs: every grid planned, priced by its exchanges, in the memory sum."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gnnplan.planner.assemble import assemble
from gnnplan.planner.candidate import columns_of
from gnnplan.planner.cost.backends.grid import FETCH_KERNELS, replications
from gnnplan.planner.cost.rates import topology_bytes
from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain
from gnnplan.planner.search.choose import PlacedCandidate
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import open_grid
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.sampling.distributed.grid_rows import cut_shard
from tests.planner.cost.stages.test_gpu_launches import count
from tests.planner.search.dimensions.test_caches_gpu import WORK, cache, explore, graph, such
from tests.runtime.sampling.device_cases import random_graph, seeds_of
from tests.support.candidates import candidate_of_ranks

__all__ = ["cache", "count", "graph"]
MACHINES = [
    ("hgx-h100", 2), ("hgx-h100", 8), ("dgx-a100", 8), ("dgx-v100", 8), ("pcie-4090x4", 4),
    ("hgx-h100:2", 16), ("perlmutter:4", 16),
]  # fmt: skip
PRESETS = [
    pytest.param(name, ranks, id=f"{name} {ranks}", marks=() if ranks == 2 else pytest.mark.slow)
    for name, ranks in MACHINES
]
LADIES = {
    "sampler": "ladies", "sampler_parameters": {"sizes": "30,20"}, "dialect": "every_hop",
}  # fmt: skip


def grids(graph: Graph, machine: str, ranks: int, **settings: object) -> list[PlacedCandidate]:
    _, found = explore(graph, machine, ranks, **settings)
    assert not [each for each in found.refused if each.name == "topology in parts"]
    return such(found, lambda c: c.topology.policy == "partitioned")


@pytest.mark.parametrize(("machine", "ranks"), PRESETS)
def test_every_grid_is_planned_and_priced(graph: Graph, machine: str, ranks: int) -> None:
    found = grids(graph, machine, ranks, policy="none")
    shapes = {(c.topology.replication, c.bulk_batches) for c in (p.candidate for p in found)}
    assert shapes == {(c, k) for c in replications(ranks, ranks - 1) for k in (1, 8)}
    for each in found:
        candidate, parts = each.candidate, each.prediction.memory_bytes["rank0"].parts
        share = topology_bytes_of(graph) * candidate.topology.replication / ranks
        assert parts["topology"] == round(share) + 8 * (graph.num_nodes + 1)
        assert parts["stack"] > 0
        assert ("stack of batches" in parts) == (candidate.bulk_batches > 1)
        assert candidate.threads.sample == candidate.threads.capture == 0
        assert "over the links between the GPUs x adjacency" in each.prediction.provenance["sample"]
    assert grids(graph, machine, ranks, policy="none", **LADIES)


def topology_bytes_of(graph: Graph) -> int:
    from gnnplan.planner.pipeline import graph_ref

    return topology_bytes(graph_ref(graph))


def test_more_copies_leave_less_room_for_rows_and_longer_stacks_too(graph: Graph) -> None:
    found = grids(graph, "hgx-h100", 4, policy="song-jiang")
    kept = {
        (c.topology.replication, c.bulk_batches, c.cliques): p.placed.memories.room.own_bytes
        for p in found
        for c in [p.candidate]
    }
    for (copies, bulk, cliques), room in kept.items():
        assert (copies, bulk) == (1, 1) or room < kept[1, 1, ((0, 1, 2, 3),)]
        if bulk == 8:
            assert room < kept[copies, 1, cliques]
    # Rows lie in each process column once, or once over all GPUs that read each other.
    assert {cliques for copies, _, cliques in kept if copies == 2} == {
        ((0, 1, 2, 3),), ((0, 2), (1, 3)),
    }  # fmt: skip


def test_copies_that_are_asked_for_are_planned_alone_and_told(graph: Graph, tmp_path: Path) -> None:
    search, found = explore(graph, "hgx-h100", 4, replication=2)
    assert {p.candidate.topology.replication for p in found.priced} == {2}
    assert any(p.candidate.cliques == columns_of(p.candidate) for p in found.priced)
    best = min(found.priced, key=lambda p: p.seconds)
    assert "grid of 2 x 2 ranks" in best.name
    plan = save_plan(*assemble(search, found, best), tmp_path / "p")
    assert "topology in parts on the GPUs (2 copies)" in explain(plan).summary
    for ranks, copies in ((4, 3), (1, 1)):
        with pytest.raises(SettingsError, match=f"replication {copies}: expected several ranks"):
            explore(graph, "hgx-h100", ranks, replication=copies)
    with pytest.raises(SettingsError, match=r"replication 2: .* neighbours and layers of one"):
        explore(graph, "hgx-h100", 4, replication=2, sampler="labor")


def test_ranks_of_a_group_exchange_less_than_all() -> None:
    gpus = [f"gpu{g}" for g in range(8)]
    machine, every = load_preset("dgx-a100"), candidate_of_ranks(gpus=gpus)
    whole = exchange_seconds(machine, every, 1e8)
    assert exchange_seconds(machine, every, 1e8, group=range(8)) == whole
    assert exchange_seconds(machine, every, 1e8, group=[0, 4], messages=4) < 2 * whole
    assert exchange_seconds(machine, every, 1e8, group=[3]) == 0
    several = load_preset("perlmutter:2")
    names = [g.name for g in several.gpus]
    over = candidate_of_ranks(gpus=names, cliques=[range(4), range(4, 8)])
    near, far = (exchange_seconds(several, over, 1e8, group=g) for g in ([0, 1], [0, 4]))
    assert near < far
    # The card carries the bytes of all four ranks of a host, whose columns exchange at once.
    alone = candidate_of_ranks(gpus=[names[0], names[4]], cliques=[[0], [1]])
    assert exchange_seconds(several, alone, 1e8) < far


def test_a_fetch_starts_as_many_kernels_as_is_priced(
    count: Callable[..., int], kernel_device: torch.device
) -> None:
    pytest.importorskip("triton")
    from gnnplan.runtime.sampling.gpu.stack import GridTopology

    lists = random_graph(1)
    grid = open_grid(Communicator(), 1)
    shard = cut_shard(*lists, None, grid)
    topology = GridTopology.open(shard, grid, kernel_device, edge_ids=False)
    nodes = torch.from_numpy(seeds_of(lists, 6, 0)).to(kernel_device)
    found = count(lambda: topology.lists_of(nodes))
    assert found == pytest.approx(FETCH_KERNELS, rel=0.1)


def test_a_grid_draws_longer_than_a_gpu_with_all_lists(graph: Graph) -> None:
    _, found = explore(graph, "hgx-h100", 4, policy="none", workload=replace(WORK, fanouts=[5, 5]))
    sample = {
        (c.topology.policy, c.topology.replication): p.prediction.stages["sample"]
        for p in found.priced
        for c in [p.candidate]
        if c.threads.sample == 0 and c.bulk_batches == 1 and c.batching == "independent"
    }
    assert sample["partitioned", 1] > sample["replicated", 1]
    assert sample["partitioned", 2] > sample["replicated", 1]
