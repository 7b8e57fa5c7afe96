"""Seconds of a part on cores in a first answer: its layers, its loss and its update, counted."""

from dataclasses import replace

import pytest

from gnnplan.planner.fullgraph.candidate import Cut, whole_graph_candidate
from gnnplan.planner.fullgraph.formulas import PartSizes
from gnnplan.planner.fullgraph.parts import Case, PartAnswer, derive_part
from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.probe import computing, presets
from gnnplan.planner.profile import operations as core
from gnnplan.planner.profile.operations import LayerShape
from gnnplan.planner.profile.roofline import CoresRate, num_parameters, update_seconds
from gnnplan.runtime.plan.schema import FullGraph, Workload

SIZES = PartSizes(inner=4_000, halo=0, sent=0, inner_edges=30_000, halo_edges=0)
RATES = {"core_start": 2e-5, "core_flops": 9e10, "core_bytes": 2e10}
RATE = CoresRate(start_seconds=2e-5, flops=9e10, bytes=2e10, spread=0.0)
ENDS = (24, 6)


def machine() -> MachineModel:
    tables = {
        name: make_table(computing.NAMES[name], {"threads": [1]}, [rate], 0.05)
        for name, rate in RATES.items()
    }
    return presets.machine_at_once().with_tables(tables)


def answer(work: Workload, seeds: float) -> PartAnswer:
    cut, settings = Cut(ranks=1, threads=1, partitioner="volume"), FullGraph()
    candidate = whole_graph_candidate(cut, settings, overlap=False)
    return derive_part(
        machine(), candidate, work, SIZES, [Case(settings=settings)], ENDS, seeds=seeds
    )


def test_attention_over_a_part_is_priced_as_it_runs_on_cores() -> None:
    work = Workload(model="gat", num_layers=1, fanouts=[-1], heads=2)
    shape = LayerShape(
        num_src=4e3, num_dst=4e3, num_edges=3e4, in_dim=24, out_dim=12, inputs=True, heads=2
    )
    parameters = num_parameters("gat", [(24, 6, 2)])
    whole = (
        core.attention_work(shape)
        + core.picking_work(500, 4e3, 6)
        + core.loss_work("multiclass", 500, 6)
        + core.gradient_work(4, parameters)
    )
    found = answer(work, seeds=500)
    assert found.cases[0].forward_backward == pytest.approx(RATE.seconds(whole))
    assert found.optimizer_seconds == pytest.approx(update_seconds(RATE, parameters))


@pytest.mark.parametrize("model", ["sage", "gcn"])
def test_a_loss_over_picked_rows_is_a_part_of_an_epoch(model: str) -> None:
    work = Workload(model=model, num_layers=1, fanouts=[-1])
    few, many = (answer(work, seeds=seeds).cases[0].forward_backward for seeds in (10, 4_000))
    picked = [core.picking_work(seeds, 4e3, 6) for seeds in (10, 4_000)]
    lost = [core.loss_work("multiclass", seeds, 6) for seeds in (10, 4_000)]
    less, more = (RATE.seconds(a + b) for a, b in zip(picked, lost, strict=True))
    assert many - few == pytest.approx(more - less)
    two = replace(work, num_layers=2, fanouts=[-1, -1])
    assert answer(two, seeds=10).cases[0].forward_backward > few + 7 * RATES["core_start"]
