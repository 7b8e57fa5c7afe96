"""The device's store reads what the host's store reads, and counts the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import PlanError
from runtime.features.store import open_store
from runtime.plan import Source

pytest.importorskip("triton")

OWN_AND_HOST = [Source(kind="own"), Source(kind="host")]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dim", [1, 100])
def test_rows_and_counters_equal_the_host_stores(
    make_graph: Any, make_plan: Any, tmp_path: Path, dtype: Any, dim: int,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    from runtime.features.device_store import open_device_store

    graph = make_graph(num_nodes=120, dim=dim, dtype=dtype)
    plan = make_plan(graph, OWN_AND_HOST)
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    host = open_store(graph, plan, tmp_path / "plan", 0)
    ids = np.concatenate([[0, 119, 0], np.random.default_rng().integers(0, 120, 60)])
    for count in (0, 1, ids.size):
        found, expected = (np.full((count, dim), np.nan, np.float32) for _ in range(2))
        mine, theirs = store.read(ids[:count], found), host.read(ids[:count], expected)
        np.testing.assert_array_equal(found, expected)
        assert (mine.rows, mine.bytes) == (theirs.rows, theirs.bytes)


def test_gathers_count_on_the_device_until_asked(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device
) -> None:
    from runtime.features.device_store import open_device_store

    graph = make_graph(num_nodes=50, dim=4)
    plan = make_plan(graph, OWN_AND_HOST)
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    ids = torch.arange(50, device=kernel_device)
    out = torch.empty((50, 4), device=kernel_device)
    for _ in range(3):
        store.gather(ids, out)
    np.testing.assert_array_equal(out.cpu().numpy(), np.asarray(graph.x))
    assert sum(store.counters().rows.values()) == 150
    assert sum(store.counters().rows.values()) == 0
    store.gather(ids + 1, out)
    with pytest.raises(IndexError, match="found 1 outside"):
        store.counters()


def test_ids_outside_the_graph_are_refused(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device
) -> None:
    from runtime.features.device_store import open_device_store

    graph = make_graph(num_nodes=10, dim=4)
    store = open_device_store(
        graph, make_plan(graph, OWN_AND_HOST), tmp_path / "plan", 0, kernel_device
    )
    with pytest.raises(IndexError, match="found 2 outside"):
        store.read(np.array([-1, 3, 10]), np.empty((3, 4), np.float32))


def test_sources_that_the_device_cannot_address_are_named(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device
) -> None:
    from runtime.features.device_store import open_device_store

    graph = make_graph(num_nodes=30, dim=4)
    plan = make_plan(graph, [Source(kind="own"), Source(kind="disk")])
    with pytest.raises(PlanError, match="found disk"):
        open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
