"""Faults planted in a GPU's stores, lanes and kernels are seen by training on an emulated GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gnnplan.runtime.graph.dataset import Graph
from tests.emulated.modes import Mode
from tests.support.emulated_ranks import make_graph, plan_mode
from tests.support.product import ROOT

pytest.importorskip("triton")

STEPS = 3
TRAIN = f"""
import json, sys
from gnnplan.runtime import worker
from gnnplan.runtime.launch.config import RunConfig
report = worker.run(RunConfig(
    plan_folder="plan", run_folder="run", epochs=1, eval_every=0, max_steps={STEPS}, pin=False
))
print(json.dumps(report.losses))
"""
MODE = Mode(
    name="faulty", row="rows", devices=1, settings={"policy": "degree"}, room_rows=150,
    wants=lambda candidate: candidate.threads.sample > 0 and candidate.topology.policy == "host",
)  # fmt: skip
FAULTS: dict[str, tuple[str, str, str]] = {
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
        "runtime/loader/loader.py",
        "                streams.wait(mark)\n                streams.keep",
        "                streams.keep",
    ),
    "training that does not wait for the batch": (
        "runtime/loader/loader.py",
        "    if mark is not None:\n        streams.wait(mark)\n",
        "    if mark is not None:\n",
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
"""File, what stands there once, and what stands there instead."""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of one emulated GPU, and a graph beside it."""
    folder = tmp_path_factory.mktemp("faults")
    graph: Graph = make_graph(folder / "graph")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(folder / "cache"))
        plan = plan_mode(MODE, graph, folder / "plan")
    assert {source.kind for source in plan.strategy.features.sources} == {"own", "host"}
    return folder


def train(planned: Path, place: Path, fault: tuple[str, str, str] | None) -> list[float] | str:
    """Losses of a copy of the product with a fault in it; the last line of its error instead."""
    for package in ("gnnplan", "api", "planner", "runtime"):
        shutil.copytree(ROOT / package, place / package, symlinks=True)
    shutil.copytree(planned / "plan", place / "plan")
    (place / "run").mkdir()
    if fault is not None:
        path, old, new = place / fault[0], *fault[1:]
        text = path.read_text()
        assert text.count(old) == 1, f"{fault[0]}: {old!r}"
        path.write_text(text.replace(old, new))
    environment = os.environ | {
        "PYTHONPATH": str(place), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=place, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def losses(planned: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What is trained without a fault."""
    found = train(planned, tmp_path_factory.mktemp("whole"), None)
    assert isinstance(found, list), found
    assert len(found) == STEPS
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, planned: Path, losses: list[float], tmp_path: Path) -> None:
    found = train(planned, tmp_path, FAULTS[name])
    assert found != pytest.approx(losses, rel=1e-5) if isinstance(found, list) else found
