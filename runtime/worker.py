"""One rank of a training job, from its configuration to its report: the page to read first.

  config, plan -> threads -> ranks -> graph, tiers, loader -> model -> train -> report

`gnnplan train` starts one of these per device through torchrun (`launch`); a single rank also runs
in the calling process: `run(config)`. Everything that decides *how* to train is in the plan.
"""

import functools
import gc
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # until all is imported (DEC-135)

from gnnplan.runtime import codec
from gnnplan.runtime.comm.mesh import Mesh, open_mesh, rank_and_size
from gnnplan.runtime.device import flush_denormals, use_threads
from gnnplan.runtime.errors import GnnplanError, InputError
from gnnplan.runtime.faults.failure import plan_on_trial, record_failure
from gnnplan.runtime.faults.heartbeat import Heartbeat, attempt
from gnnplan.runtime.graph.dataset import Graph, is_typed, open_graph, types_of
from gnnplan.runtime.identity import check_identity, find_mismatches, unused_weights
from gnnplan.runtime.launch.config import RunConfig, read_offer, read_trials
from gnnplan.runtime.launch.torchrun import die_with
from gnnplan.runtime.limits import as_budget_error, memory_group, room_to_keep
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.process import (
    die_first,
    give_back_freed_memory,
    host_state,
    keep_freed_memory,
    leave,
    usable_core_ids,
)
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.train.captured import CapturedLoop
from gnnplan.runtime.train.evaluation_room import check_eval_fanouts, name_sampling
from gnnplan.runtime.train.fullgraph import FullGraphEpochs, open_full_graph
from gnnplan.runtime.train.gradients import GradientBuffer, overlap_of
from gnnplan.runtime.train.job import Events, Job
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer, share_parameters
from gnnplan.runtime.train.precision import Precision
from gnnplan.runtime.train.recovery import CHECKPOINTS, begin, newest_name
from gnnplan.runtime.train.trials import TrialRun


def run(config: RunConfig, heartbeat: Heartbeat | None = None) -> RunReport:
    """Train as this rank of the plan, perhaps watched; every rank returns the same report.

    Raises PlanError for a plan of another graph, machine or number of ranks, and GnnplanError for a
    damaged dataset or a loss that is not finite.
    """
    before = host_state()
    plan = load_plan(Path(config.plan_folder), verify_arrays=config.verify)
    check_eval_fanouts(config.eval_fanouts, plan.workload.num_layers)
    if config.launched:  # a process of its own
        roomy = room_to_keep(plan, memory_group())
        _ = keep_freed_memory() if roomy else give_back_freed_memory()
        flush_denormals()
    notes = check_identity(plan, force=config.force)
    forced = find_mismatches(plan) if config.force else []
    rank, _ = rank_and_size()
    usable = usable_core_ids()
    cores = use_threads(plan, rank, pin=config.pin)
    mesh = open_mesh(plan, timeout_seconds=config.collective_seconds)
    expected = "" if config.force else plan.graph.fingerprint
    graph = open_graph(Path(plan.graph.path), validate=False, fingerprint=expected)
    loader, loop = open_loop(plan, Path(config.plan_folder), graph, mesh)
    events = Events(config.run_path / "events.jsonl" if mesh.rank == 0 else None)
    job = Job(config=config, plan=plan, loader=loader, loop=loop, events=events, cores=cores)
    del loader  # the job's alone, which a trial may replace
    job.notes += notes
    job.forced = forced
    sampled = name_sampling(plan, config.eval_fanouts) if config.eval_every else ""
    for line in [*unused_weights(plan, graph), *([sampled] if sampled else [])]:
        job.warn(line)
    job.before = before
    if heartbeat is not None:
        job.heartbeat, job.loader.meter.on_enter = heartbeat, heartbeat.enter
    try:
        begin_trials(job, graph, mesh, usable)
        begin(job)
        job.train()
        report = job.finish()
    finally:
        job.close()
        events.close()
    mesh.close()
    return report


