"""On an emulated GPU evaluations read the device's store, and score what cores score."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gnnplan.runtime.emulation.gpu import EmulatedGpu
from gnnplan.runtime.emulation.threads import start, stop
from gnnplan.runtime.features.device_open import open_device_store
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import DynamicCache, Workload
from gnnplan.runtime.processor import EMULATED
from gnnplan.runtime.train import evaluate as subject
from gnnplan.runtime.train.layer_table import (
    DeviceLayerTable,
    LayerTable,
    TableRoom,
    make_layer_table,
)
from tests.support.plans import make_plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
WORK = Workload(hidden=8, fanouts=[3, 2], seed=4)


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    started = EmulatedGpu(capacity_bytes=64 << 20)
    start(started)
    yield started
    stop()


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    return generate_sbm(
        tmp_path / "graph", num_nodes=120, degree=5.0, feature_dim=12, num_classes=3, seed=5
    )


def open_store(graph: Graph, folder: Path, place: str) -> DeviceFeatureStore:
    cache = DynamicCache(policy="lru", rows=[40]) if place == "cache" else None
    budget: dict[str, Any] = {"disk_budget_bytes": 1 << 20} if place == "disk" else {}
    plan = make_plan(graph, folder, own_rows=50, cache=cache, **budget)
    return open_device_store(graph, plan, folder, 0, EMULATED)


@pytest.mark.parametrize("place", ["host", "disk", "cache"])
@pytest.mark.parametrize("fanouts", [None, [3, 2]])
def test_scores_are_those_of_cores_whatever_holds_the_rows(
    place: str, fanouts: list[int] | None, graph: Graph, gpu: EmulatedGpu, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build_model(WORK, graph.feature_dim, graph.num_classes, str(graph.task))
    ids = np.asarray(graph.test_idx)
    expected = subject.evaluate(model, graph, None, ids, workload=WORK, fanouts=fanouts)
    store = open_store(graph, tmp_path / "plan", place)
    held = None if store.cache is None else store.cache.held()[0].tolist()
    found = subject.evaluate(
        model.to(EMULATED), graph, store, ids, workload=WORK, fanouts=fanouts,
        device_table_bytes=1 << 20,
    )  # fmt: skip
    assert found == expected
    assert store.cache is None or store.cache.held()[0].tolist() == held
    store.close()


def test_the_host_reads_only_what_the_device_cannot(
    graph: Graph, gpu: EmulatedGpu, tmp_path: Path
) -> None:
    assert graph.x is not None
    ids = torch.arange(0, 120, 7)
    for place, on_disk in (("host", False), ("disk", True)):
        store = open_store(graph, tmp_path / place, place)
        rows, elsewhere = store.look_up(ids.to(EMULATED))
        apart = set(elsewhere.cpu().tolist())
        assert bool(apart) == on_disk
        here = [i for i in range(len(ids)) if i not in apart]
        np.testing.assert_array_equal(rows.cpu().numpy()[here], graph.x[ids.numpy()[here]])
        store.close()


def test_tables_lie_on_the_gpu_where_they_have_room(gpu: EmulatedGpu, tmp_path: Path) -> None:
    kinds = [
        type(
            make_layer_table(100, 8, None, tmp_path, TableRoom(device=EMULATED, device_bytes=size))
        )
        for size in (3199, 3200)
    ]
    assert kinds == [LayerTable, DeviceLayerTable]


@pytest.mark.parametrize("fanouts", [None, [3, 2]])
def test_an_evaluation_fits_a_budget_that_is_nearly_full(
    fanouts: list[int] | None, gpu: EmulatedGpu, tmp_path: Path
) -> None:
    graph = generate_sbm(
        tmp_path / "graph", num_nodes=400, degree=5.0, feature_dim=64, num_classes=3, seed=5
    )
    model = build_model(WORK, graph.feature_dim, graph.num_classes, str(graph.task)).to(EMULATED)
    store, memory = open_store(graph, tmp_path / "plan", "host"), gpu.memory
    ids = np.asarray(graph.test_idx)

    def used() -> int:
        gc.collect()  # Triton's interpreter leaves a launch's arguments in cycles
        return memory.used_bytes

    def score(free: int | None) -> subject.Score:
        memory.peak_bytes = used()
        memory.capacity_bytes = None if free is None else memory.used_bytes + free
        return subject.evaluate(
            model, graph, store, ids, workload=WORK, fanouts=fanouts, device_table_bytes=1 << 20
        )

    before, expected = used(), score(None)
    free = memory.peak_bytes - before
    assert (used(), expected.note) == (before, "")
    found = expected
    while not found.note:
        free //= 2
        found = score(free)
    assert used() == before
    assert memory.peak_bytes - before <= free
    assert found.count == expected.count
    # Which hop expands a vertex depends on the other seeds of its batch.
    assert abs(found.value - expected.value) <= (0.0 if fanouts is None else 0.1)
    assert found.note.startswith("validation and test go on in smaller pieces: rank 0 found no ")
    with pytest.raises(torch.OutOfMemoryError, match="--eval-fanouts"):
        score(4096)
    memory.capacity_bytes = None
    store.close()
