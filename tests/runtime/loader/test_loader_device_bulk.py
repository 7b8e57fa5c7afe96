"""Bulks drawn on a device are the host's batches, whatever k, the bytes and the threads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import PlanError, SamplerError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import Sampler, TopologyPlacement
from tests.runtime.loader.test_loader_device import assert_same
from tests.support.plans import make_plan

pytest.importorskip("triton")

from gnnplan.runtime.loader.device import DeviceBulkStage, DeviceMiniBatch


@pytest.fixture(scope="module")
def tiny_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    return generate_sbm(folder, num_nodes=300, degree=6.0, feature_dim=6, num_classes=3, seed=5)


def plan_bulks(graph: Graph, folder: Path, k: int, *, bulk_bytes: int = 0, **settings: Any) -> None:
    plan = make_plan(graph, folder, **{"fanouts": [3, 2], "batch_size": 20, **settings})
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    strategy = replace(plan.strategy, bulk_batches=k, bulk_bytes=bulk_bytes)
    save_plan(replace(plan, strategy=strategy), arrays, folder)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "first_seen": (3, {}),
    "every_hop, ahead": (1000, {"dialect": "every_hop", "sample_threads": 2, "prefetch_depth": 3}),
    "bounded": (4, {"bulk_bytes": 200_000, "own_rows": 50}),
    "replicated": (2, {"topology": TopologyPlacement(policy="replicated"), "model": "gcn"}),
    "full": (2, {"sampler": Sampler(name="full"), "fanouts": [-1, -1], "batch_size": 40}),
    "pladies": (3, {"sampler": Sampler(
        name="pladies", dialect="every_hop", parameters={"sizes": "30,20", "kappa": 4.0})}),
}  # fmt: skip
SLOW = ("pladies",)
"""Plans whose host sampler takes long to compile."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PLANS]
)
def test_bulks_are_the_hosts(
    name: str, tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    k, settings = PLANS[name]
    plan_bulks(tiny_graph, tmp_path / "plan", k, **settings)
    loader = PlannedLoader(tmp_path / "plan", tiny_graph, device=kernel_device, on_device=True)
    host = PlannedLoader(tmp_path / "plan", tiny_graph, on_device=False)
    assert any(isinstance(stage, DeviceBulkStage) for stage in loader.stages)
    steps = min(5, len(host))
    for found, expected in zip(loader.batches(steps), host.batches(steps), strict=True):
        assert isinstance(found, DeviceMiniBatch)
        assert_same(found, expected)
    # The device counts the lists that it reads; the host's stacks do not.
    assert set(loader.meter.list_totals()[0]) == ({"own"} if name == "replicated" else set[str]())
    loader.close()
    host.close()


def test_a_position_in_the_middle_of_a_bulk_is_resumed(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    plan_bulks(tiny_graph, tmp_path / "plan", 3)
    loader = PlannedLoader(tmp_path / "plan", tiny_graph, device=kernel_device, on_device=True)
    first = list(loader.batches(2))
    state = loader.state_dict()
    rest = [batch.n_id for batch in loader.batches(3)]
    other = PlannedLoader(tmp_path / "plan", tiny_graph, device=kernel_device, on_device=True)
    other.load_state_dict(state)
    for found, expected in zip((batch.n_id for batch in other.batches(3)), rest, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert len(first) == 2
    loader.set_epoch(0)
    again = next(iter(loader.batches(1)))
    np.testing.assert_array_equal(again.n_id, first[0].n_id)


def test_what_the_host_cannot_stack_the_device_refuses_in_its_words(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    def words(folder: Path, kind: type[Exception], *, on_device: bool) -> str:
        device = kernel_device if on_device else torch.device("cpu")
        with pytest.raises(kind) as error:
            PlannedLoader(folder, tiny_graph, device=device, on_device=on_device)
        return str(error.value)

    labor = tmp_path / "labor"
    plan_bulks(tiny_graph, labor, 3, sampler=Sampler(name="labor"))
    for on_device in (False, True):
        found = words(labor, SamplerError, on_device=on_device)
        assert "for stacks of batches, found" in found
    cached = tmp_path / "cached"
    codes = np.arange(tiny_graph.num_nodes, dtype=np.uint32) << 8 | 1
    lists = {"topology_own_ids_0": np.empty(0, np.int64), "topology_location_0": codes}
    plan_bulks(
        tiny_graph, cached, 3, topology=TopologyPlacement(policy="cached", own_rows=[0]),
        more_arrays=lists,
    )  # fmt: skip
    assert len({words(cached, PlanError, on_device=each) for each in (False, True)}) == 1
