"""Work of a GPU's cache, of dependent numbers and of whole lists, counted in the runtime."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.planner.cost.memory import slot_bytes
from gnnplan.planner.cost.stages.host import (
    CACHE_STARTS,
    LAYOUT_STARTS,
    MIX_STARTS,
    SELECTION_STARTS,
)
from gnnplan.planner.cost.stages.sample import batch_launches
from gnnplan.runtime.sampling.locality import Correction
from gnnplan.runtime.sampling.minibatch import Dialect
from tests.planner.cost.stages.test_gpu_launches import ONE, count
from tests.runtime.sampling.device_cases import random_graph, seeds_of, topology_of

pytest.importorskip("triton")

from gnnplan.runtime.features.device_rows import DeviceRows
from gnnplan.runtime.features.device_store import DeviceCache, DeviceFeatureStore
from gnnplan.runtime.features.gather_triton import DeviceTable
from gnnplan.runtime.sampling.gpu.labor import DeviceLaborSampler
from gnnplan.runtime.sampling.gpu.locality import DeviceLocalitySampler

__all__ = ["count"]
ROWS, WIDTH = 64, 8


def store_of(device: torch.device, cache: DeviceCache | None) -> DeviceFeatureStore:
    """All rows on the device, behind a cache or not."""
    host = DeviceRows("host", torch.zeros(ROWS, WIDTH, device=device))
    rows = {0: host} if cache is None else {0: host, 1: DeviceRows("cache", cache.rows)}
    table = DeviceTable((np.arange(ROWS) << 8).astype(np.uint32), rows, device)
    if cache is not None:
        table.codes = cache.codes[:-1]
    return DeviceFeatureStore(table, cache=cache)


@pytest.mark.parametrize("policy", ["lru", "clock"])
def test_a_cache_starts_as_many_kernels_as_its_law_says(
    policy: Any, count: Callable[..., int], kernel_device: torch.device
) -> None:
    codes = (np.arange(ROWS) << 8).astype(np.uint32)
    cache = DeviceCache(
        codes, np.zeros(256, np.bool_), WIDTH, torch.float32, kernel_device, policy=policy,
        num_slots=16, number=1,
    )  # fmt: skip
    plain, cached = store_of(kernel_device, None), store_of(kernel_device, cache)
    ids = torch.arange(0, ROWS, 2, device=kernel_device)

    def kernels(store: DeviceFeatureStore) -> int:
        out = store.empty(ids.numel())
        counts = store.new_counts()
        return count(lambda: store.gather(ids, out, counts))

    found = kernels(cached) - kernels(plain)
    assert CACHE_STARTS[policy] - SELECTION_STARTS == pytest.approx(found, rel=0.05)


def test_a_slot_of_a_gpu_holds_what_its_directory_takes(kernel_device: torch.device) -> None:
    def held(slots: int) -> int:
        cache = DeviceCache(
            np.zeros(ROWS, np.uint32), np.zeros(256, np.bool_), WIDTH, torch.float32,
            kernel_device, policy="lru", num_slots=slots, number=1,
        )  # fmt: skip
        return cache.nbytes

    planned = slot_bytes(ONE.with_policy("lru")) + 4 * WIDTH
    assert 0.7 * planned <= (held(20_000) - held(10_000)) / 10_000 <= planned
    assert slot_bytes(ONE.with_policy("clock")) > slot_bytes(ONE.with_policy("lru"))


@pytest.mark.parametrize("hops", [1, 2])
def test_dependent_labor_starts_as_many_more_kernels_as_is_priced(
    hops: int, count: Callable[..., int], kernel_device: torch.device
) -> None:
    graph = random_graph(1)
    topology, seeds = topology_of(graph, kernel_device), seeds_of(graph, 6, 0)

    def kernels(kappa: int) -> int:
        sampler = DeviceLaborSampler(
            topology, [3] * hops, device=kernel_device, kappa=kappa, steps_per_epoch=100
        )
        return count(lambda: sampler.sample(seeds, epoch=0, step=5))

    more = kernels(4) - kernels(1)
    assert hops * (MIX_STARTS + LAYOUT_STARTS) == pytest.approx(more, rel=0.02)


@pytest.mark.parametrize("hops", [1, 2])
def test_local_neighbours_start_as_many_kernels_as_the_law_says(
    hops: int, count: Callable[..., int], kernel_device: torch.device
) -> None:
    graph = random_graph(1)
    sampler = DeviceLocalitySampler(
        topology_of(graph, kernel_device), [3] * hops, device=kernel_device,
        ring=np.zeros(len(graph[0]) - 1, np.uint8), factor=4.0,
        correction=Correction.REPLACEMENT, dialect=Dialect.FIRST_SEEN,
    )  # fmt: skip
    found = count(lambda: sampler.sample(seeds_of(graph, 6, 0), epoch=0, step=0))
    assert batch_launches(replace(ONE), hops, sampler="las") == pytest.approx(found, rel=0.05)
