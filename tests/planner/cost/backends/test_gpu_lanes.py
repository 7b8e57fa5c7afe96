"""The step where a GPU's batches are made on lanes, added up by hand."""

from dataclasses import replace

import pytest

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.backends.gpu import GpusBackend
from gnnplan.planner.cost.backends.gpu_lanes import (
    Lanes,
    has_lanes,
    lanes_of,
    lanes_period,
    lanes_words,
)
from gnnplan.planner.cost.rank_times import DeviceTimes, RankTimes
from gnnplan.planner.cost.step import combine_ranks
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.plan.schema import StepShapes, Threads
from tests.planner.cost.by_hand import times, work
from tests.planner.cost.test_gpu import ROW, candidate, rows
from tests.support.candidates import candidate_of_ranks, list_devices

LINE = candidate_of_ranks(
    num_ranks=1, threads=Threads(), prefetch_depth=2, policy="none", gpus=("gpu0",)
)
AHEAD = replace(LINE, threads=Threads(sample=1))


def rank(
    *,
    memory: float = 1e-3,
    host: float = 0.0,
    links: float = 5e-3,
    sigma: float = 0.0,
    **changes: float,
) -> RankTimes:
    """Sample 3 ms, gather 4 ms of which 1 on the GPU, training 6 ms; nothing varies."""
    seconds = {
        "sample": 3e-3, "gather": 4e-3, "forward_backward": 5e-3, "optimizer": 1e-3, **changes
    }  # fmt: skip
    busy = DeviceTimes(memory=memory, links=links, host=host)
    return times(seconds, device=busy, loader_sigma=sigma, trainer_sigma=sigma)


@pytest.fixture
def machine() -> MachineModel:
    return load_preset("h200x1")


def seconds(machine: MachineModel, found: Candidate, **changes: float) -> float:
    return combine_ranks(found, machine, [rank(**changes)]).seconds


def test_in_line_stages_add_up_and_ahead_the_busiest_part_binds(machine: MachineModel) -> None:
    assert seconds(machine, LINE) == pytest.approx(13e-3)
    # The GPU: 1 ms for the loader, 6 ms of training.
    assert seconds(machine, AHEAD) == pytest.approx(7e-3)
    assert seconds(machine, AHEAD, links=7.5e-3) == pytest.approx(7.5e-3)
    assert seconds(machine, AHEAD, sample=9e-3) == pytest.approx(9e-3)
    assert seconds(machine, AHEAD, gather=8e-3, all_reduce=0.5e-3) == pytest.approx(8e-3)
    found = combine_ranks(AHEAD, machine, [rank()])
    assert found.bottleneck == "GPU"
    assert found.stages["wait"] == pytest.approx(1e-3)
    assert found.fill_seconds == pytest.approx(7e-3)
    assert combine_ranks(AHEAD, machine, [rank(sample=9e-3)]).bottleneck == "sample"
    assert combine_ranks(AHEAD, machine, [rank(memory=0.0)]).bottleneck == "forward_backward"


def test_a_batch_that_the_steps_graph_draws_hides_reads_over_links_alone(
    machine: MachineModel,
) -> None:
    def drawn(ahead: int) -> Candidate:
        shapes = StepShapes(rows=[1, 1], edges=[1], drawn=True, ahead=ahead)
        return replace(LINE, step="captured", shapes=shapes)

    assert seconds(machine, drawn(0)) == pytest.approx(13e-3)
    # One lane draws and gathers 7 ms beside 6 of training; of the 7 the GPU works 1, or all.
    assert seconds(machine, drawn(1)) == pytest.approx(7e-3)
    assert seconds(machine, drawn(1), memory=7e-3, links=0.0) == pytest.approx(13e-3)
    found = combine_ranks(drawn(1), machine, [rank(gather=8e-3)])
    assert (found.seconds, found.bottleneck) == (pytest.approx(11e-3), "sample")
    assert found.stages["gather"] == pytest.approx(8e-3)
    assert "on a lane of its own" in lanes_words(machine, drawn(1))
    # No deeper queue than one batch, whatever the loader's would be.
    even = Lanes(sample=6e-3, gather=0.0, training=6e-3, on_gpu=0.0, on_links=0.0)
    one, deep = (
        lanes_period(replace(drawn(1), prefetch_depth=depth), rank(sigma=2e-3), even)
        for depth in (1, 4)
    )
    assert one == deep > 6e-3


