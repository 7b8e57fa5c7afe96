"""Faults planted in a GPU's stores, lanes and kernels are seen by training on an emulated GPU."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gnnplan.runtime.graph.dataset import Graph
from tests.emulated.modes import MODES, Mode
from tests.support.emulated_ranks import make_graph, plan_mode
from tests.support.product import ROOT
from tests.support.ranks import free_port

pytest.importorskip("triton")

STEPS = 3
TRAIN = f"""
import json, sys
from gnnplan.runtime import worker
from gnnplan.runtime.launch.config import RunConfig
report = worker.run(RunConfig(
    plan_folder="plan", run_folder="run", epochs=1, eval_every=0, max_steps={STEPS}, pin=False,
    collective_seconds=60.0,
))
print(json.dumps(report.losses))
"""
ALONE, MAPPED, EXCHANGED = "one GPU", "peers mapped", "peers exchanged"

FAULTY = {
    ALONE: Mode(
        name="faulty", row="rows", devices=1, settings={"policy": "degree"}, room_rows=150,
        wants=lambda candidate: candidate.threads.sample > 0
        and candidate.topology.policy == "host",
    ),
    MAPPED: next(mode for mode in MODES if (mode.row, mode.name) == ("rows", MAPPED)),
    EXCHANGED: next(mode for mode in MODES if (mode.row, mode.name) == ("rows", EXCHANGED)),
}  # fmt: skip
"""Modes in which a fault is planted."""
SOURCES = {ALONE: {"own", "host"}, MAPPED: {"own", "peer", "host"}}
FAULTS: dict[str, tuple[str, ...]] = {
    "own rows in another order": (
        "runtime/features/device_open.py",
        'rows[number] = DeviceRows("own", own)',
        'rows[number] = DeviceRows("own", own.flip(0).contiguous())',
    ),
    "host rows not page-locked": (
        "runtime/features/device_rows.py",
        "    room.lock(device)\n    _fill(table, rows)\n",
        "    _fill(table, rows)\n",
    ),
    "lists not page-locked": (
        "runtime/features/device_rows.py",
        "    room.lock(device)\n    return room.tensor(dtype, values.size)",
        "    return room.tensor(dtype, values.size)",
    ),
    "labels left on the host": (
        "runtime/loader/device.py",
        "batch.y = labels.to(self._device, non_blocking=True)",
        "batch.y = labels",
    ),
    "tables not waited for": ("runtime/loader/factory.py", "processor.synchronize()", "pass"),
    "a lane that does not wait for the one before": (
        "runtime/train/overlap.py",
        "            streams.wait(mark)\n            streams.keep",
        "            streams.keep",
    ),
    "training that does not wait for the batch": (
        "runtime/train/overlap.py",
        "    if made.mark is not None:\n        streams.wait(made.mark)\n",
        "    if made.mark is not None:\n",
    ),
    "a mark before the work that it stands for": (
        "runtime/train/overlap.py",
        "        batch = stage.wait(stage.submit(made.batch, index))\n"
        "        if stage.lane:  # the others work on the host, and are done\n"
        "            mark, lane = streams.mark(), stage.lane\n",
        "        early = streams.mark()\n"
        "        batch = stage.wait(stage.submit(made.batch, index))\n"
        "        if stage.lane:\n"
        "            mark, lane = early, stage.lane\n",
    ),
    "locations one slot off": (
        "runtime/features/device_open.py",
        "table = DeviceTable(self.location.codes, rows, self.device)",
        "table = DeviceTable(self.location.codes + np.uint32(256), rows, self.device)",
    ),
    "a peer's row that is stale": (
        "runtime/features/device_rows.py",
        "    return processor_of(device).map_peer(rows)",
        "    rows[0] = rows[-1]\n    return processor_of(device).map_peer(rows)",
        MAPPED,
    ),
    "own rows in the place of a peer's": (
        "runtime/features/device_open.py",
        'rows[number] = DeviceRows("peer", shared.peers[rank])',
        'rows[number] = DeviceRows("peer", shared.own)',
        MAPPED,
    ),
    "a peer's memory that is not mapped": (
        "runtime/features/device_rows.py",
        "    return processor_of(device).map_peer(rows)",
        "    return rows",
        MAPPED,
    ),
    "rows sent in another order than asked for": (
        "runtime/features/peer.py",
        "served = self._own[asked.to(device)].contiguous()",
        "served = self._own[asked.to(device).flip(0)].contiguous()",
        EXCHANGED,
    ),
    "rows of others written to wrong places": (
        "runtime/features/peer.py",
        "out.index_copy_(0, places, rows",
        "out.index_copy_(0, places.flip(0), rows",
        EXCHANGED,
    ),
    "counts read before they are there": (
        "runtime/loader/device.py",
        "elif not each.mark.done():",
        "elif each.index < 0:",
    ),
    "a gather one slot off": (
        "runtime/features/gather_triton.py",
        "number, slot = wide & MASK, wide >> BITS",
        "number, slot = wide & MASK, (wide >> BITS) - 1",
    ),
    "a gather to the wrong place": (
        "runtime/features/gather_triton.py",
        "target = out + place[:, None] * STRIDE",
        "target = out + (place[:, None] ^ 1) * STRIDE",
    ),
    "local ids that are swapped": (
        "runtime/sampling/gpu/relabel.py",
        "tl.store(local + at, rank.to(tl.int32), mask=asked)",
        "tl.store(local + at, rank.to(tl.int32) ^ 1, mask=asked)",
    ),
    "a mean over one too many": (
        "runtime/models/aggregate_triton.py",
        "        total /= tl.maximum(last - first, 1)",
        "        total /= tl.maximum(last - first + 1, 1)",
    ),
    "a gradient that is lost": (
        "runtime/models/aggregate_triton.py",
        "tl.atomic_add(target, share, mask=live[:, None] & inside",
        "tl.atomic_add(target, share, mask=live[:, None] & (inside & (column > 0))",
    ),
}
"""File, what stands there once, what stands there instead, and the mode (default: one GPU)."""


def mode_of(name: str) -> str:
    return FAULTS[name][3] if len(FAULTS[name]) > 3 else ALONE


def test_what_faults_replace_stands_once_in_the_product() -> None:
    counts = {name: (ROOT / each[0]).read_text().count(each[1]) for name, each in FAULTS.items()}
    assert counts == dict.fromkeys(FAULTS, 1)
    assert len(FAULTS) >= 10


@dataclass(frozen=True)
class Planned:
    """A folder with a plan of emulated GPUs, and what is trained under it without a fault."""

    folder: Path
    ranks: int
    losses: list[float]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Planned]:
    """Plan and train in a mode, once."""
    folder = tmp_path_factory.mktemp("faults")
    graph: Graph = make_graph(folder / "graph")

    @functools.cache
    def make(name: str) -> Planned:
        place = folder / name.replace(" ", "-")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GNNPLAN_CACHE", str(folder / "cache"))
            plan = plan_mode(FAULTY[name], graph, place / "plan")
        kinds = {source.kind for source in plan.strategy.features.sources}
        assert kinds == SOURCES.get(name, kinds)
        losses = train(place, plan.num_ranks, place / "whole", None)
        assert isinstance(losses, list), losses
        assert len(losses) == STEPS
        return Planned(place, plan.num_ranks, losses)

    return make


def train(
    planned: Path, ranks: int, place: Path, fault: tuple[str, ...] | None
) -> list[float] | str:
    """Losses of a copy of the product with a fault in it; the last line of its error instead."""
    for package in ("gnnplan", "api", "planner", "runtime"):
        shutil.copytree(ROOT / package, place / package, symlinks=True)
    shutil.copytree(planned / "plan", place / "plan")
    (place / "run").mkdir()
    if fault is not None:
        path, old, new = place / fault[0], *fault[1:3]
        path.write_text(path.read_text().replace(old, new))
    environment = os.environ | {
        "PYTHONPATH": str(place), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    for rank in range(ranks):
        with (
            (place / f"rank{rank}.out").open("wb") as out,
            (place / f"rank{rank}.err").open("wb") as err,
        ):
            running.append(
                subprocess.Popen(
                    [sys.executable, "-c", TRAIN], cwd=place, stdout=out, stderr=err,
                    env=environment | {"RANK": str(rank)},
                )
            )  # fmt: skip
    failed = _first_failed(running)
    if failed is not None:
        return (place / f"rank{failed}.err").read_text().strip().splitlines()[-1]
    return json.loads((place / "rank0.out").read_text().splitlines()[-1])


def _first_failed(running: list["subprocess.Popen[bytes]"]) -> int | None:
    """Wait for all ranks, or for one that fails, after which the others are ended."""
    while any(each.poll() is None for each in running):
        if any(each.poll() for each in running):
            break
        time.sleep(0.1)
    failed = next((rank for rank, each in enumerate(running) if each.poll()), None)
    for each in running:
        each.kill()
        each.wait()
    return failed


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, plans: Callable[[str], Planned], tmp_path: Path) -> None:
    planned = plans(mode_of(name))
    found = train(planned.folder, planned.ranks, tmp_path, FAULTS[name])
    assert found != pytest.approx(planned.losses, rel=1e-5) if isinstance(found, list) else found
