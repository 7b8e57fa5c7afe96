"""A mode of emulated GPUs from its plan to its reports: trained, and trained again by CPU ranks.

Each rank is a process. It first holds its loader's batches against those of the host's loader, bit
by bit, then trains on its GPU, and then on cores under the same plan. GPUs are emulated, unless
`enter` gives each rank a real one (`tests.silicon.rows`).
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnplan.planner import pipeline
from gnnplan.planner.assemble import assemble
from gnnplan.planner.fullgraph.parts import connect_cut
from gnnplan.planner.fullgraph.plan import plan_full_graph
from gnnplan.planner.machine.model import MachineModel, load_machine
from gnnplan.planner.search.choose import PlacedCandidate
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import worker
from gnnplan.runtime.comm.mesh import open_mesh
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.graph.generate import generate_links, generate_sbm, generate_typed
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.plan.io import load_array, load_plan, save_plan
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.report import RunReport, load_report
from tests.emulated.modes import Mode
from tests.support.emulated import emulated_machine
from tests.support.fullgraph_plans import sent_bytes
from tests.support.plans import with_rows, with_sparse_rows
from tests.support.ranks import free_port, run_on_ranks

EPOCHS = 2
STEPS = 3
"""Batches that are compared bit by bit."""
WORKLOAD = {"batch_size": 32, "hidden": 8, "fanouts": [3, 2], "learning_rate": 0.01}


def make_graph(folder: Path, kind: str = "nodes") -> Graph:
    """240 nodes with rows of 1 KiB: few programs of every kernel, and rows that fill memories."""
    if kind == "links":
        return generate_links(
            folder, num_nodes=240, degree=6.0, feature_dim=256, num_communities=3, seed=5,
            train_fraction=0.12, val_fraction=0.05, test_fraction=0.05,
        )  # fmt: skip
    if kind == "typed":
        return generate_typed(
            folder, num_papers=160, num_authors=80, cites=4.0, authors_per_paper=2, paper_dim=256,
            author_dim=128, num_classes=3, seed=5, train_fraction=0.5, val_fraction=0.1,
            test_fraction=0.1,
        )  # fmt: skip
    made = generate_sbm(
        folder, num_nodes=240, degree=6.0, feature_dim=256, num_classes=3, seed=5,
        train_fraction=0.4, val_fraction=0.06, test_fraction=0.06,
    )  # fmt: skip
    if kind == "nodes":
        return made
    x = np.array(made.x)
    if kind == "sparse":
        return with_sparse_rows(made, folder)
    if kind == "halves":
        return with_rows(made, folder, convert_rows(x, BFLOAT16))
    weight = np.random.default_rng(4).uniform(0.1, 3.0, made.num_edges).astype(np.float32)
    weight[::10] = 0
    return with_rows(made, folder, x, edge_weight=weight)


def plan_mode(mode: Mode, graph: Graph, folder: Path) -> Plan:
    """Plan a mode: the cheapest candidate that it wants, with the memory that it leaves.

    A box that is probed for it, and its machine's file, stand in `box` beside the plan's folder.
    """
    machine = emulated_machine(mode.hosts)
    if mode.recording is not None:
        from tests.support.boxes import probe_box  # a bare image of the queue has not all of it

        machine = load_machine(probe_box(mode.recording, mode.hosts, folder.parent / "box"))
    changes = mode.settings.get("workload", {})
    settings = PlanSettings(
        **{**mode.settings, "devices": mode.devices, "workload": Workload(**WORKLOAD | changes)}
    )
    if mode.room_rows is not None or mode.host_rows is not None:
        free = replace(settings, policy="none")
        use = _cheapest(mode, graph, free, machine)[2].prediction.memory_bytes
        settings = replace(settings, **_budgets(mode, graph, use))
    if settings.mode == "full-graph":
        reference = pipeline.graph_ref(graph)
        made, arrays, *_ = plan_full_graph(
            graph, reference, settings, machine, None, calibrate=False
        )
    else:
        made, arrays = assemble(*_cheapest(mode, graph, settings, machine))
    strategy, more = mode.change(made.strategy), mode.changed_rows * graph.row_bytes
    uses = made.prediction.memory_bytes
    larger = {
        name: replace(use, capacity=use.capacity + more) if name.startswith("rank") else use
        for name, use in uses.items()
    }
    prediction = replace(made.prediction, memory_bytes=larger)
    return save_plan(replace(made, strategy=strategy, prediction=prediction), arrays, folder)


def _cheapest(
    mode: Mode, graph: Graph, settings: PlanSettings, machine: MachineModel
) -> tuple[Search, SearchResult, PlacedCandidate]:
    search = pipeline.search_for(graph, settings, machine)
    explored = search.explore()
    wanted = [each for each in explored.priced if mode.wants(each.candidate)]
    if settings.policy == "none" != mode.settings.get("policy"):  # asked for its memory alone
        wanted = wanted or explored.priced
    assert wanted, f"{mode.name}: none of {len(explored.priced)} candidates is wanted"
    fit = [each for each in wanted if each.eligible]
    return search, explored, min(fit or wanted, key=lambda each: each.seconds)


def _budgets(mode: Mode, graph: Graph, use: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    if mode.room_rows is not None:
        own = max((each for name, each in use.items() if name.startswith("rank")),
                  key=lambda each: each.total)  # fmt: skip
        needed = own.total - own.parts["reserve"] + mode.room_rows * graph.row_bytes
        found["device_memory_bytes"] = int(needed / 0.95) + 1
    if mode.host_rows is not None:
        host = next(each for name, each in use.items() if not name.startswith("rank"))
        fewer = graph.num_nodes - mode.host_rows
        found["host_memory_bytes"] = host.total - fewer * graph.row_bytes
    return found


def on_cores(plan: Plan, folder: Path, out: Path) -> Plan:
    """Write the same plan for ranks on cores."""
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    strategy = plan.strategy
    devices = [
        replace(each, kind="cpu", emulated=False, memory="host0") for each in strategy.devices
    ]
    strategy = replace(
        strategy,
        devices=devices,
        pipeline=[name for name in strategy.pipeline if name != "copy"],
        threads=replace(strategy.threads, capture=0, gather_programs=0),
        step="eager",
        shapes=None,
    )
    return save_plan(replace(plan, strategy=strategy), arrays, out)


Enter = Callable[[int, int], None]
"""Called first in each rank, with its number and their number."""


def run_mode(
    plan: Plan, graph: Graph, folder: Path, enter: Enter | None = None, *, epochs: int = EPOCHS
) -> tuple[RunReport, RunReport]:
    """Train under `folder`/plan on GPUs and on cores; the two reports."""
    on_cores(plan, folder / "plan", folder / "cores")
    for name in ("emulated", "host"):
        (folder / name).mkdir()
    ports = [free_port() for _ in range(3)]
    arguments = (plan.num_ranks, ports, graph.path, folder, enter, epochs)
    run_on_ranks(_on_rank, arguments, plan.num_ranks)
    return load_report(folder / "emulated"), load_report(folder / "host")


def hold_mode(mode: Mode, found: RunReport, cores: RunReport, *, tolerance: float = 0.0) -> None:
    """Hold what GPUs have trained against CPU ranks: losses, scores, and rows by source exactly.

    `tolerance` of a loss, relative, replaces the mode's own where it is larger.
    """
    close = max(mode.tolerance, tolerance)
    assert len(found.losses) == len(cores.losses)
    np.testing.assert_allclose(found.losses, cores.losses, rtol=close)
    assert found.losses[-1] != found.losses[0]
    for here, there in zip(found.epochs, cores.epochs, strict=True):
        assert here.val is not None
        assert there.val is not None
        assert abs(here.val - there.val) <= mode.score_tolerance, (here.val, there.val)
    assert found.test_score is not None
    assert cores.test_score is not None
    assert abs(found.test_score - cores.test_score) <= mode.score_tolerance
    rows = [each.rows_by_source for each in found.ranks]
    assert rows == [each.rows_by_source for each in cores.ranks]


def sum_rows(report: RunReport) -> dict[str, int]:
    """Rows that all ranks read, by source."""
    total: dict[str, int] = {}
    for each in report.ranks:
        for kind, count in each.rows_by_source.items():
            total[kind] = total.get(kind, 0) + count
    return total


def _on_rank(
    rank: int, size: int, ports: list[int], graph_path: Path, folder: Path, enter: Enter | None,
    epochs: int,
) -> None:  # fmt: skip
    from gnnplan.runtime.emulation.threads import stop

    torch.set_num_threads(1)
    if enter is not None:
        enter(rank, size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["MASTER_PORT"] = str(ports[0])
    if load_plan(folder / "plan").strategy.mode == "minibatch":
        hold_batches(rank, size, open_graph(graph_path, validate=False), folder)
    for port, plan, run in zip(ports[1:], ("plan", "cores"), ("emulated", "host"), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        stop()
        worker.run(
            RunConfig(
                plan_folder=str(folder / plan), run_folder=str(folder / run), epochs=epochs,
                pin=False, force=True, keep_checkpoints=0, collective_seconds=120.0,
            )
        )  # fmt: skip


def hold_boundary(plan: Plan, graph: Graph, folder: Path, report: RunReport) -> None:
    """Hold the bytes that ranks have exchanged against those that their own draws say."""
    settings, work, epochs = plan.strategy.full_graph, plan.workload, len(report.epochs)
    counted = [rank.bytes_by_source["halo"] for rank in report.ranks]
    predicted = epochs * sum(plan.prediction.traffic_bytes.values())
    if settings.keep >= 1:
        assert sum(counted) == predicted
    elif settings.drop != "nodes" and plan.num_ranks > 1:  # on average over draws
        assert abs(sum(counted) / predicted - 1) < 0.1, (counted, predicted)
    if settings.drop == "nodes" and settings.exchange == "boundary":
        parts = connect_cut(
            graph, load_array(plan, folder, "partition"), plan.num_ranks, work.model
        )
        widths = [graph.feature_dim, *[work.hidden] * (work.num_layers - 1), graph.num_classes]
        drawn = [
            sent_bytes(parts, settings, widths, seed=work.seed, epoch=e) for e in range(epochs)
        ]
        assert counted == [sum(each) for each in zip(*drawn, strict=True)]


def hold_batches(rank: int, size: int, graph: Graph, folder: Path) -> None:
    """Hold the first batches of a GPU against those of the host's loader."""
    plan = load_plan(folder / "plan")
    mesh = open_mesh(plan, timeout_seconds=120.0)
    processor = processor_of(mesh.device)
    assert (processor.is_gpu, processor.emulated) == (True, plan.strategy.emulated)
    places = {"rank": rank, "size": size, "comm": mesh.comm}
    device = PlannedLoader(folder / "plan", graph, device=mesh.device, **places)
    places["comm"] = mesh.comm.host_lane  # GPUs' collectives are the other loader's
    host = PlannedLoader(folder / "cores", graph, device="cpu", on_device=False, **places)
    for found, expected in zip(device.batches(STEPS), host.batches(STEPS), strict=True):
        assert_same(found, expected)
    device.close()
    host.close()
    mesh.close()


def assert_same(found: Any, expected: Any) -> None:
    """Ids, blocks, rows and labels are equal, bit for bit."""
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    np.testing.assert_array_equal(found.seeds, expected.seeds)
    assert torch.equal(found.x.cpu(), expected.x)
    assert torch.equal(found.y.cpu(), expected.y)
    blocks = found.device_blocks or torch_blocks(found)
    for mine, theirs in zip(blocks, torch_blocks(expected), strict=True):
        for name in ("num_src", "num_dst"):
            assert getattr(mine, name) == getattr(theirs, name)
        for name in ("indptr", "indices", "weight", "relation_ptr", "src_type"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None), name
            assert a is None or torch.equal(a.cpu(), b), name
