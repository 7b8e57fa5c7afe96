"""Fixtures for every test: where the data packs are, and one small learnable graph."""

import gc
import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from beartype import BeartypeConf
from beartype.claw import beartype_packages
from hypothesis import settings

gc.disable()  # until all tests are collected: what they import and are made of is no garbage

UNCHECKED = (
    "gnnplan.planner.cli.common",
    "gnnplan.planner.cli.demo",
    "gnnplan.planner.cli.graphs",
    "gnnplan.planner.cli.planning",
    "gnnplan.planner.cli.machines",
    "gnnplan.planner.cli.remote",
    "gnnplan.planner.cli.training",
    "gnnplan.planner.profile.draws",
    "gnnplan.planner.queries.estimate",
    "gnnplan.planner.queries.tuned",
    "gnnplan.planner.client.client",
    "gnnplan.runtime.features.device_store",
    "gnnplan.runtime.loader.device",
    "gnnplan.runtime.loader.stages",
    "gnnplan.runtime.processor",
    "gnnplan.runtime.sampling.pyg",
    "gnnplan.runtime.train.recovery",
    "gnnplan.runtime.train.trials",
)
"""Modules whose signatures name types that they import for the type checker alone."""
ROOT = Path(__file__).parents[1]
COMPILED = [
    f"gnnplan.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
    for package in ("planner", "runtime")
    for path in (ROOT / package).rglob("*.py")
    if re.search(r"^@\w*(kernel|jit|intrinsic|overload)|^@(numba|triton)\.", path.read_text(), re.M)
]
"""Modules with functions that numba or Triton compile: a wrapper is nothing they can compile."""

# Arguments and results are checked while tests run; an int passes for a float, as type checkers
# have it.
beartype_packages(
    ("gnnplan.planner", "gnnplan.runtime"),
    conf=BeartypeConf(
        is_pep484_tower=True, claw_is_pep526=False, claw_skip_package_names=(*UNCHECKED, *COMPILED)
    ),
)

from gnnplan.runtime.graph.dataset import Graph  # noqa: E402 - after the hook
from gnnplan.runtime.graph.generate import generate_sbm  # noqa: E402
from tests.support.compiling import compile_in_turn  # noqa: E402
from tests.support.time_limit import (  # noqa: E402 - hooks of pytest
    pytest_addoption as pytest_addoption,
    pytest_collection_modifyitems as pytest_collection_modifyitems,
    pytest_runtest_makereport as pytest_runtest_makereport,
    pytest_runtest_protocol as pytest_runtest_protocol,
    pytest_sessionfinish as pytest_sessionfinish,
    pytest_sessionstart as pytest_sessionstart,
    pytest_timeout_set_timer as pytest_timeout_set_timer,
)

torch.set_num_threads(1)
if "PYTEST_XDIST_WORKER" in os.environ:
    compile_in_turn(ROOT / ".pytest_cache" / "compiling")
settings.register_profile("untimed", deadline=None)  # how long an example takes fails no test
settings.load_profile("untimed")

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined whether to interpret it, so before its first import.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns where this is unset; kernels of integers and copies do not depend on it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def pytest_collection_finish() -> None:
    """Collect garbage again, but none among what was collected of tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Have what libraries made searched at the end: some say there what was never given back."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton's kernels run: CUDA where there is one, else its interpreter on CPU tensors."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if importlib.util.find_spec("triton") is not None:
        from gnnplan.runtime.emulation.threads import replace_language_once

        replace_language_once()
    return torch.device("cpu")


@pytest.fixture
def shuffled(kernel_device: torch.device) -> Iterator[None]:
    """Programs of every grid run in an order drawn anew (the interpreter runs them in turn)."""
    if kernel_device.type == "cuda":
        yield  # the device chooses the order itself, another one each time
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, orders = interpreter.interpreter_builder, dict[int, list[int]]()
    in_turn, drawn = builder.set_grid_idx, random.Random()

    def place(x: int, y: int, z: int) -> None:
        count = builder.grid_dim[0]
        if (x, y, z) == (0, 0, 0) or count not in orders:
            orders[count] = drawn.sample(range(count), count)
        in_turn(orders[count][x], y, z)

    builder.set_grid_idx = place
    yield
    builder.set_grid_idx = in_turn


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold rubbish: what a kernel does not write cannot pass for a result."""

    def rubbish(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = made(*args, **kwargs)
            if tensor.dtype is torch.bool:
                return tensor.fill_(True)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

        return empty

    monkeypatch.setattr(torch, "empty", rubbish(torch.empty))
    monkeypatch.setattr(torch, "empty_like", rubbish(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", rubbish(torch.Tensor.new_empty))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of the .npz packs: $GNNPLAN_TEST_DATA, or shared/data beside the checkout."""
    named = os.environ.get("GNNPLAN_TEST_DATA")
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(named) if named else beside
    if not any(folder.glob("*.npz")):
        pytest.skip(f"no .npz packs in {folder}; set GNNPLAN_TEST_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def small_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """An SBM of 3000 nodes, mean degree 15, 16 features, 5 classes; do not write into it."""
    return generate_sbm(
        tmp_path_factory.mktemp("graphs") / "small",
        num_nodes=3000,
        degree=15.0,
        feature_dim=16,
        num_classes=5,
        seed=7,
    )
