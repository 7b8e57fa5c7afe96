"""Without Triton cores do all their work, and what needs it says so in one line."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.profile.loading import KeptLoaders
from gnnplan.planner.profile.protocol import GPU, GpuTimingReply
from gnnplan.planner.profile.timing_process import build
from gnnplan.runtime.emulation.gpu import EmulatedGpu
from gnnplan.runtime.emulation.threads import start
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import build_device_sampler
from tests.support.plans import make_plan
from tests.support.product import ROOT

BLOCKING = """
import os, pathlib, sys
sys.modules["triton"] = None
pathlib.Path(__file__).with_name(f"{os.getpid()}.blocked").touch()
"""
NEEDS = """
import importlib, pkgutil
import gnnplan.planner, gnnplan.runtime
for package in (gnnplan.planner, gnnplan.runtime):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name == "triton":
                print(found.name)
"""
TRAINS = """
import gnnplan
seeds = sum(len(batch.seeds) for batch in gnnplan.PlannedLoader("plan"))
report = gnnplan.train("plan", epochs=1)
print(seeds, report.epochs[0].loss)
"""


def run(folder: Path, code: str) -> str:
    """Run code where no process can import Triton; return what it printed."""
    (folder / "blocking").mkdir()
    (folder / "blocking" / "sitecustomize.py").write_text(BLOCKING)
    paths = os.pathsep.join([str(folder / "blocking"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=250,
        check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_kernels_and_what_launches_them_import_triton(tmp_path: Path) -> None:
    needing = set(run(tmp_path, NEEDS).split())
    launching = {"gnnplan.runtime.features.device_open", "gnnplan.planner.profile.gpu_timing"}
    kernels = {name for name in needing if ".sampling.gpu." in name or name.endswith("_triton")}
    assert "gnnplan.runtime.features.gather_triton" in kernels
    assert needing - kernels == launching


@pytest.mark.distributed
def test_cores_train_without_triton(tmp_path: Path, small_graph: Graph) -> None:
    make_plan(small_graph, tmp_path / "plan")
    seeds, loss = run(tmp_path, TRAINS).splitlines()[-1].split()
    assert int(seeds) == len(small_graph.train_idx)
    assert math.isfinite(float(loss))
    assert len(list((tmp_path / "blocking").glob("*.blocked"))) > 1  # the rank had none either


def test_emulated_gpus_are_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    gpu = EmulatedGpu(index=0, capacity_bytes=None, context_bytes=0, peers=[])
    with pytest.raises(InputError, match="expected Triton for emulated GPUs, found none; pip"):
        start(gpu)


def test_a_sampler_on_a_gpu_is_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    indptr, indices = np.zeros(2, np.int64), np.zeros(0, np.int32)
    with pytest.raises(InputError, match="expected Triton for samplers on a GPU, found none; pip"):
        build_device_sampler(Sampler(), None, indptr, indices, [2], 0)


def test_a_gpu_is_not_timed_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    reply = build(KeptLoaders(), {GPU: {}})()
    assert isinstance(reply, GpuTimingReply)
    assert reply.answer is None
    assert "Triton is not installed; pip install" in reply.refusal