def test_one_interpreter_starts_the_kernels_of_all_lanes(machine: MachineModel) -> None:
    found = combine_ranks(AHEAD, machine, [rank(host=7.5e-3)])
    assert (found.seconds, found.bottleneck) == (pytest.approx(7.5e-3), "host")
    # In line a stage's kernels are started while it lasts: nothing comes on top.
    assert seconds(machine, LINE, host=7.5e-3) == pytest.approx(13e-3)


def test_batches_in_flight_bound_three_long_lanes() -> None:
    three = Lanes(sample=8e-3, gather=8e-3, training=8e-3, on_gpu=0.0, on_links=0.0)
    # 24 ms over depth + 1 batches.
    for depth, expected in ((1, 12e-3), (2, 8e-3), (4, 8e-3)):
        found = replace(AHEAD, prefetch_depth=depth)
        assert lanes_period(found, rank(), three) == pytest.approx(expected)


def test_deeper_queues_hide_more_of_what_varies() -> None:
    even = Lanes(sample=6e-3, gather=6e-3, training=6e-3, on_gpu=0.0, on_links=0.0)
    shaky = rank(sigma=2e-3)
    two, four = (
        lanes_period(replace(AHEAD, prefetch_depth=depth), shaky, even) for depth in (2, 4)
    )
    assert 6e-3 < four < two


def test_measured_slowdowns_of_gather_and_compute_apply(machine: MachineModel) -> None:
    def table(value: float, axis: str = "programs") -> Table:
        return Table(unit="ratio", axes=[axis], points=[[8.0]], values=[value], spread=0.0)

    tables = {"gpu_beside": table(1.5), "gpu_beside_gather": table(2.0),
              "gpu_uva_programs": replace(table(8.0, "ranks"), points=[[1.0]])}  # fmt: skip
    # Both always busy: 4 ms of gathering take 8, 6 ms of training take 9; then each is the
    # other's company for a part of the time alone (pipeline_time.beside).
    lanes = lanes_of(AHEAD, machine.with_tables(tables), rank())
    assert 4e-3 < lanes.gather <= 8e-3
    assert 6e-3 < lanes.training <= 9e-3
    assert lanes_of(AHEAD, machine, rank()).training == pytest.approx(6e-3)


def test_an_exchange_hides_what_was_measured_and_else_nothing(machine: MachineModel) -> None:
    both = rank(all_reduce=2e-3)
    # 1 ms of the loader, 6 of training and the exchange; the links' 5 ms and the exchange.
    found = lanes_of(AHEAD, machine, both)
    assert found.on_gpu == pytest.approx(9e-3)
    assert found.on_links == pytest.approx(7e-3)
    eta = Table(unit="ratio", axes=["ranks"], points=[[2.0]], values=[0.75], spread=0.0)
    probed = machine.with_tables({"gpu_overlap_eta": eta})
    assert lanes_of(AHEAD, probed, both).on_gpu == pytest.approx(7.5e-3)
    two = replace(AHEAD, devices=list_devices(["gpu0", "gpu1"]))
    assert "of an exchange compute hides nothing, which was not" in lanes_words(machine, two)
    assert "compute hides 75%, as measured" in lanes_words(probed, two)
    assert "how that slows either was not measured" in lanes_words(machine, AHEAD)
    slowed = machine.with_tables({"gpu_beside": replace(eta, axes=["programs"])})
    assert lanes_words(slowed, AHEAD).endswith("each slowed as measured")


@pytest.mark.parametrize("topology", ["host", "replicated"])
def test_what_the_gpu_and_its_links_do_is_all_that_the_loader_does_but_starts(
    machine: MachineModel, topology: str
) -> None:
    chosen = replace(candidate(machine, 1, topology=topology), threads=Threads(sample=1))
    assert has_lanes(chosen)
    read = rows(host=1000.0, own=500.0)
    found = GpusBackend().stage_times(work(chosen, machine, read, row_bytes=ROW))
    # Starts: 3 of the gather, 12 and 13 for each of 2 hops, 2 copies; 47 us each.
    assert found.device.memory + found.device.links == pytest.approx(found.loader - 43 * 47e-6)
    assert found.device.host == pytest.approx(43 * 47e-6)  # a model timed on cores starts none
    # Own rows at 60% of the memory's rate, all 1000 vertices' rows written at 85%.
    hbm = 4.8e12
    own = 500 * 512 / (hbm * 0.6) + 1000 * 512 / (hbm * 0.85) + 3 * 2000 * 32 / (hbm * 0.6)
    lists = 2400 * 32 / (hbm * 0.6) if topology == "replicated" else 0.0
    assert found.device.memory == pytest.approx(own + lists)
