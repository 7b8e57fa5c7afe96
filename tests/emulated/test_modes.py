"""Emulated GPUs train in every mode that is planned for them, with what CPU ranks get."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gnnplan.planner.machine.model import load_machine
from gnnplan.planner.queries.simulate import simulate
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport
from tests.emulated.modes import MODES, Mode
from tests.planner.probe import fake_gpu as law
from tests.support.emulated import emulated_machine
from tests.support.emulated_ranks import (
    EPOCHS,
    hold_boundary,
    hold_mode,
    make_graph,
    plan_mode,
    run_mode,
    sum_rows,
)
from tests.support.where_table import note_mode

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Graph]:
    folder = tmp_path_factory.mktemp("emulated")
    return functools.cache(lambda kind: make_graph(folder / kind, kind))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.getbasetemp() / "emulated-cache"))


TWO_EPOCHS = ("independent", "samplers", "full graph")
"""Rows whose quick modes train two epochs in `make test` too; the others do so in test-slow."""


def cases() -> Iterator[object]:
    """Every mode over two epochs, and the quick ones that are slow so over one."""
    for mode in MODES:
        short = mode.quick and mode.row not in TWO_EPOCHS
        slow = [] if mode.quick and not short else [pytest.mark.slow]
        yield pytest.param(mode, EPOCHS, marks=[pytest.mark.distributed, *slow], id=mode.label)
        if short:
            name = f"{mode.label}, one epoch"
            yield pytest.param(mode, 1, marks=pytest.mark.distributed, id=name)


def hold_lists(mode: Mode, folder: Path, report: RunReport) -> None:
    """Lists are read where the plan puts them, as often and as many bytes as simulated."""
    steps, read = len(report.losses), set[str]()
    simulated = simulate(folder, emulated_machine(mode.hosts), batches=steps)
    for found, counts in zip(report.ranks, simulated.ranks, strict=True):
        assert found.lists_by_source == counts.lists_by_source
        assert found.list_bytes_by_source == counts.list_bytes_by_source
        read |= set(found.lists_by_source)
    assert read == set(mode.keeps_lists)


def hold_probe(mode: Mode, plan: Plan, folder: Path) -> None:
    """The machine is the probe's: links and rates of the law, calls that its ranks took."""
    (path,) = folder.glob("box/**/emulated.json")
    machine, each = load_machine(path), mode.devices // mode.hosts
    assert plan.machine.fingerprint == machine.fingerprint
    assert len(machine.gpus) >= mode.devices
    assert machine.table("gpu_flops").at(ranks=1) == pytest.approx(law.FLOPS)
    slot = next(link for link in machine.links if link.name == "pcie0.h2d")
    assert (slot.provenance, slot.transaction_bytes) == ("measured", law.UNIT["host"])
    assert {"nccl_all_reduce", "nccl_all_to_all", "nccl_asked"} & machine.tables.keys() == (
        {"nccl_all_reduce", "nccl_all_to_all", "nccl_asked"} if each > 1 else set()
    )
    assert ("hosts_all_reduce_stepped" in machine.tables) == (mode.hosts > 1)
    uuids = [gpu.uuid for gpu in machine.gpus]
    assert len(set(uuids)) == len(uuids)


@pytest.mark.parametrize(("mode", "epochs"), [*cases()])
def test_emulated_gpus_train_as_cores_do(
    mode: Mode, epochs: int, graph_of: Callable[[str], Graph], tmp_path: Path
) -> None:
    graph = graph_of(mode.graph)
    plan = plan_mode(mode, graph, tmp_path / "plan")
    assert [device.kind for device in plan.strategy.devices] == ["cuda"] * mode.devices
    assert plan.strategy.emulated
    emulated, cores = run_mode(plan, graph, tmp_path, epochs=epochs)
    assert emulated.emulated
    assert not cores.emulated
    assert len(emulated.losses) == epochs * plan.prediction.steps_per_epoch
    hold_mode(mode, emulated, cores)
    total = sum_rows(emulated)
    assert mode.holds(plan, total), total
    if mode.recording is not None:
        hold_probe(mode, plan, tmp_path)
    if mode.keeps_lists:
        hold_lists(mode, tmp_path / "plan", emulated)
    if plan.strategy.mode == "full-graph":
        hold_boundary(plan, graph, tmp_path / "plan", emulated)
    note_mode(mode)
