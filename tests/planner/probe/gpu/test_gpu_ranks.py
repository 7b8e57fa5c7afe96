"""Collectives of ranks on GPUs: measured by processes, put into tables, looked up by prices."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner.candidate import Candidate, list_gpus, make_candidate
from gnnplan.planner.cost.rates import MachineTable, measured_collective
from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce
from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds
from gnnplan.planner.cost.stages.host import start_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.context import QUICK as PROBE, ProbeContext
from gnnplan.planner.probe.gpu import parts, torch_device
from gnnplan.planner.probe.gpu.machine import with_gpus
from gnnplan.planner.probe.gpu.measure import GpuFindings, Points
from gnnplan.planner.probe.gpu.parts import QUICK_RANKS_BYTES, RankProbe
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.team import State, Team
from gnnplan.planner.probe.timing import summarize
from gnnplan.runtime.errors import WorkerFailed
from tests.support.ranks import run_on_ranks

SIZES, RANKS = (1024, 1 << 20), (2, 4)


def findings() -> GpuFindings:
    """Of GPU 0: 200 us and 1 us a rank, and 100 GB/s; twice that for exchanges."""

    def seconds(size: int, ranks: int) -> float:
        return 2e-4 + 1e-6 * ranks + size / 1e11

    def points(factor: float) -> Points:
        return {(s, n): summarize([factor * seconds(s, n)] * 3) for s in SIZES for n in RANKS}

    return GpuFindings(
        gpu=0, uuid="preset-gpu0", processors=1, sums=points(1.0), exchanges=points(2.0),
        asked={(n,): summarize([3e-4] * 3) for n in RANKS}, context_bytes=500_000_000,
        ranks_context_bytes=900_000_000,
    )  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> MachineModel:
    """Eight A100s whose first GPU was measured with the others."""
    made = load_preset("dgx-a100")
    others = [GpuFindings(gpu=g, uuid=f"preset-gpu{g}", processors=1) for g in range(1, 8)]
    return with_gpus(made, [findings(), *others])


def on(machine: MachineModel, ranks: int) -> Candidate:
    names = [gpu.name for gpu in machine.gpus[:ranks]]
    return make_candidate(list_gpus(machine, names, [list(range(ranks))]))


class TestTables:
    def test_measured_seconds_stand_for_the_formula(self, machine: MachineModel) -> None:
        found = measured_collective(machine, MachineTable.NCCL_ALL_REDUCE, on(machine, 2), 1024)
        assert found is not None
        assert found.seconds == pytest.approx(2e-4 + 2e-6 + 1024 / 1e11)
        assert "measured: table nccl_all_reduce" in found.provenance
        alone = replace(found, seconds=found.seconds - start_seconds(machine))
        assert gpu_all_reduce(machine, on(machine, 2), 1024) == alone
        assert gpu_all_reduce(load_preset("dgx-a100"), on(machine, 2), 1024) != found

    def test_longer_messages_go_at_the_longest_ones_rate(self, machine: MachineModel) -> None:
        most, more = (
            measured_collective(machine, MachineTable.NCCL_ALL_REDUCE, on(machine, 4), size)
            for size in (1 << 20, 1 << 22)
        )
        assert most is not None
        assert more is not None
        assert more.seconds == pytest.approx(4 * most.seconds)

    def test_more_ranks_than_took_part_are_derived(self, machine: MachineModel) -> None:
        name = MachineTable.NCCL_ALL_REDUCE
        assert measured_collective(machine, name, on(machine, 8), 1024) is None
        assert "derived" in gpu_all_reduce(machine, on(machine, 8), 1024).provenance

    def test_an_exchange_is_what_was_measured_and_its_counts(self, machine: MachineModel) -> None:
        alone = exchange_seconds(machine, on(machine, 4), 1024.0)
        start = start_seconds(machine)  # each step counts its own
        assert 0 < start < 1e-4
        assert alone == pytest.approx(2 * (2e-4 + 4e-6 + 1024 / 1e11) - start)
        counted = exchange_seconds(machine, on(machine, 4), 1024.0, messages=2)
        assert counted == pytest.approx(alone + 3e-4 / 2 - start)

    def test_a_message_is_one_of_the_smallest_exchange(self, machine: MachineModel) -> None:
        table = machine.table(MachineTable.GPU_MESSAGE)
        assert table.at(ranks=4) == pytest.approx(2 * (2e-4 + 4e-6 + 1024 / 1e11) / 3)

    def test_the_context_of_ranks_has_their_collectives_buffers(
        self, machine: MachineModel
    ) -> None:
        table = machine.table(MachineTable.GPU_CONTEXT)
        assert [table.at(ranks=n) for n in (1, 2, 4)] == pytest.approx([5e8, 9e8, 9e8])

    def test_ranks_that_lack_a_point_are_left_out(self) -> None:
        found = findings()
        del found.sums[SIZES[1], 4]
        table = with_gpus(load_preset("dgx-a100"), [found]).tables["nccl_all_reduce"]
        assert table.points == [[1024.0, float(1 << 20)], [2.0]]


def assert_whole(found: GpuFindings, ranks: int) -> None:
    assert set(found.sums) == set(found.exchanges) == {(s, ranks) for s in QUICK_RANKS_BYTES}
    assert set(found.asked) == {(ranks,)}
    every = [*found.sums.values(), *found.exchanges.values(), *found.asked.values()]
    assert all(0 < each.value < math.inf for each in every)


@pytest.mark.distributed
def test_ranks_measure_by_their_own_communicator_and_stop_in_time(tmp_path: Path) -> None:
    found = GpuFindings(gpu=0, uuid="GPU-0", processors=1)
    with Team(2) as team:
        probe = RankProbe(team, Budget(), found, quick=True)
        probe.measure(tmp_path)
        assert_whole(found, 2)
        assert not found.notes
        late = GpuFindings(gpu=0, uuid="GPU-0", processors=1)
        tardy = RankProbe(team, Budget(0.0), late, quick=True)
        tardy._point("sum", late.sums, (1024, 2), 1024, 2)
        assert (late.sums, tardy.late) == ({}, ["sum at 1024, 2"])


class Failing(Team):
    """Has no room for its processes."""

    def __enter__(self) -> Team:
        raise WorkerFailed("probe process 1: out of memory")


def test_ranks_that_fail_leave_a_note(tmp_path: Path) -> None:
    part = parts.ProbePart(kind="ranks", gpus=(0, 1))
    context = ProbeContext(team=Team(1), sizes=PROBE, cores=1, scratch=tmp_path)
    (found,) = parts.measure_ranks(context, part, "GPU-0", Failing)
    assert found.notes == [
        "collectives of ranks on GPUs: not measured: probe process 1: out of memory"
    ]


@pytest.mark.distributed
def test_emulated_gpus_take_each_call_by_nccls_rules(tmp_path: Path) -> None:
    run_on_ranks(_emulated, (tmp_path,), 2)


def _emulated(rank: int, folder: Path) -> None:
    from gnnplan.runtime.emulation.gpu import EmulatedGpu
    from gnnplan.runtime.emulation.threads import start

    start(EmulatedGpu(index=rank))
    state = State(rank=rank)
    torch_device.join_ranks_task(state, path=folder / "ranks", size=2, groups=[2])
    assert state.kept["ranks"][2].between_gpus
    for operation in ("sum", "rows", "asked"):
        entries, exits = torch_device.call_ranks_task(
            state, operation=operation, size=2, num_bytes=4096, calls=2
        )
        assert len(entries) == len(exits) == 2
    assert torch_device.ranks_context_task(state) == 0