def begin_trials(job: Job, graph: Graph, mesh: Mesh, usable: list[int]) -> None:
    """Let the job try the plans of its run; `usable` are the cores from before it was pinned."""
    trials, pin = read_trials(job.config.run_path), job.config.pin
    if trials is not None:
        job.trials = TrialRun(
            trials,
            open_loader=functools.partial(open_loader, graph, mesh),
            use_threads=functools.partial(use_threads, rank=mesh.rank, pin=pin, usable=usable),
            offer=read_offer(job.config.run_path),
        )
        job.trials.begin(job)


def open_loop(
    plan: Plan, folder: Path, graph: Graph, mesh: Mesh
) -> tuple[PlannedLoader | FullGraphEpochs, TrainLoop]:
    """Open the loader and loop of the plan's mode: mini-batches, or the whole graph."""
    if plan.strategy.mode == "full-graph":
        return open_full_graph(plan, folder, graph, mesh.device, mesh.comm)
    loader = open_loader(graph, mesh, folder)
    return loader, make_loop(plan, graph, mesh, loader)


def open_loader(
    graph: Graph, mesh: Mesh, folder: Path, meter: StageMeter | None = None
) -> PlannedLoader:
    """Open this rank's loader of a plan of mini-batches."""
    return PlannedLoader(
        folder, graph, rank=mesh.rank, size=mesh.size, device=mesh.device, comm=mesh.comm,
        meter=meter, row_dtype=None,
    )  # fmt: skip


def make_loop(plan: Plan, graph: Graph, mesh: Mesh, loader: PlannedLoader) -> TrainLoop:
    """Build the plan's model, the same on every rank, with its optimiser and flat gradients."""
    workload = plan.workload
    types = types_of(graph) if is_typed(workload) else None
    model = build_model(
        workload, graph.feature_dim, graph.num_classes, str(graph.task), types=types
    )
    model.to(mesh.device)
    precision = Precision(workload.precision)
    precision.set_up(mesh.device)
    share_parameters(model, mesh.comm)
    captured = plan.strategy.step == "captured"
    gradients = GradientBuffer(model, flagged=captured)
    loop = TrainLoop(
        model=model,
        optimizer=make_optimizer(
            model, learning_rate=workload.learning_rate, weight_decay=workload.weight_decay
        ),
        gradients=gradients,
        comm=mesh.comm,
        meter=loader.meter,
        task=str(graph.task),
        seed=workload.seed,
        precision=precision,
        overlapped=overlap_of(plan, gradients, mesh.comm),
    )
    if captured:
        loop = CapturedLoop.of(loop, plan)
        loader.draw_padded()
    return loop


def read_config(path: Path) -> RunConfig:
    """Read the configuration that `launch` wrote."""
    try:
        return codec.decode(RunConfig, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a run configuration ({error})") from None


def main(arguments: list[str]) -> int:
    """Run a torchrun rank, `python -m gnnplan.runtime.worker RUN_CONFIG`; return its exit code."""
    config = read_config(Path(arguments[0]))
    if config.launched:  # never outlive torchrun
        die_with(os.getppid(), signal.SIGKILL)
        die_first()
    heartbeat = Heartbeat.join()
    try:
        run(config, heartbeat)
    except BaseException as error:
        try:
            record_end(config, error, heartbeat)
        finally:
            leave(1)  # threads and process groups may wait for ranks that are gone
    heartbeat.close()
    return 0


def record_end(config: RunConfig, error: BaseException, heartbeat: Heartbeat) -> None:
    """Record why this rank failed, and the plan's sum of bytes where memory ran out.

    The heartbeat is the rank's: it knows the job's progress on hosts without its checkpoints.
    """
    rank = rank_and_size()[0]
    try:
        folder = plan_on_trial(config.run_path) or Path(config.plan_folder)
        budget = as_budget_error(error, load_plan(folder), rank)
    except GnnplanError:  # the plan itself is what is wrong
        budget = None
    if budget is not None:
        budget.__cause__ = error
    progress = newest_name(config.run_path / CHECKPOINTS) or heartbeat.saved
    record_failure(config.run_path, rank, budget or error, attempt=attempt(), progress=progress)


if __name__ == "__main__":
    gc.enable()
    leave(main(sys.argv[1:]))
