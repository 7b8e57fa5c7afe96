"""Cooperative batches planned where ranks are GPUs: in line, priced with every exchange."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.search.choose import PlacedCandidate
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.sampling.distributed.owner import Owners, deal
from tests.planner.search.dimensions.test_caches_gpu import WORK, cache, explore, graph, such
from tests.support.candidates import candidate_of_ranks

__all__ = ["cache", "graph"]
MACHINES = [
    ("hgx-h100", 2), ("hgx-h100", 8), ("dgx-a100", 8), ("dgx-v100", 8), ("pcie-4090x4", 4),
    ("perlmutter:4", 16),
]  # fmt: skip
PRESETS = [
    pytest.param(name, ranks, id=f"{name} {ranks}", marks=() if ranks == 2 else pytest.mark.slow)
    for name, ranks in MACHINES
]
EXCHANGES = ("exchange_ids", "exchange_rows", "halo_exchange")


def shared(graph: Graph, machine: str, ranks: int, **work: object) -> list[PlacedCandidate]:
    _, found = explore(graph, machine, ranks, policy="none", workload=replace(WORK, **work))
    assert not [each for each in found.refused if each.name == "cooperative batches"]
    return such(found, lambda c: c.batching == "cooperative")


@pytest.mark.parametrize(("machine", "ranks"), PRESETS)
def test_gpus_share_a_batch_in_line_and_pay_for_each_exchange(
    graph: Graph, machine: str, ranks: int
) -> None:
    found = shared(graph, machine, ranks)
    assert {each.candidate.topology.policy for each in found} == {"host", "replicated"}
    half = shared(graph, machine, ranks, precision="bfloat16")
    for each, narrow in zip(found, half, strict=True):
        stages, said = each.prediction.stages, each.prediction.provenance
        assert each.candidate.threads.sample == each.candidate.threads.capture == 0
        for name in EXCHANGES:
            assert stages[name] > 0
            assert "over the links between the GPUs" in said[name]
        assert narrow.prediction.stages["halo_exchange"] < stages["halo_exchange"]
        assert narrow.prediction.stages["exchange_rows"] == stages["exchange_rows"]
        assert each.prediction.memory_bytes["rank0"].parts["exchange"] > 0


def test_an_exchange_takes_longer_over_the_host_and_longest_over_a_card() -> None:
    gpus = [f"gpu{g}" for g in range(4)]
    machine = load_preset("dgx-a100")
    near = candidate_of_ranks(gpus=gpus)
    apart = candidate_of_ranks(gpus=gpus, cliques=[[g] for g in range(4)])
    seconds = [exchange_seconds(machine, each, 1e8) for each in (near, apart)]
    assert seconds[0] < seconds[1]
    several = load_preset("perlmutter:2")
    names = [g.name for g in several.gpus]
    over = replace(candidate_of_ranks(gpus=names, cliques=[range(4), range(4, 8)]))
    one = candidate_of_ranks(gpus=names[:4])
    assert exchange_seconds(several, over, 1e8) > exchange_seconds(several, one, 1e8)
    assert exchange_seconds(machine, candidate_of_ranks(gpus=["gpu0"]), 1e8) == 0


@pytest.mark.parametrize("dealt", ["hash", "partition"])
def test_a_device_finds_the_owners_that_the_host_finds(
    dealt: str, kernel_device: torch.device
) -> None:
    pytest.importorskip("triton")
    from gnnplan.runtime.sampling.gpu.cooperative import DeviceIds

    rng = np.random.default_rng(3)
    parts = rng.integers(0, 5, 500).astype(np.int32) if dealt == "partition" else None
    owners = Owners(5, parts, num_nodes=500)
    ids = rng.integers(0, 500, 700)
    device = DeviceIds(owners, 500, kernel_device)
    found = device.owners_of(torch.from_numpy(ids).to(kernel_device))
    np.testing.assert_array_equal(found.cpu().numpy(), owners.of(ids))
    (counts, order), (expected, places) = device.deal(found), deal(owners.of(ids), 5)
    assert counts == expected
    np.testing.assert_array_equal(order.cpu().numpy(), places)
