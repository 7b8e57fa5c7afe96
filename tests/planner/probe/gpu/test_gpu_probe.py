"""The GPU probe's statistics, refusals and machine entries, on devices that follow a law."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cost.stages.gather_gpu import memory_seconds_per_byte, read_seconds
from gnnplan.planner.machine.model import Link, MachineModel, Memory, Processor, Switch
from gnnplan.planner.probe.context import QUICK as PROBE, ProbeContext
from gnnplan.planner.probe.gpu import parts as subject
from gnnplan.planner.probe.gpu.machine import fit_reads, gather_cap, with_gpus
from gnnplan.planner.probe.gpu.measure import (
    GPU_FULL as FULL,
    LEAST_ETA,
    QUICK,
    GpuFindings,
    GpuSizes,
    Work,
    hidden_share,
)
from gnnplan.planner.probe.gpu.nvml import Inventory
from gnnplan.planner.probe.gpu.parts import ProbePart, Survey, plan_parts
from gnnplan.planner.probe.gpu.torch_device import FILL_BYTES, fill_with_numbers, sizes_for
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.team import Team
from gnnplan.planner.probe.timing import summarize
from gnnplan.planner.search.dimensions.ranks import plans_gpus
from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.plan.schema import Threads
from tests.planner.probe import fake_gpu as law
from tests.planner.probe.fake_gpu import SIZES, FakeGpus
from tests.support.candidates import candidate_of_ranks
from tests.support.gpu_parts import measure_gpus
from tests.support.recordings import look, machine_of as machine_from, recorded


def measured(device: FakeGpus) -> list[GpuFindings]:
    return measure_gpus(device, SIZES, clock=device.clock)


def machine_of(num_gpus: int, *, switch: bool = False) -> MachineModel:
    """As the driver tells it: slots of 63 GB/s, one NVLink between each two GPUs."""
    links: list[Link] = []

    def join(name: str, source: str, target: str, rate: float) -> None:
        links.append(
            Link(
                name=name, source=source, target=target, latency_seconds=0.0,
                bandwidth_bytes_per_second=rate, provenance="derived",
            )
        )  # fmt: skip

    above = "plx0" if switch else "host0"
    if switch:
        join("plx0.h2d", "host0", "plx0", 63e9)
        join("plx0.d2h", "plx0", "host0", 63e9)
    for g in range(num_gpus):
        join(f"pcie{g}.h2d", above, f"gpu{g}.memory", 63e9)
        join(f"pcie{g}.d2h", f"gpu{g}.memory", above, 63e9)
        for other in range(num_gpus):
            if other != g:
                join(f"nvlink.gpu{g}.gpu{other}", f"gpu{g}.memory", f"gpu{other}.memory", 300e9)
    gpus = [
        Processor(name=f"gpu{g}", kind="cuda", memory=f"gpu{g}.memory", uuid=f"GPU-{g}")
        for g in range(num_gpus)
    ]
    device = [
        Memory(name=f"gpu{g}.memory", kind="device", capacity_bytes=10**10) for g in range(num_gpus)
    ]
    return MachineModel(
        name="test",
        fingerprint="",
        provenance="measured",
        processors=gpus,
        memories=[Memory(name="host0", kind="host", capacity_bytes=10**11), *device],
        links=links,
        switches=[Switch(name="plx0", kind="pcie")] if switch else [],
    )


def test_links_and_tables_carry_the_laws_rates() -> None:
    device = FakeGpus(num_gpus=2)
    machine = with_gpus(machine_of(2), measured(device))
    links = {link.name: link for link in machine.links}
    for g in range(2):
        own, slot = links[f"gpu{g}.hbm"], links[f"pcie{g}.h2d"]
        assert own.bandwidth_bytes_per_second == pytest.approx(law.MEMORY, rel=0.1)
        assert own.gather_bytes_per_second == pytest.approx(0.6 * law.MEMORY, rel=0.1)
        assert own.transaction_bytes == law.UNIT["own"]
        assert slot.bandwidth_bytes_per_second == pytest.approx(law.SLOT, rel=0.01)
        assert slot.gather_bytes_per_second == pytest.approx(law.SLOT_READS, rel=0.01)
        assert slot.latency_seconds == pytest.approx(law.LATENCY, rel=0.05)
        assert slot.transaction_bytes == law.UNIT["host"]
        peer = links[f"nvlink.gpu{g}.gpu{1 - g}"]
        assert peer.bandwidth_bytes_per_second == pytest.approx(law.PEER, rel=0.02)
        assert peer.gather_bytes_per_second == pytest.approx(law.PEER_READS, rel=0.01)
        assert {own.provenance, slot.provenance, peer.provenance} == {"measured"}
        assert links[f"pcie{g}.d2h"].provenance == "measured"
    assert machine.table("gpu_kernel").at(ranks=1) == pytest.approx(law.LAUNCH)
    assert machine.table("gpu_flops").at(ranks=1) == pytest.approx(law.FLOPS)
    assert machine.table("gpu_message").at(ranks=1) == pytest.approx(law.LATENCY, rel=0.01)
    assert machine.table("gpu_process").at(ranks=1) == pytest.approx(2e9)
    # 400 programs slow compute by 1.4, compute slows the gather by 1.25: laws of the fake.
    assert machine.table("gpu_beside").at(programs=400) == pytest.approx(1.4)
    assert machine.table("gpu_beside_gather").at(programs=400) == pytest.approx(1.25)
    # One program per processor reads as fast as four: that is the cap.
    assert round(machine.table("gpu_uva_programs").at(ranks=1)) == law.PROCESSORS
    assert machine.table("copy.pcie0.h2d").at(bytes=4096) == pytest.approx(5.08e-6, rel=0.01)


def test_what_compute_hides_of_an_all_reduce_is_measured_for_every_number_of_gpus() -> None:
    machine = with_gpus(machine_of(6), measured(FakeGpus(num_gpus=6)))
    table = machine.table("gpu_overlap_eta")
    assert table.points == [[2.0, 4.0, 6.0]]
    # 10 ms of compute around 1 ms of all-reduce: that takes 1.2 ms, in which compute gets on by
    # 1.2 / 1.1; overlapped 10.109, serial 11 (modelling rule 5).
    expected = (11 - (10 + 1.2 - 1.2 / 1.1)) / (11 - 10)
    assert table.values == pytest.approx([expected] * 3)
    alone = with_gpus(machine_of(1), measured(FakeGpus()))
    assert "gpu_overlap_eta" not in alone.tables


def test_one_gpu_alone_is_enough_to_plan_on() -> None:
    machine = with_gpus(machine_of(1), measured(FakeGpus()))
    assert "gpu_message" not in machine.tables
    assert plans_gpus(machine)


def test_gpus_that_cannot_read_each_other_still_send_messages() -> None:
    machine = with_gpus(machine_of(2), measured(FakeGpus(num_gpus=2, mapped=False)))
    assert machine.table("gpu_message").at(ranks=1) == pytest.approx(law.LATENCY, rel=0.01)
    assert plans_gpus(machine)
    found = measured(FakeGpus(num_gpus=2, mapped=False))[0]
    assert (found.peer_copy, found.peer_gather) == ({}, {})


def test_an_exchange_that_stops_compute_hides_nothing_and_noise_is_refused() -> None:
    assert hidden_share(summarize([3.0]), summarize([1.6])).value == LEAST_ETA
    assert hidden_share(summarize([1.0]), summarize([2.0])).value == 1.0

    def noise(work: Work, call: int) -> float:
        return 0.9 if work.kind == "all_reduce" and work.ranks == 4 else 0.0

    found = measured(FakeGpus(num_gpus=4, noise=noise))
    assert list(found[0].hidden) == [(2,)]
    assert any("all-reduce of 4 GPUs refused" in note for note in found[0].notes)
    assert found[1].hidden == {}


def test_a_probed_gpu_is_priced_as_its_law_says() -> None:
    machine = with_gpus(machine_of(1), measured(FakeGpus()))
    candidate = candidate_of_ranks(
        num_ranks=1,
        threads=Threads(compute=1, sample=0),
        prefetch_depth=1,
        policy="joint",
        gpus=("gpu0",),
        cliques=((0,),),
    )
    for row_bytes in (4, 100, 512, 4096):
        found = read_seconds(machine, candidate, row_bytes)
        gather = Work(
            kind="gather", gpu=0, place="host", row_bytes=row_bytes, num_bytes=row_bytes * 1000
        )
        device = FakeGpus()
        assert found["host"][0] == pytest.approx(device.law(gather) / 1000, rel=0.02)
        written = row_bytes * memory_seconds_per_byte(machine, candidate)
        expected = device.law(replace(gather, place="own")) / 1000
        assert found["own"][0] + written == pytest.approx(expected, rel=0.1)


def test_a_point_that_settles_later_counts_and_one_that_never_does_is_refused() -> None:
    def noise(work: Work, call: int) -> float:
        if work.kind == "gather" and work.place == "host" and work.row_bytes == 4:
            return 0.9
        return 0.9 if work.kind == "copy_back" and call < 2 else 0.01

    device = FakeGpus(noise=noise)
    found = measured(device)[0]
    assert len(found.to_host) == 3
    assert not any(row_bytes == 4 for row_bytes, _ in found.uva)
    refused = [note for note in found.notes if "refused" in note]
    assert len(refused) == 3  # one per grid
    assert "reads of host memory at 4, 25 refused: spread" in refused[0]
    assert "in the better of two tries, at most 10% is believed" in refused[0]
    # The other row sizes still say what the link does.
    slot = next(x for x in with_gpus(machine_of(1), [found]).links if x.name == "pcie0.h2d")
    assert slot.gather_bytes_per_second == pytest.approx(law.SLOT_READS, rel=0.02)


def test_a_link_that_was_refused_keeps_what_the_driver_says() -> None:
    device = FakeGpus(noise=lambda work, call: 0.9 if work.kind != "launch" else 0.0)
    machine = with_gpus(machine_of(1), measured(device))
    slot = next(x for x in machine.links if x.name == "pcie0.h2d")
    assert (slot.bandwidth_bytes_per_second, slot.provenance) == (63e9, "derived")
    assert not any(x.name == "gpu0.hbm" for x in machine.links)
    assert "gpu_kernel" in machine.tables
    assert "gpu_gather" not in machine.tables
    assert any("spread" in note for note in machine.notes)


@pytest.mark.parametrize("reasons", [[["power brake"]], [[], ["power brake", "2 others"]]])
def test_a_gpu_spoiled_before_or_after_is_refused_wholly(reasons: list[list[str]]) -> None:
    device = FakeGpus(num_gpus=2, reasons=[list(r) for r in reasons])
    found = measured(device)
    assert found[0].copy == found[0].launch == {}
    assert "power brake" in found[0].notes[0]
    machine = with_gpus(machine_of(2), found)
    names = {link.name for link in machine.links}
    # The first that is measured is the driver's second.
    assert "gpu1.hbm" not in names
    assert "gpu0.hbm" in names


def test_noisy_points_are_tried_twice_and_none_is_begun_when_time_is_over() -> None:
    device = FakeGpus(noise=lambda work, call: 0.9)
    measure_gpus(device, SIZES, clock=device.clock)
    assert set(device.asked.values()) == {2}
    (found,) = subject.measure_part(
        FakeGpus(), SIZES, ProbePart(kind="gpu", gpus=(0,)), seconds=0.0
    )
    assert found.copy == found.launch == {}
    (note,) = found.notes
    assert note.startswith("time: gpu0: not reached in time: compute; copy at ")
    assert note.endswith("or with more --seconds")


def test_a_shared_port_is_what_its_gpus_copy_together() -> None:
    device = FakeGpus(num_gpus=2, shared_port=60e9)
    machine = with_gpus(machine_of(2, switch=True), measured(device))
    port = next(x for x in machine.links if x.name == "plx0.h2d")
    assert port.bandwidth_bytes_per_second == pytest.approx(60e9, rel=0.02)
    crowded = machine.table("gpu_crowded_copy")
    assert crowded.at(ranks=2) == pytest.approx(law.SLOT / 30e9, rel=0.02)
    alone = with_gpus(machine_of(2, switch=True), measured(FakeGpus(num_gpus=2)))
    assert next(x for x in alone.links if x.name == "plx0.h2d").provenance == "derived"


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_the_transaction_size_is_fitted_from_the_curve(unit: int) -> None:
    # formulas 2.4: a row of L bytes takes (L - gcd) / unit + 1 transactions.
    curve = {4: unit, 100: (100 - 4) + unit, 512: 512, 4096: 4096}
    found = fit_reads({r: moved / 30e9 for r, moved in curve.items()})
    assert found is not None
    assert (found.transaction_bytes, found.residual) == (unit, pytest.approx(0, abs=1e-9))
    assert found.bytes_per_second == pytest.approx(30e9)
    assert fit_reads({}) is None


def test_without_reads_there_is_no_cap() -> None:
    assert gather_cap(GpuFindings(gpu=0, uuid="", processors=1)) is None


def test_sizes_fit_the_memories() -> None:
    assert sizes_for(False, host_bytes=10**12, device_bytes=10**12) == FULL
    small = sizes_for(True, host_bytes=2**30, device_bytes=10**12)
    assert small.copy_bytes == 2**26
    assert max(small.message_bytes) <= 2**26
    assert small.row_bytes == QUICK.row_bytes


class Answering(Team):
    """Answers tasks without a process, as `answer` says."""

    def __init__(self, answer: Callable[[str, ProbePart | None], Any]) -> None:
        super().__init__(1)
        self.answer = answer
        self.waits: list[float] = []

    def __enter__(self) -> "Answering":
        """Start nothing."""
        return self

    def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        """The answer, or its raising."""
        assert ranks == 1
        self.waits.append(self.timeout_seconds)
        found = self.answer(task, arguments.get("part"))
        if isinstance(found, Exception):
            raise found
        return [found]


class Failing(Team):
    """Has no room for its processes."""

    def __enter__(self) -> Team:
        raise WorkerFailed("probe process 1: out of memory")


LISTED = Inventory(driver_version="", cuda_driver_version=None, gpus=[], pairs=[])


def context(tmp_path: Path, seconds: float = 100.0) -> ProbeContext:
    made = ProbeContext(team=Team(1), sizes=PROBE, cores=1, scratch=tmp_path)
    made.begin(PROBE, Budget(seconds), lambda: 0.0)
    return made


@pytest.mark.parametrize("answer", ["GPUs: not measured: no CUDA", WorkerFailed("exit code 11")])
def test_gpus_that_cannot_be_measured_leave_a_note(answer: Any, tmp_path: Path) -> None:
    without = context(tmp_path)
    start = functools.partial(Answering, lambda task, part: answer)
    assert subject.measure(without, LISTED, start) == []
    assert without.notes[0].startswith("GPUs: not measured: ")
    assert subject.measure(without, None) == []


def test_a_part_that_fails_is_alone_in_that_and_the_next_has_a_new_process(tmp_path: Path) -> None:
    device, teams = FakeGpus(num_gpus=3), list[Answering]()

    def answer(task: str, part: ProbePart | None) -> Any:
        if part is None:
            return subject.survey_of(device)
        if part.kind == "gpu" and part.gpus == (1,):
            return WorkerFailed("part_task: no answer in 40 s")
        return subject.measure_part(device, SIZES, part, clock=device.clock)

    def start() -> Team:
        teams.append(Answering(answer))
        return teams[-1]

    within = context(tmp_path)
    found = subject.measure(within, LISTED, start, Failing)
    assert within.notes == ["gpu1: not measured: part_task: no answer in 40 s"]
    assert len(teams) == 2
    failed = "collectives of ranks on GPUs: not measured: probe process 1: out of memory"
    assert failed in found[0].notes
    assert [bool(each.copy) for each in found] == [True, False, True]
    assert found[1].peer_copy  # pairs with it were measured
    # Each part has its own limit: its share of the time, and a grace.
    waits = [wait - subject.GRACE_SECONDS for team in teams for wait in team.waits[1:]]
    assert min(waits) > 0
    assert max(waits[:3]) < 50
    assert max(waits) <= 100 * subject.POINTS_SHARE
    machine = with_gpus(machine_of(3), found)
    assert plans_gpus(machine)


def test_parts_left_when_time_is_over_are_named(tmp_path: Path) -> None:
    late = context(tmp_path, seconds=0.0)
    start = functools.partial(Answering, lambda task, part: Survey(uuids=["a", "b"], mapped=[]))
    assert subject.measure(late, LISTED, start) == []
    assert [note.split(": not reached")[0] for note in late.notes] == [
        "time: gpu0", "time: gpu1", "time: GPU pairs like gpu1 to gpu0",
        "time: GPUs' copies at once", "time: GPUs' all-reduce beside compute",
        "time: collectives of ranks on GPUs",
    ]  # fmt: skip


def seen(name: str) -> tuple[FakeGpus, Inventory]:
    """GPUs of a recording, which follow the law, in the driver's order."""
    found = look(recorded(name), {})
    uuids = [gpu.uuid for gpu in found.gpus]
    mapped = {(p.first, p.second) for p in found.pairs if p.p2p.get("read") or p.num_nvlinks}
    return FakeGpus(num_gpus=len(uuids), uuids=uuids, mapped_pairs=mapped), found


