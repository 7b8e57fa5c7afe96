"""Choices that follow from a candidate's price: sampling by a graph, gradients sent in parts."""

from dataclasses import replace

import pytest

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.backends.gpu_lanes import buffer_bytes, capture_gain, captured_bytes
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.model import predict
from gnnplan.planner.cost.request import Request
from gnnplan.planner.cost.stages.all_reduce import exposed_in_parts, ring_seconds
from gnnplan.planner.cost.stages.exchange import measured_eta
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.search.search import with_capture, with_parts
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.schema import GraphRef, Prediction, Threads, Workload
from gnnplan.runtime.stages import PART_BYTES
from tests.planner.cost.by_hand import GRAPH, NODES
from tests.support.candidates import candidate_of_ranks
from tests.support.machines import constant, machine
from tests.support.profiles import profile

BATCH = 1000
LARGE = 4 * PART_BYTES // 4
"""Parameters of a gradient of four parts."""


def request(found: MachineModel, parameters: int = LARGE, **workload: object) -> Request:
    known = profile(NODES, BATCH).numbers
    timing = {k: replace(t, num_parameters=parameters) for k, t in known.timing.items()}
    return Request(
        graph=GRAPH,
        workload=Workload(batch_size=BATCH, **workload),  # pyright: ignore[reportArgumentType]
        profile=replace(known, timing=timing),
        machine=found,
        budgets=Budgets(),
    )


def on_gpus(found: MachineModel, ranks: int) -> Candidate:
    return candidate_of_ranks(
        num_ranks=ranks, threads=Threads(sample=1), prefetch_depth=2, policy="none",
        gpus=tuple(gpu.name for gpu in found.gpus[:ranks]),
    )  # fmt: skip


def on_cores(ranks: int) -> Candidate:
    return candidate_of_ranks(num_ranks=ranks, threads=Threads(), prefetch_depth=2, policy="none")


def rows(ranks: int) -> PlacedRows:
    each = RankRows(rows={"host": 1e4}, working_rows={"host": 1e5}, shares={"host": 1.0})
    return PlacedRows(policy="none", ranks=[each] * ranks, host_rows=NODES)


def parted(asked: Request, candidate: Candidate) -> tuple[Candidate, Prediction, Prediction]:
    """What was decided, its price, and the price of sending afterwards."""
    placed = rows(candidate.num_ranks)
    plain = predict(asked, candidate, placed)
    return *with_parts(asked, candidate, placed, plain), plain


def test_a_gpu_samples_by_a_graph_where_launches_cost_more_than_its_buffers() -> None:
    found = load_preset("h200x1")
    asked, one = request(found, fanouts=[10, 5]), on_gpus(load_preset("h200x1"), 1)
    chosen = with_capture(PlanSettings(), asked, one)
    assert chosen.threads.capture == 1
    size = buffer_bytes(asked, one)
    assert captured_bytes(asked, chosen) == size > 0
    assert captured_bytes(asked, one) == 0
    # 38 starts of 47 us become 7; the buffers are gone through at 85% of 4.8 TB/s.
    gain = 31 * 47e-6 - size / (4.8e12 * 0.85)
    assert capture_gain(asked, one, size) == pytest.approx(gain)
    before, after = (predict(asked, c, rows(1)).stages["sample"] for c in (one, chosen))
    assert before - after == pytest.approx(gain)
    memory = [predict(asked, c, rows(1)).memory_bytes["rank0"].parts for c in (one, chosen)]
    assert memory[1]["sampling"] - memory[0]["sampling"] == size
    assert "by one CUDA graph" in predict(asked, chosen, rows(1)).provenance["sample"]


def test_quick_launches_large_buffers_and_other_samplers_are_left_alone() -> None:
    found = load_preset("h200x1")
    asked, one = request(found, fanouts=[10, 5]), on_gpus(found, 1)
    quick = found.with_tables({"gpu_start": constant("seconds", ["ranks"], 1e-8)})
    cases = [
        (PlanSettings(), replace(asked, machine=quick)),
        (PlanSettings(), request(found, fanouts=[10, -1])),  # nothing bounds such a batch
        (PlanSettings(), request(found, fanouts=[400, 400])),  # 9 GB of buffers
        (PlanSettings(sampler="labor"), asked),
        (PlanSettings(sampler_parameters={"draws": "poisson"}), asked),
        (PlanSettings(), replace(asked, graph=replace(GRAPH, task="link"))),
    ]
    graph: GraphRef = replace(GRAPH, num_nodes=50_000_000)
    cases[2] = (PlanSettings(), replace(cases[2][1], graph=graph))
    for settings, each in cases:
        assert with_capture(settings, each, one).threads.capture == 0
    assert with_capture(PlanSettings(), asked, on_cores(1)).threads.capture == 0


def test_parts_leave_the_last_one_and_the_loss_to_wait_for() -> None:
    def ring(size: float) -> float:
        return ring_seconds(size, 4, 10e-6, 1e9)

    size = 4.0 * PART_BYTES
    # Parts of 1 MiB take 1.6 ms each; the backward pass makes one every 10 ms.
    assert exposed_in_parts(ring, size, 60e-3, 1.0) == pytest.approx(ring(PART_BYTES) + ring(4))
    # Every 0.5 ms: the four of them, less what came before the last was ready.
    left = exposed_in_parts(ring, size, 3e-3, 1.0)
    assert left == pytest.approx(4 * ring(PART_BYTES) - 1.5e-3 + ring(4))
    # Half of what could be hidden is.
    hidden = 4 * ring(PART_BYTES) - left + ring(4)
    half = exposed_in_parts(ring, size, 3e-3, 0.5)
    assert half == pytest.approx(left + hidden / 2)


