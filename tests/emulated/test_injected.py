"""GPUs that are not as expected: each fault is planned right, or refused in one line.

One list, by the commands: a box of GPUs with a fault is probed, then planned for. docs/gpus.md
names each fault by its name here, and what a user sees. The slow tests train under such plans.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.machine.model import save_machine
from gnnplan.runtime.comm.mesh import rank_and_size
from gnnplan.runtime.device import VARIABLE, bare_uuid, find_gpu
from gnnplan.runtime.errors import GnnplanError, WorkerFailed
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.launch import launch
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport, load_report
from tests.emulated.modes import Mode
from tests.emulated.test_end_to_end import rank_process
from tests.planner.probe import fake_gpu as law
from tests.support.boxes import Box
from tests.support.emulated import emulated_machine
from tests.support.emulated_ranks import make_graph, plan_mode
from tests.support.product import ROOT
from tests.support.ranks import free_port, run_on_ranks
from tests.support.recordings import (
    Recording,
    divide,
    other_uuids,
    recorded,
    rename,
    slice_uuid,
)

pytestmark = pytest.mark.filterwarnings("ignore:the model's seconds are derived")
GIB = 2**30
PAGE = ROOT / "docs" / "gpus.md"


def uuid_of(name: str, gpu: int) -> str:
    return recorded(name)["calls"][f"nvmlDeviceGetUUID(device:{gpu})"]


def answer(found: Recording, code: int, *words: str) -> Recording:
    """Answer calls that begin with some words by an error code."""
    keys = [key for key in found["calls"] if key.startswith(words)]
    assert keys or words[0] == "nvmlInit("
    for key in keys or ["nvmlInit()"]:
        found["calls"][key] = {"error": code}
    return found


def deny(found: Recording, *pairs: tuple[int, int]) -> Recording:
    """Let the driver deny peer access, by NVLink too."""
    for one, other in pairs:
        for index in range(5):
            found["calls"][f"nvmlDeviceGetP2PStatus(device:{one}, device:{other}, {index})"] = 5
    return found


def unnamed_slices(found: Recording, gpu: int) -> Recording:
    """MIG is on, and an old driver names no slice."""
    found["calls"][f"nvmlDeviceGetMigMode(device:{gpu})"] = [1, 1]
    return found


def failing(*kinds: str) -> Callable[[str, Any], Exception | None]:
    """Tasks of some kinds of the probe's parts end as NCCL's time-out ends them."""
    error = WorkerFailed("rank 1: DistBackendError: NCCL: Watchdog caught collective operation")
    return lambda task, part: error if part is not None and part.kind in kinds else None


PAIRS, BOX = "bridged-pairs", "pcie-only"
FOUR = [(a, b) for a in range(4) for b in range(a + 1, 4)]


@dataclass(frozen=True, kw_only=True)
class Injected:
    """A fault, and the plan or the refusal that it leads to."""

    name: str
    """As docs/gpus.md calls it."""
    recording: Callable[[], Recording] = lambda: recorded(PAIRS)
    unmapped: tuple[tuple[int, int], ...] = ()
    """Pairs that CUDA does not let read each other."""
    slower: dict[int, float] = field(default_factory=dict[int, float])
    """Factor on a GPU's own seconds."""
    fails: Callable[[str, Any], Exception | None] = lambda task, part: None
    shown: str | None = None
    """$CUDA_VISIBLE_DEVICES of the probe and of the plan."""
    later: str | None = None
    """$CUDA_VISIBLE_DEVICES of the plan alone: the whole box was probed."""
    devices: int = 4
    said: tuple[str, ...] = ()
    """Words of the notes."""
    refused: tuple[str, ...] = ()
    """Words of the line that refuses; empty: it is planned."""
    uuids: tuple[str, ...] = ()
    """GPUs of the ranks; empty: the recording's, in order."""
    numbers: tuple[int, ...] = (0, 1, 2, 3)
    """CUDA's numbers of them."""
    cliques: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))
    """Ranks that read each other's rows."""
    gib: float = 32
    """Memory of each."""
    flops: float = law.FLOPS
    """Rate by which they are priced."""