@pytest.mark.parametrize(
    ("name", "classes"),
    [("nvswitch-8", 1), ("dgx-v100", 3), ("bridged-pairs", 2), ("pcie-only", 1)],
)
def test_one_pair_of_each_link_class_is_measured_in_full_and_the_rest_are_checked(
    name: str, classes: int
) -> None:
    device, inventory = seen(name)
    parts = plan_parts(subject.survey_of(device), inventory)
    n = device.num_gpus
    pairs = [part for part in parts if part.kind == "pairs"]
    assert len(pairs) == classes
    every = [pair for part in pairs for pair in part.pairs]
    assert sorted(every) == [(a, b) for a in range(n) for b in range(n) if a != b]
    found = measure_gpus(device, SIZES, inventory=inventory, clock=device.clock)
    small = {
        (work.gpu, work.owner)
        for work, _ in device.asked
        if work.place == "peer" and work.kind == "gather" and work.row_bytes == 64
    }
    assert small == {part.pairs[0] for part in pairs if part.mapped}
    for part in pairs:
        for reader, owner in part.pairs:
            points = {r for o, r in found[reader].peer_gather if o == owner}
            assert points == (set(SIZES.row_bytes) if part.mapped else set())
            assert (owner,) in found[reader].peer_message
            assert bool((owner, SIZES.copy_bytes) in found[reader].peer_copy) == part.mapped


