"""A box of GPUs that is not here: a recording answers for the driver, a law for torch's seconds.

`gnnplan probe` and `gnnplan plan` run on it in this process as on a box of its kind. Collectives
are measured by ranks with an emulated GPU each, and between hosts by a process of each host. What
cores and memory of the host take is a preset's. The machine file can be marked as of emulated GPUs:
its plans are then trained under by ranks that emulate them.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.machine.model import MachineModel, load_machine, save_machine
from gnnplan.planner.probe import probe as probe_module, team
from gnnplan.planner.probe.gpu import nvml as nvml_module, parts
from gnnplan.planner.probe.gpu.nvml import Inventory
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.team import Team
from gnnplan.runtime.device import VARIABLE
from gnnplan.runtime.process import leave
from tests.planner.probe.fake_gpu import SIZES, FakeGpus
from tests.support.nvml_recording import Replay
from tests.support.ranks import free_port, run_on_ranks
from tests.support.recordings import Recording, look, other_uuids, recorded

MEASURE = parts.measure
QUICK = ("--quick", "--seconds", "600")
"""Few points, all of which are reached on a busy machine."""


@dataclass(kw_only=True)
class Box:
    """A box of GPUs in the place of this machine's."""

    recording: Recording
    patch: pytest.MonkeyPatch
    folder: Path
    unmapped: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Pairs of the driver's numbers whose memory CUDA does not let each other read."""
    slower: Mapping[int, float] = field(default_factory=dict[int, float])
    """Factor on the seconds of a GPU's own work, by the driver's number."""
    fails: Callable[[str, Any], Exception | None] = lambda task, part: None
    """The error with which a task of the probe ends."""

    def __post_init__(self) -> None:
        patch = self.patch
        patch.setenv("GNNPLAN_CACHE", str(self.folder / "cache"))
        patch.delenv(VARIABLE, raising=False)
        patch.setitem(sys.modules, "pynvml", Replay(self.recording))
        replay = Replay(self.recording)
        patch.setattr(nvml_module, "SysfsDevices", lambda _: replay.devices)
        tables = load_preset("cpu-2core").tables
        patch.setattr(probe_module, "SUBJECTS", (("memory", 1.0, lambda context: tables),))
        patch.setattr(probe_module, "Team", lambda *sizes, **limits: _Idle(1))
        patch.setattr(probe_module.collectives, "join", lambda context: None)
        patch.setattr(parts, "Team", lambda size: _Measuring(self))
        patch.setattr(parts, "measure", functools.partial(MEASURE, start_ranks=self.ranks))
        links = load_preset("cpu-2core").links
        patch.setattr(probe_module.links, "host_links", lambda tables: (links, []))

    def show(self, gpus: str) -> None:
        """Set $CUDA_VISIBLE_DEVICES."""
        self.patch.setenv(VARIABLE, gpus)

    @property
    def shown(self) -> Inventory:
        """What CUDA shows."""
        return look(self.recording)

    def law(self) -> FakeGpus:
        """The GPUs that CUDA shows, by torch's numbers, which follow the law."""
        gpus, pairs = self.shown.gpus, self.shown.pairs
        place = {gpu.index: number for number, gpu in enumerate(gpus)}
        mapped = {
            (place[p.first], place[p.second])
            for p in pairs
            if (p.num_nvlinks or p.p2p.get("read")) and p.p2p.get("read") is not False
            and not {(p.first, p.second), (p.second, p.first)} & self.unmapped
        }  # fmt: skip
        return _Law(
            num_gpus=len(gpus),
            uuids=[gpu.uuid for gpu in gpus],
            mapped_pairs=mapped,
            slower={(place[g], place[g]): f for g, f in self.slower.items() if g in place},
        )

    def ranks(self, size: int) -> Team:
        """Start the ranks whose collectives are measured."""
        error = self.fails("ranks_task", parts.ProbePart(kind="ranks", gpus=tuple(range(size))))
        if error is not None:
            raise error
        return _Ranks(size)

    def probe(self, *flags: str) -> int:
        """`gnnplan probe`."""
        return main(["probe", "-o", str(self.folder / "machine.json"), *flags])

    @property
    def machine(self) -> MachineModel:
        """What was probed."""
        return load_machine(self.folder / "machine.json")

    def plan(self, graph: Path, *flags: str, emulated: bool = False) -> int:
        """`gnnplan plan` for the machine file, its GPUs marked as emulated or not."""
        path = self.folder / "machine.json"
        if emulated:
            path = emulate(path)
        words = ["--batch-size", "32", "--hidden", "8", "--fanouts", "3,2", *flags]
        out = ["-o", str(self.folder / "plan"), "--machine", str(path)]
        return main(["plan", str(graph), *out, *words])


def emulate(path: Path) -> Path:
    """Write a machine file again, its GPUs marked as emulated; the new file."""
    made, out = load_machine(path), path.with_name("emulated.json")
    gpus = [replace(each, emulated=each.kind == "cuda") for each in made.processors]
    save_machine(replace(made, processors=gpus), out)
    return out


def probe_box(name: str, hosts: int, folder: Path) -> Path:
    """Probe a recorded box, or two of its GPUs on each of several hosts; the file, emulated.

    Hosts are processes that meet as those of `gnnplan probe --hosts` do.
    """
    folder.mkdir()
    if hosts > 1:
        run_on_ranks(_probe_host, (hosts, free_port(), name, folder), hosts)
        return emulate(folder / "host0" / "machine.json")
    with pytest.MonkeyPatch.context() as patch:
        assert Box(recording=recorded(name), patch=patch, folder=folder).probe(*QUICK) == 0
    return emulate(folder / "machine.json")


def _probe_host(host: int, hosts: int, port: int, name: str, folder: Path) -> None:
    own = folder / f"host{host}"
    own.mkdir()
    words = ["--hosts", str(hosts), "--node-rank", str(host)]
    with pytest.MonkeyPatch.context() as patch:
        box = Box(recording=other_uuids(recorded(name), str(host)), patch=patch, folder=own)
        box.show("0,1")
        assert box.probe(*QUICK, *words, "--rdzv-endpoint", f"127.0.0.1:{port}") == 0


class _Law(FakeGpus):
    """The law, whose processes take little of the host's memory."""

    def process_bytes(self) -> int:
        """256 MiB."""
        return 1 << 28


class _Idle(Team):
    """A team without processes, whose noise is none."""

    def __enter__(self) -> "_Idle":
        return self

    def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        del task, ranks, arguments
        return [0.01]


class _Measuring(Team):
    """Does the tasks of the probe of GPUs in this process, by the law."""

    def __init__(self, box: Box) -> None:
        super().__init__(1)
        self.box = box

    def __enter__(self) -> "_Measuring":
        return self

    def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        assert ranks == 1
        name, device = task.rpartition(":")[2], self.box.law()
        error = self.box.fails(name, arguments.get("part"))
        if error is not None:
            raise error
        if name == "survey_task":
            return [parts.survey_of(device)]
        return [parts.measure_part(device, SIZES, arguments["part"], clock=device.clock)]


class _Ranks(Team):
    """Processes with an emulated GPU each, whose collectives keep NCCL's rules."""

    program = "tests.support.boxes"


def _serve_rank() -> None:
    """Answer the tasks of `_Ranks`."""
    from gnnplan.runtime.emulation.gpu import EmulatedGpu
    from gnnplan.runtime.emulation.threads import start

    start(EmulatedGpu(index=int(sys.argv[2])))
    team.main()


if __name__ == "__main__":
    _serve_rank()
    leave(0)