ALONE = ((0,), (1,), (2,), (3,))
FAULTS = [
    Injected(
        name="peer access denied by the driver",
        recording=lambda: deny(recorded(PAIRS), (0, 1)),
        cliques=((0,), (1,), (2, 3)),
        said=("GPUs gpu0 and gpu1: the driver denies peer",),
    ),
    Injected(
        name="peer access denied by CUDA",
        unmapped=((0, 1),),
        cliques=((0,), (1,), (2, 3)),
        said=("GPUs gpu0 and gpu1: CUDA denies peer access",),
    ),
    Injected(
        name="no peer access at all",
        recording=lambda: recorded("nvswitch-hidden"),
        unmapped=tuple(FOUR),
        cliques=ALONE,
        gib=141,
        said=("CUDA denies peer access",),
    ),
    Injected(
        name="one GPU of another kind",
        recording=lambda: rename(recorded(BOX), 3, "Tesla K80", 12),
        slower={3: 4.0},
        devices=3,
        numbers=(0, 1, 2),
        cliques=ALONE[:3],
        gib=24,
        said=("GPUs differ: ", "gpu3 Tesla K80 of 12.0 GiB"),
    ),
    Injected(
        name="one GPU of another kind, the first",
        devices=3,
        slower={0: 4.0},
        recording=lambda: rename(recorded(BOX), 0, "Tesla K80", 12),
        gib=24,
        uuids=tuple(uuid_of(BOX, g) for g in (1, 2, 3)),
        numbers=(1, 2, 3),
        cliques=ALONE[:3],
        said=("GPUs differ: ",),
    ),
    Injected(
        name="one GPU of another kind, all asked for",
        devices=4,
        recording=lambda: rename(recorded(BOX), 3, "Tesla K80", 12),
        refused=("expected at most 3 devices", "found 4", "ask for fewer"),
    ),
    Injected(
        name="one GPU of another kind, asked for",
        devices=1,
        slower={3: 4.0},
        recording=lambda: rename(recorded(BOX), 3, "Tesla K80", 12),
        shown=uuid_of(BOX, 3),
        uuids=(uuid_of(BOX, 3),),
        numbers=(0,),
        cliques=ALONE[:1],
        gib=12,
        flops=law.FLOPS / 4,
    ),
    Injected(
        name="MIG on one of four",
        recording=lambda: divide(recorded(BOX), 2, [10, 20]),
        devices=1,
        uuids=(slice_uuid(2, 0),),
        numbers=(0,),
        cliques=ALONE[:1],
        gib=10,
        said=("gpu2: MIG is on: planned with slice", "3 other GPUs and 1 slice are left out"),
    ),
    Injected(
        name="MIG on one of four, all asked for",
        recording=lambda: divide(recorded(BOX), 2, [10]),
        refused=("expected at most 1 devices", "found 4", "ask for fewer"),
    ),
    Injected(
        name="MIG on one of four, the whole ones named",
        devices=3,
        shown="0,1,3",
        gib=24,
        recording=lambda: divide(recorded(BOX), 2, [10, 20]),
        numbers=(0, 1, 2),
        uuids=tuple(uuid_of(BOX, g) for g in (0, 1, 3)),
        cliques=ALONE[:3],
    ),
    Injected(
        name="MIG on one of four, a slice named",
        devices=1,
        shown=slice_uuid(2, 1),
        gib=20,
        recording=lambda: divide(recorded(BOX), 2, [10, 20]),
        numbers=(0,),
        uuids=(slice_uuid(2, 1),),
        cliques=ALONE[:1],
    ),
    Injected(
        name="MIG on one of four, without slices",
        recording=lambda: divide(recorded(BOX), 2, []),
        devices=3,
        numbers=(0, 1, 2),
        uuids=tuple(uuid_of(BOX, g) for g in (0, 1, 3)),
        cliques=ALONE[:3],
        gib=24,
        said=("gpu2: MIG is on and it has no slice",),
    ),
    Injected(
        name="MIG on one of four, its slices unknown",
        gib=3,
        devices=1,
        cliques=ALONE[:1],
        recording=lambda: unnamed_slices(recorded(BOX), 2),
        numbers=(0,),
        uuids=(uuid_of(BOX, 2),),
        said=("gpu2: MIG is on and the driver names no slice of it", "3 other GPUs and its other"),
    ),
    Injected(
        name="MIG on one of four, its slices unknown and the whole ones named",
        gib=24,
        devices=3,
        shown="0,1,3",
        cliques=ALONE[:3],
        recording=lambda: unnamed_slices(recorded(BOX), 2),
        numbers=(0, 1, 2),
        uuids=tuple(uuid_of(BOX, g) for g in (0, 1, 3)),
    ),
    Injected(
        name="GPUs named by number",
        shown="2,3",
        devices=2,
        numbers=(0, 1),
        cliques=((0, 1),),
        uuids=tuple(uuid_of(PAIRS, g) for g in (2, 3)),
        said=(f"{VARIABLE}=2,3: 2 of 4 GPUs",),
    ),
    Injected(
        name="GPUs named by UUID, in another order",
        devices=2,
        numbers=(0, 1),
        cliques=ALONE[:2],
        shown=f"{uuid_of(PAIRS, 3)},{uuid_of(PAIRS, 1)}",
        uuids=tuple(uuid_of(PAIRS, g) for g in (3, 1)),
        said=("2 of 4 GPUs are visible",),
    ),
    Injected(
        name="GPUs named by an unknown UUID",
        shown="GPU-nobody",
        devices=1,
        refused=("found GPUs: CUDA_VISIBLE_DEVICES=GPU-nobody: 0 of 4", "nvidia-smi -L", "--cores"),
    ),
    Injected(
        name="fewer GPUs shown than were probed",
        later="3,2",
        devices=2,
        numbers=(0, 1),
        cliques=((0, 1),),
        uuids=tuple(uuid_of(PAIRS, g) for g in (3, 2)),
        said=(f"{VARIABLE}=3,2: 2 of 4 GPUs are visible, in this order",),
    ),
    Injected(
        name="fewer GPUs shown than are asked for",
        later="3,2",
        devices=4,
        refused=("expected at most 2 devices", "found 4", "ask for fewer"),
    ),
    Injected(
        name="an unknown UUID after the probe",
        later="GPU-nobody",
        devices=1,
        refused=("CUDA_VISIBLE_DEVICES=GPU-nobody: 0 of 4", "--cores"),
    ),
    Injected(
        name="NVML without permission",
        recording=lambda: answer(recorded(PAIRS), 4, "nvmlInit("),
        refused=("the driver is there and tells nothing of its GPUs", "/dev/nvidia*", "--cores"),
    ),
    Injected(
        name="NVML without permission for any GPU",
        devices=1,
        recording=lambda: answer(recorded(PAIRS), 4, "nvmlDeviceGetHandleByIndex("),
        refused=("none of 4 could be opened", "/dev/nvidia*", "--cores"),
    ),
    Injected(
        name="NVML without permission for one GPU",
        devices=3,
        numbers=(0, 1, 2),
        recording=lambda: answer(recorded(PAIRS), 4, "nvmlDeviceGetHandleByIndex(2)"),
        uuids=tuple(uuid_of(PAIRS, g) for g in (0, 1, 3)),
        cliques=((0, 1), (2,)),
    ),
    Injected(
        name="NVML without permission for links",
        cliques=ALONE,
        recording=lambda: answer(recorded(PAIRS), 4, "nvmlDeviceGetNvLinkCapability("),
    ),
    Injected(
        name="NVML without permission for memory",
        devices=1,
        recording=lambda: answer(recorded(PAIRS), 4, "nvmlDeviceGetMemoryInfo("),
        refused=("gpu0: memory size unknown", "run `gnnplan probe` again", "--cores"),
    ),
    Injected(
        name="a time-out between GPUs in the probe",
        fails=failing("pairs", "ranks"),
        devices=2,
        refused=("expected seconds of messages between its GPUs", "ask for one"),
    ),
    Injected(
        name="a time-out between GPUs in the probe, not of ranks' collectives",
        fails=failing("pairs"),
        devices=2,
        uuids=tuple(uuid_of(PAIRS, g) for g in (0, 2)),
        numbers=(0, 2),
        cliques=ALONE[:2],
        said=("GPU pairs like gpu1 to gpu0: not measured", "NCCL"),
    ),
    Injected(
        name="a time-out of the probe's all-reduce",
        fails=failing("hidden"),
        said=("GPUs' all-reduce beside compute: not measured", "NCCL"),
    ),
]
TRAINED = {
    "peer access denied by CUDA", "one GPU of another kind, the first",
    "MIG on one of four, a slice named", "fewer GPUs shown than were probed",
}  # fmt: skip
"""Those under whose plans emulated GPUs train."""