def test_a_pair_and_a_gpu_that_differ_from_their_like_are_measured_in_full() -> None:
    device, inventory = seen("nvswitch-8")
    device.slower = {(2, 5): 3.0, (3, 3): 2.0}
    found = measure_gpus(device, SIZES, inventory=inventory, clock=device.clock)
    notes = [note for each in found for note in each.notes]
    assert notes == [
        "gpu2: its way from gpu5 differs from that of gpu0 from gpu1, which is of its kind: "
        "measured in full",
        "gpu3: differs from gpu0, which is of its kind: measured in full",
    ]
    machine = with_gpus(machine_from(inventory), found)
    rates = {link.name: link.bandwidth_bytes_per_second for link in machine.links}
    assert rates["gpu3.hbm"] == pytest.approx(rates["gpu0.hbm"] / 2, rel=0.01)
    slow, fast = found[2].peer_gather[(5, 64)], found[2].peer_gather[(4, 64)]
    assert slow.value == pytest.approx(3 * fast.value, rel=0.01)


SECONDS_PER_POINT = 0.15
"""Seconds of a point on a GPU: five milliseconds of work eight times, a held queue each time."""
SECONDS_PER_TABLE = 0.25
"""Seconds to make and fill a table of a gather, by the device."""


@pytest.mark.parametrize(("sizes", "most"), [(QUICK, 60.0), (FULL, 180.0)])
def test_a_probe_of_eight_gpus_ends_in_time_by_its_number_of_points(
    sizes: GpuSizes, most: float
) -> None:
    device, inventory = seen("nvswitch-8")
    measure_gpus(device, sizes, inventory=inventory, clock=device.clock)
    points = sum(device.asked.values())
    tables = {
        (work.gpu, work.place, work.owner, work.row_bytes)
        for work, _ in device.asked
        if work.kind == "gather"
    }
    assert points * SECONDS_PER_POINT + len(tables) * SECONDS_PER_TABLE < most