def test_gpus_over_a_slow_bus_send_large_gradients_beside_the_backward_pass() -> None:
    found = load_preset("pcie-4090x4")
    slow = replace(found, links=[
        replace(x, bandwidth_bytes_per_second=x.bandwidth_bytes_per_second / 20)
        if x.name.startswith("pcie") else x for x in found.links
    ])  # fmt: skip
    # Of 90%, as a probe of two GPUs would measure it; of less there is less to gain.
    probed, barely = (
        slow.with_tables({"gpu_overlap_eta": constant("ratio", ["ranks"], eta)})
        for eta in (0.9, 0.1)
    )
    asked = request(probed, 16 * PART_BYTES // 4)
    chosen, price, plain = parted(asked, on_gpus(slow, 2))
    assert chosen.threads.comm == 1
    assert price.step_seconds.value < plain.step_seconds.value * (1 - slow.noise)
    assert price.stages["all_reduce"] < plain.stages["all_reduce"]
    words = price.provenance["all_reduce"]
    assert "sent in 16 parts beside the backward pass, overlap measured: 90%" in words
    _, less, _ = parted(replace(asked, machine=barely), on_gpus(slow, 2))
    assert price.stages["all_reduce"] < less.stages["all_reduce"]


def test_gpus_whose_overlap_was_not_measured_hide_nothing() -> None:
    found = load_preset("pcie-4090x4")
    asked, two = request(found, 16 * PART_BYTES // 4), on_gpus(found, 2)
    # The table of ranks on cores says nothing of GPUs.
    cpu = found.with_tables({"overlap_eta": constant("ratio", ["ranks", "threads"], 0.9)})
    for each in (found, cpu):
        chosen, price, plain = parted(replace(asked, machine=each), two)
        assert chosen.threads.comm == 0
        assert price.stages == plain.stages
        assert "was not measured" in price.provenance["all_reduce"]
    beside = replace(two, threads=replace(two.threads, comm=1))
    assert predict(asked, beside, rows(2)).stages["all_reduce"] > plain.stages["all_reduce"]


def test_gpus_of_several_hosts_hide_nothing_by_a_table_of_one() -> None:
    found = load_preset("perlmutter:2").with_tables(
        {"gpu_overlap_eta": constant("ratio", ["ranks"], 0.9)}
    )
    assert measured_eta(found, on_gpus(found, 4)) == pytest.approx(0.9)
    assert measured_eta(found, on_gpus(found, 8)) is None


def test_why_a_gradient_is_sent_afterwards_is_said() -> None:
    found = load_preset("hgx-h100")
    small = parted(request(found, 10_000), on_gpus(found, 2))
    assert small[0].threads.comm == 0
    assert (
        small[1]
        .provenance["all_reduce"]
        .endswith("sent after the backward pass: 40.0 KB are a single part")
    )
    assert small[1].step_seconds == small[2].step_seconds
    known = found.with_tables({"gpu_overlap_eta": constant("ratio", ["ranks"], 0.9)})
    quick = parted(request(known), on_gpus(found, 2))
    assert quick[0].threads.comm == 0
    assert "in parts it would take longer" in quick[1].provenance["all_reduce"]
    alone = parted(request(found), on_gpus(found, 1))
    assert alone[0].threads.comm == 0
    assert "backward" not in alone[1].provenance["all_reduce"]


def cores(number: int, *, eta: float | None = 0.8) -> MachineModel:
    """All-reduce at 1 GB/s after 0.1 ms; compute hides `eta` of it."""
    sizes = [4.0, float(PART_BYTES), 64.0 * PART_BYTES]
    all_reduce = Table(
        unit="seconds", axes=["bytes", "ranks"], points=[sizes, [2.0]],
        values=[1e-4 + n / 1e9 for n in sizes], spread=0.05,
    )  # fmt: skip
    tables = {"all_reduce": all_reduce}
    if eta is not None:
        tables["overlap_eta"] = constant("ratio", ["ranks", "threads"], eta)
    return machine(cores=number).with_tables(tables)


def test_on_cores_parts_want_measured_overlap_and_cores_that_are_free() -> None:
    found = cores(8)
    chosen, price, plain = parted(request(found), on_cores(2))
    assert chosen.threads.comm == 1
    # 500 seeds compute for 10 ms, 6.7 ms of them backward: 4 parts of 1.15 ms each, of which
    # compute could hide three, and hides 80%; the loss's 0.1 ms comes last.
    each = found.table("all_reduce").at(bytes=float(PART_BYTES), ranks=2.0)
    expected = 4 * each - 0.8 * 3 * each + 1e-4
    whole = found.table("all_reduce").at(bytes=4.0 * PART_BYTES, ranks=2.0)
    saved = plain.stages["all_reduce"] - price.stages["all_reduce"]
    assert saved == pytest.approx(whole - expected, rel=1e-3)
    assert price.step_seconds.value < plain.step_seconds.value
    for other, words in (
        (cores(3), "no core is free for it"),
        (cores(8, eta=None), "how far compute hides it was not measured"),
    ):
        chosen, price, _ = parted(request(other), on_cores(2))
        assert chosen.threads.comm == 0
        assert words in price.provenance["all_reduce"]