def marked(each: Injected) -> Any:
    return pytest.param(each, id=each.name, marks=[pytest.mark.slow])


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return make_graph(tmp_path_factory.mktemp("injected") / "graph")


def open_box(each: Injected, folder: Path, patch: pytest.MonkeyPatch) -> Box:
    """The box with the fault, probed, and what CUDA shows when a plan is made."""
    box = Box(
        recording=each.recording(), patch=patch, folder=folder, unmapped=set(each.unmapped),
        slower=each.slower, fails=each.fails,
    )  # fmt: skip
    if each.shown is not None:
        box.show(each.shown)
    assert box.probe() == 0
    if each.later is not None:
        box.show(each.later)
    return box


def expected_uuids(each: Injected) -> list[str]:
    calls = each.recording()["calls"]
    known = [calls[f"nvmlDeviceGetUUID(device:{g})"] for g in range(each.devices)]
    return list(each.uuids) or known


def cliques_of(plan: Plan) -> set[tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for device in plan.strategy.devices:
        found.setdefault(device.clique, []).append(device.rank)
    return {tuple(ranks) for ranks in found.values()}


@pytest.mark.parametrize("each", [marked(each) for each in FAULTS])
def test_a_fault_is_planned_right_or_refused_in_one_line(
    each: Injected, nodes: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    box = open_box(each, tmp_path, monkeypatch)
    capsys.readouterr()
    code = box.plan(nodes.path, "--devices", str(each.devices))
    lines = capsys.readouterr().err.splitlines()
    for words in each.said:
        assert words in " ".join(line.strip() for line in lines)
    if each.refused:
        assert code == 2, lines
        (line,) = [number for number, text in enumerate(lines) if text.startswith("gnnplan: ")]
        assert line == len(lines) - 1
        for words in ("expected", *each.refused):
            assert words in lines[line]
        assert not (tmp_path / "plan").exists()
        return
    assert code == 0, lines
    plan = load_plan(tmp_path / "plan")
    devices, memory = plan.strategy.devices, plan.prediction.memory_bytes
    assert [device.kind for device in devices] == ["cuda"] * each.devices
    assert plan.gpu_uuids == expected_uuids(each)
    assert [device.index for device in devices] == list(each.numbers)
    assert cliques_of(plan) == set(each.cliques)
    sizes = [memory[f"rank{rank}"].capacity for rank in range(each.devices)]
    assert sizes == [each.gib * GIB] * each.devices
    assert box.machine.table("gpu_flops").at(ranks=1) == pytest.approx(each.flops)
    joined = {link.name for link in box.machine.links if link.name.startswith("nvlink.")}
    for one, other in each.unmapped:
        assert not joined & {f"nvlink.gpu{one}.gpu{other}", f"nvlink.gpu{other}.gpu{one}"}


def test_every_fault_is_in_the_page_for_users() -> None:
    page = " ".join(PAGE.read_text().split())
    assert [each.name for each in FAULTS if each.name.partition(",")[0] not in page] == []
    for name in ("64 MB /dev/shm", "NCCL time-out", "peer access that is missing when training"):
        assert name in page


# Training on a box that shows other GPUs than the plan was made on.


class StartError(GnnplanError):
    """The ranks would be started now."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What CUDA shows when training starts, of a plan on GPUs 0 and 2 of the four."""

    name: str
    shown: str | None = None
    change: Callable[[Recording], Recording] = lambda found: found
    numbers: tuple[int, ...] = ()
    """CUDA's numbers of the ranks' GPUs."""
    refused: tuple[str, ...] = ()


STARTS = [
    Start(name="all", numbers=(0, 2)),
    Start(name="fewer, by number", shown="0,2", numbers=(0, 1)),
    Start(name="in another order", shown="3,2,0", numbers=(2, 1)),
    Start(name="by UUID", shown=f"{uuid_of(PAIRS, 2)},{uuid_of(PAIRS, 0)}", numbers=(1, 0)),
    Start(
        name="too few",
        shown="1",
        refused=("expected 2 GPUs", f"found 1 on this host (those that {VARIABLE}=1 shows)"),
    ),
    Start(
        name="others",
        shown="1,2",
        refused=("rank 0: expected GPU 0 (", f"{VARIABLE}=1,2", "show it"),
    ),
    Start(
        name="an unknown UUID",
        shown="GPU-nobody",
        refused=("expected 2 GPUs", "found 0 on this host", "GPU-nobody"),
    ),
    Start(name="an equal box", change=lambda found: other_uuids(found, "f"), numbers=(0, 2)),
    Start(
        name="one that may not be opened",
        numbers=(0, 2),
        change=lambda found: answer(found, 4, "nvmlDeviceGetHandleByIndex(3)"),
    ),
    Start(
        name="none that may be opened",
        refused=("expected 2 GPUs", "found 0 on this host"),
        change=lambda found: answer(found, 4, "nvmlInit("),
    ),
]


@pytest.fixture(scope="module")
def planned(nodes: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan on GPUs 0 and 2 of the box of two pairs."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        box = open_box(Injected(name="none"), folder, patch)
        assert box.plan(nodes.path, "--devices", "2") == 0
    assert load_plan(folder / "plan").gpu_uuids == [uuid_of(PAIRS, g) for g in (0, 2)]
    return folder / "plan"


@pytest.mark.slow
@pytest.mark.parametrize("each", STARTS, ids=lambda each: each.name)
def test_ranks_find_their_gpus_or_are_refused_in_one_line(
    each: Start, planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def start(*_: Any, **__: Any) -> None:
        raise StartError("the ranks start")

    box = Box(recording=each.change(recorded(PAIRS)), patch=monkeypatch, folder=tmp_path)
    monkeypatch.setattr(launch, "run_ranks", start)
    if each.shown is not None:
        box.show(each.shown)
    plan = shutil.copytree(planned, tmp_path / "plan")
    code = main(["train", str(plan)])
    (line,) = capsys.readouterr().err.splitlines()
    if each.refused:
        assert code == 2, line
        for words in each.refused:
            assert words in line
        return
    assert line == "gnnplan: the ranks start"
    shown = [bare_uuid(gpu.uuid) for gpu in box.shown.gpus]
    found = [find_gpu(load_plan(plan), rank, shown) for rank in range(2)]
    assert found == list(each.numbers)


# Training under such plans, and faults that come when ranks have started.


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "each", [each for each in FAULTS if each.name in TRAINED], ids=lambda each: each.name
)
def test_emulated_gpus_train_under_the_plan(
    each: Injected, nodes: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    box = open_box(each, tmp_path, monkeypatch)
    flags = ["--devices", str(each.devices), "--policy", "legion"]
    assert box.plan(nodes.path, *flags, emulated=True) == 0
    plan = load_plan(tmp_path / "plan")
    assert plan.strategy.emulated
    assert cliques_of(plan) == set(each.cliques)
    assert main(["train", str(tmp_path / "plan"), "--epochs", "1"]) == 0
    report = load_report(tmp_path / "plan")
    assert len(report.losses) == plan.prediction.steps_per_epoch
    assert all(rank.rows_by_source.get("own") for rank in report.ranks)


PEERS = Mode(
    name="peers",
    row="rows",
    settings={"policy": "legion"},
    room_rows=60,
    wants=lambda c: len(c.cliques) == 1,
)


def _train_rank(rank: int, size: int, port: int, folder: Path, denied: bool) -> None:
    import warnings

    import torch

    from gnnplan.runtime import worker
    from gnnplan.runtime.launch.config import RunConfig
    from gnnplan.runtime.processor import EmulatedProcessor

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    assert rank_and_size() == (rank, size)
    if denied:
        EmulatedProcessor.can_map = lambda self, index: index == self.index
    run = folder / ("denied" if denied else "whole")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        worker.run(
            RunConfig(
                plan_folder=str(folder / "plan"), run_folder=str(run), epochs=1, eval_every=0,
                pin=False, keep_checkpoints=0, collective_seconds=120.0,
            )
        )  # fmt: skip
    (run / f"said{rank}").write_text("\n".join(str(each.message) for each in said))


@pytest.mark.slow
@pytest.mark.distributed
def test_peer_access_that_is_missing_when_training_makes_ranks_exchange(
    nodes: Graph, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    plan_mode(PEERS, nodes, tmp_path / "plan")
    reports: list[RunReport] = []
    for denied in (False, True):
        run = tmp_path / ("denied" if denied else "whole")
        run.mkdir()
        run_on_ranks(_train_rank, (2, free_port(), tmp_path, denied), 2)
        reports.append(load_report(run))
        text = "exchanges rows with rank"
        assert [text in (run / f"said{rank}").read_text() for rank in range(2)] == [denied] * 2
    whole, found = reports
    assert found.losses == pytest.approx(whole.losses, rel=1e-6)
    assert [r.rows_by_source for r in found.ranks] == [r.rows_by_source for r in whole.ranks]
    assert all(rank.rows_by_source["peer"] for rank in found.ranks)


SHARED_MB = 64
COMMAND = "from gnnplan.planner.cli.main import run; run()"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process another /dev/shm")
def test_ranks_share_rows_where_dev_shm_has_64_mb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    graph = generate_sbm(
        tmp_path / "graph", num_nodes=72_000, degree=4.0, feature_dim=256, num_classes=3, seed=5,
        train_fraction=0.001, val_fraction=0.001, test_fraction=0.001,
    )  # fmt: skip
    assert graph.num_nodes * graph.row_bytes > SHARED_MB * 2**20
    save_machine(emulated_machine(), tmp_path / "machine.json")
    asked = ["--devices", "2", "--batch-size", "32", "--hidden", "8", "--fanouts", "3,2"]
    asked += ["--policy", "none", "--machine", str(tmp_path / "machine.json")]
    assert main(["plan", str(graph.path), "-o", str(tmp_path / "plan"), *asked]) == 0
    words = ["train", str(tmp_path / "plan"), "--epochs", "1", "--eval-every", "0"]
    assert main(words) == 0
    whole = load_report(tmp_path / "plan")
    small = f'mount -t tmpfs -o size={SHARED_MB}m none /dev/shm && exec "$@"'
    inside = ["unshare", "-m", "sh", "-c", small, "sh", sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(inside, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = load_report(tmp_path / "plan")
    assert found.losses == pytest.approx(whole.losses, rel=1e-6)
    assert [r.rows_by_source for r in found.ranks] == [r.rows_by_source for r in whole.ranks]
    log = (tmp_path / "plan" / "run" / "ranks.log").read_text()
    assert "holds its own" not in log + done.stderr, "a copy for each rank"


def stopper(run: Path) -> Callable[[dict[str, Any]], None]:
    """Stop rank 1, once, in the second epoch: the others wait for it in a collective."""
    stopped: list[int] = []

    def progress(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["epoch"] == 1 and not stopped:
            pid = rank_process(run, 1)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)

    return progress


@pytest.mark.slow
@pytest.mark.distributed
def test_an_exchange_that_times_out_ends_the_attempt_and_training_resumes(
    nodes: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    plan_mode(
        replace(PEERS, room_rows=None, wants=lambda c: c.threads.sample == 0),
        nodes,
        tmp_path / "plan",
    )
    settings: dict[str, Any] = {
        "epochs": 2, "checkpoint_every_steps": 2, "pin": False, "eval_every": 0,
        "hang_seconds": 600.0, "collective_seconds": 10.0,
    }  # fmt: skip
    whole = launch.train(tmp_path / "plan", run_folder=tmp_path / "whole", **settings)
    run = tmp_path / "run"
    found = launch.train(tmp_path / "plan", run_folder=run, progress=stopper(run), **settings)
    (note,) = [note for note in found.notes if note.startswith("restart 1")]
    assert "imed out" in note or "imeout" in note
    np.testing.assert_allclose(found.losses, whole.losses[found.first_step :], rtol=1e-6)
