"""Bytes of a host's memory that batches pass through: those that the runtime holds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.cost.host_memory import DISK_BUDGET_BYTES, disk_bytes, locked_bytes
from gnnplan.planner.cost.memory import BatchTail, Budgets
from gnnplan.planner.cost.model import predict
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.placement.place import capacity
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.features.disk import Disk
from gnnplan.runtime.features.tier import Counters
from tests.planner.cost.by_hand import BATCH, NODES, candidate, request, rows
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
