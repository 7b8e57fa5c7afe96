"""The worker on a plan of several "hosts" whose ranks share one GPU, against the same on cores.

Training alone, validation and test, and a run that is resumed: losses are held to those of CPU
ranks, rows by source to their counts exactly.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import TopologyPlacement
from gnnplan.runtime.report import RunReport, load_report, save_report
from tests.benchmarks.common import record
from tests.silicon.setting import Setting, run_sharing
from tests.support.plans import change_strategy, make_plan

TOLERANCE = 2e-3
"""Relative, of a loss after some tens of steps: sums of float32 in another order."""
NODES, TINY_NODES = 20_000, 600
EPOCHS = 2


def train_on_hosts(
    setting: Setting, ranks: int, *, evaluate: bool, resume: bool, ahead: bool = False
) -> None:
    """Two epochs on as many "hosts" as ranks; equal losses, equal rows by source.

    Args:
        setting: the device.
        ranks: each a host of its own.
        evaluate: validate after every epoch and test after the last.
        resume: stop after the first epoch and go on from its checkpoint.
        ahead: read rows of the other GPUs too, exchanged by a thread beside compute.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = _graph(setting, folder / "graph")
        _plan(graph, folder / "cores", ranks, on_gpu=False, ahead=ahead)
        _plan(graph, folder / "plan", ranks, on_gpu=not setting.emulated, ahead=ahead)
        every = 1 if evaluate else 0
        on_cores = _run(Setting(emulated=True), folder / "cores", ranks, every, EPOCHS)
        found = None
        for epochs in range(1, EPOCHS + 1) if resume else [EPOCHS]:
            found = _run(setting, folder / "plan", ranks, every, epochs)
    assert found is not None
    _compare(found, on_cores, evaluate=evaluate, same_steps=not resume)


def _graph(setting: Setting, folder: Path) -> Graph:
    nodes = TINY_NODES if setting.emulated else NODES
    return generate_sbm(folder, num_nodes=nodes, degree=15.0, feature_dim=32, num_classes=5, seed=7)


def _plan(graph: Graph, folder: Path, ranks: int, *, on_gpu: bool, ahead: bool) -> None:
    """A plan whose ranks are hosts of one device each, with rows of their own and of the host."""
    plan = make_plan(
        graph, folder, ranks=ranks, batch_size=64 * ranks,
        own_rows=graph.num_nodes // (ranks if ahead else 2), peers=ahead,
        hosts=list(range(ranks)), capture=0, sample_threads=int(ahead),
        topology=TopologyPlacement(policy="replicated" if on_gpu else "host"),
    )  # fmt: skip
    if not on_gpu:
        return
    devices = [replace(each, kind="cuda", index=0) for each in plan.strategy.devices]
    change_strategy(plan, folder, devices=devices)


def _run(setting: Setting, folder: Path, ranks: int, every: int, epochs: int) -> RunReport:
    """Run the worker's own entry in processes that share the device; the report of rank 0."""
    config = RunConfig(
        plan_folder=str(folder), run_folder=str(folder / "run"), epochs=epochs, eval_every=every,
        resume=True, pin=False,
    )  # fmt: skip
    run_sharing(setting, _worker, ranks, config, join=False)
    return load_report(folder / "found")


def _worker(setting: Setting, rank: int, config: RunConfig) -> None:
    from gnnplan.runtime.worker import run

    backend = load_plan(Path(config.plan_folder)).strategy.devices[0].kind
    assert (backend == "cuda") == (not setting.emulated)
    config.run_path.mkdir(parents=True, exist_ok=True)
    report = run(config)
    if rank == 0:
        found = Path(config.plan_folder) / "found"
        found.mkdir(exist_ok=True)
        save_report(report, found)


def _compare(found: RunReport, expected: RunReport, *, evaluate: bool, same_steps: bool) -> None:
    for here, there in zip(found.epochs, expected.epochs, strict=True):
        ratio = here.loss / there.loss
        record(f"loss_epoch_{here.epoch}", here.loss, "nats", baseline=there.loss, ratio=ratio)
        assert abs(ratio - 1) <= TOLERANCE, f"epoch {here.epoch}: {here.loss} for {there.loss}"
        assert (here.val is not None) == evaluate
    for here, there in zip(found.ranks, expected.ranks, strict=True) if same_steps else ():
        rows = {kind: n for kind, n in here.rows_by_source.items() if n}
        assert rows == {kind: n for kind, n in there.rows_by_source.items() if n}, here.rank
    if evaluate:
        assert found.test_score is not None
        assert expected.test_score is not None
        record("test_score", found.test_score, found.metric, baseline=expected.test_score)
        assert abs(found.test_score - expected.test_score) < 0.02
    record("step", found.step_seconds.median, "s", baseline=expected.step_seconds.median)
