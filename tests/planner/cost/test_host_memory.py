"""Bytes of a host's memory that batches pass through: those that the runtime holds."""

import math
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from gnnplan.planner.cost.graph_memory import block_bytes, sampling_bytes
from gnnplan.planner.cost.host_memory import (
    DISK_BUDGET_BYTES,
    disk_bytes,
    drawn_parts,
    locked_bytes,
)
from gnnplan.planner.cost.memory import BatchTail, Budgets, batch_bytes
from gnnplan.planner.cost.model import predict
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.placement.place import capacity
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.request import rates_of_such_cores
from gnnplan.runtime.features.disk import Disk
from gnnplan.runtime.features.location import LocationTable, encode
from gnnplan.runtime.features.store import FeatureStore
from gnnplan.runtime.features.tier import Counters, Dense
from gnnplan.runtime.loader.stages import BufferRing
from gnnplan.runtime.plan.schema import Sampler, Source, Threads
from tests.planner.cost.by_hand import BATCH, GRAPH, NODES, candidate, request, rows
from tests.support.candidates import candidate_of_ranks

ON_GPU = candidate_of_ranks(gpus=["gpu0"])
ROW_BYTES = 400


@pytest.fixture(scope="module")
def siton() -> MachineModel:
    return load_preset("siton")


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_rank_reads_the_disk_in_the_bytes_that_its_tier_reserves(
    share: float, tmp_path: Path
) -> None:
    count = round(share * BatchTail.of(request().profile.batch(BATCH)).vertices)
    np.save(tmp_path / "x.npy", np.zeros((NODES, ROW_BYTES // 4), np.float32))
    tier, ids = Disk(tmp_path / "x.npy", budget_bytes=DISK_BUDGET_BYTES), np.arange(count)
    out = np.empty((count, ROW_BYTES // 4), np.float32)
    tier.read(ids, ids, np.array([count]), out, Counters())
    tier.close()
    found = predict(request(), candidate(), rows(host=1e4 * (1 - share), disk=1e4 * share))
    assert found.memory_bytes["rank0"].parts["rows from disk"] == tier.budget.peak_bytes


@pytest.mark.parametrize("loaders", [0, 2])
def test_each_thread_looks_rows_up_in_bytes_that_are_counted(
    loaders: int, siton: MachineModel
) -> None:
    most = math.ceil(BatchTail.of(request().profile.batch(BATCH)).vertices)
    nodes, table = np.arange(NODES), np.zeros((NODES, 2), np.float32)
    location = LocationTable(encode(nodes % 2, nodes), [Source(kind="own"), Source(kind="host")])
    dense = {0: Dense("own", table, private=False), 1: Dense("host", table, private=False)}
    store, ids = FeatureStore(location, dense, [], 2), nodes[:most]
    for _ in range(max(1, loaders)):
        reader = Thread(target=store.read, args=(ids, np.empty((most, 2), np.float32)))
        reader.start()
        reader.join()
    one = candidate(loaders=loaders)
    found = predict(request(), one, rows(own=5e3, host=5e3)).memory_bytes["rank0"]
    assert found.parts["gather"] == store.resident_bytes
    asked = replace(request(siton), sparse=True, core_rates=rates_of_such_cores(siton))
    one = replace(ON_GPU, threads=Threads(sample=loaders))
    assert drawn_parts(asked, one)["gather"] == store.resident_bytes
    assert "gather" not in drawn_parts(replace(asked, sparse=False), one)


def test_no_batch_reads_the_disk_in_more_than_its_budget() -> None:
    many = request()
    batches = [
        replace(batch, vertices=[each.scaled(1000.0) for each in batch.vertices])
        for batch in many.profile.batches
    ]
    many = replace(many, profile=replace(many.profile, batches=batches))
    size = disk_bytes(many, candidate())
    assert DISK_BUDGET_BYTES - 48 < size <= DISK_BUDGET_BYTES


def test_rows_for_a_gpu_pass_through_the_disks_buffers_and_page_locked_memory(
    siton: MachineModel,
) -> None:
    asked, placed = request(siton), rows(host=5e3, disk=5e3)
    without = predict(asked, ON_GPU, rows(host=1e4)).memory_bytes["host0"]
    found = predict(asked, ON_GPU, placed).memory_bytes["host0"]
    most = BatchTail.of(asked.profile.batch(BATCH))
    sizes = {
        locked_bytes(ROW_BYTES * n) for n in (most.vertices / 2, most.vertices / most.scale / 2)
    }
    assert found.parts["rows from disk"] == disk_bytes(request(), candidate(), 0.5) + sum(sizes)
    assert found.total == without.total + found.parts["rows from disk"]


@pytest.mark.parametrize("of", ["cores", "GPUs"])
def test_a_host_holds_fewer_rows_for_what_reads_the_others_from_the_disk(
    of: str, siton: MachineModel
) -> None:
    one = ON_GPU if of == "GPUs" else candidate()
    free = request(siton if of == "GPUs" else None)
    host = predict(free, one, rows(host=1e4)).memory_bytes["host0"]
    limit = host.total - 1_000_000
    short = replace(free, budgets=Budgets(host_bytes=limit))
    held = capacity(short, one, shared_host=True).host_rows
    assert held is not None
    placed = replace(rows(host=5e3, disk=5e3), host_rows=held)
    assert predict(short, one, placed).memory_bytes["host0"].headroom >= 0
    assert predict(short, one, replace(placed, host_rows=NODES)).memory_bytes["host0"].headroom < 0


@pytest.mark.parametrize("loaders", [0, 1])
def test_rows_that_cores_gather_for_a_gpu_lie_in_its_ring_of_page_locked_buffers(
    loaders: int, siton: MachineModel
) -> None:
    one = replace(ON_GPU, threads=Threads(sample=loaders), prefetch_depth=2)
    asked = replace(request(siton), sparse=True, core_rates=rates_of_such_cores(siton))
    most = round(BatchTail.of(asked.profile.batch(BATCH)).vertices)
    ahead = one.prefetch_depth if loaders else 0
    ring = BufferRing(ahead + 2, ROW_BYTES // 4)
    rows_alive = [ring.take(most) for _ in range(ahead + 2)]
    locked = sum(locked_bytes(buffer.nbytes) for buffer in ring._buffers)
    assert len(rows_alive) == ahead + 2
    parts = drawn_parts(asked, one)
    blocks = batch_bytes(most, block_bytes(asked, one, asked.profile.batch(BATCH)), 0, 1 + ahead)
    assert parts["batches"] == locked + blocks
    assert parts["location table"] == 4 * NODES
    without = predict(replace(asked, sparse=False), one, rows(host=1e4)).memory_bytes["host0"]
    found = predict(asked, one, rows(host=1e4)).memory_bytes["host0"]
    assert found.total == without.total + sum(parts.values())


def test_cores_that_draw_for_a_gpu_have_tables_and_blocks_on_the_host(siton: MachineModel) -> None:
    changes = Sampler(
        name="las", parameters={"factor": 2, "schedule": "measured", "weights": "graph"}
    )
    asked = replace(request(siton), user_sampler=changes, core_rates=rates_of_such_cores(siton))
    largest = BatchTail.of(asked.profile.batch(BATCH))
    parts = drawn_parts(asked, ON_GPU)
    assert parts == {
        "sampling": sampling_bytes(asked, ON_GPU, asked.profile.batch(BATCH)),
        "batches": batch_bytes(largest.vertices, 8 * 4_001 + 8 * 20_000, 0, 1),
        "sampler tables": NODES,
    }
    found = predict(asked, ON_GPU, rows(host=1e4)).memory_bytes["host0"].parts
    assert {name: found[name] for name in parts} == parts
    assert found["edge weights"] == 4 * GRAPH.num_edges
    fixed = replace(asked, user_sampler=replace(changes, parameters={"factor": 2}))
    assert drawn_parts(fixed, ON_GPU) == {}
    assert not {*parts, "edge weights"} & {
        *predict(fixed, ON_GPU, rows(host=1e4)).memory_bytes["host0"].parts
    }


@pytest.mark.parametrize("weights", ["none", "graph"])
def test_a_host_holds_the_weights_by_which_its_cores_draw(weights: str) -> None:
    asked = replace(request(), user_sampler=Sampler(parameters={"weights": weights}))
    found = predict(asked, candidate(), rows(host=1e4)).memory_bytes["host0"].parts
    assert found.get("edge weights", 0) == (4 * GRAPH.num_edges if weights == "graph" else 0)