class RecordingTorch:
    """Stands in for torch: which device copied into which."""

    float32 = "float32"

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.cuda = SimpleNamespace(synchronize=lambda device: self.log.append(("wait", device)))

    def arange(self, first: int, end: int, *, dtype: str, device: str) -> "RecordedRows":
        """Numbers that a device makes."""
        assert dtype == self.float32
        return RecordedRows(self, device, np.arange(first, end, dtype=np.float32))


class RecordedRows:
    """An array that lies on a device."""

    def __init__(self, torch: RecordingTorch, device: str, values: Any) -> None:
        self.torch, self.device, self.values = torch, device, values

    @property
    def shape(self) -> Any:
        """As torch's."""
        return self.values.shape

    def __getitem__(self, key: Any) -> "RecordedRows":
        return RecordedRows(self.torch, self.device, self.values[key])

    def expand(self, _: int, width: int) -> "RecordedRows":
        """As torch's."""
        shape = (len(self.values), width)
        return RecordedRows(self.torch, self.device, np.broadcast_to(self.values, shape))

    def contiguous(self) -> "RecordedRows":
        """As torch's."""
        return self

    def copy_(self, other: "RecordedRows") -> None:
        """Note the direction."""
        self.torch.log.append((other.device, self.device))
        self.values[:] = other.values


@pytest.mark.parametrize("memory", ["cpu", "cuda:0", "cuda:3"])
def test_a_table_is_filled_by_its_reader_which_opens_the_way_to_a_peer(memory: str) -> None:
    torch = RecordingTorch()
    width = 4096
    step = FILL_BYTES // (4 * width)
    rows = RecordedRows(torch, memory, np.zeros((2 * step + 5, width), np.float32))
    fill_with_numbers(torch, rows, "cuda:0")
    assert torch.log == [("cuda:0", memory)] * 3 + [("wait", "cuda:0")]
    assert (rows.values == np.arange(2 * step + 5)[:, None]).all()
