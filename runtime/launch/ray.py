"""Training through Ray Train: one Ray worker per rank of the plan, no torchrun.

Ray places the workers and sets up the process group; each runs `runtime.worker.run`, which uses
that group. After a failure all workers start again from the last checkpoint, as under torchrun; Ray
itself looks after workers and nodes that are lost.

Every node must see the plan's folder, the dataset and Ray's own storage under the same path. Ray is
an optional extra: `pip install gnnplan[ray]`.
"""

import importlib
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from gnnplan.runtime.errors import GnnplanError, InputError, WorkerFailed
from gnnplan.runtime.faults.failure import failure_of, has_failure, is_final
from gnnplan.runtime.faults.heartbeat import Heartbeat
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.launch.hosts import ranks_by_host
from gnnplan.runtime.launch.launch import (
    CONFIG_FILE,
    EVENTS_FILE,
    LOG_FILE,
    MAX_RESTARTS,
    Progress,
    alone_in,
    follow_events,
    prepare_run,
)
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport, load_report
from gnnplan.runtime.train.evaluation_room import check_eval_fanouts
from gnnplan.runtime.worker import read_config, record_end, run

RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def train_on_ray(
    plan_folder: Path,
    *,
    address: str | None = None,
    run_folder: Path | None = None,
    max_restarts: int = MAX_RESTARTS,
    progress: Progress | None = None,
    **options: Any,
) -> RunReport:
    """Train under a plan on a Ray cluster; other options are fields of `RunConfig`.

    Args:
        plan_folder: Plan; report.json is written into it.
        address: Cluster's address as in ray.init; None: the connected one, or a local one.
        run_folder: Folder of events, logs and checkpoints; None: `run` in the plan's folder.
        max_restarts: Times that all ranks start again from the last checkpoint.
        progress: Callable that gets each event, as in `launch.train`.
        **options: Fields of `RunConfig`.
    """
    if any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow", "pandas")):
        raise InputError("expected Ray Train, found none; pip install 'gnnplan[ray]'")
    ray = importlib.import_module("ray")
    plan_folder = Path(plan_folder).resolve()
    plan = load_plan(plan_folder)
    if max_restarts < 0:
        raise InputError(f"expected at least 0 restarts, found {max_restarts}")
    run_path = (plan_folder / "run" if run_folder is None else Path(run_folder)).resolve()
    config = RunConfig(
        plan_folder=str(plan_folder), run_folder=str(run_path), pin=False, **options
    )  # not pinned: Ray may give the node's other cores to other jobs
    check_eval_fanouts(config.eval_fanouts, plan.workload.num_layers)
    with alone_in(run_path):
        prepare_run(run_path, config)
        connected = ray.is_initialized()
        if not connected:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        ended = threading.Event()
        follower = threading.Thread(
            target=follow_events, args=(run_path / EVENTS_FILE, ended.is_set, progress)
        )
        follower.start()
        try:
            _fit_with_restarts(plan, run_path, config, max_restarts)
        finally:
            ended.set()
            follower.join()
            if not connected:
                ray.shutdown()
    return load_report(run_path)


def _fit_with_restarts(plan: Plan, run_path: Path, config: RunConfig, max_restarts: int) -> None:
    failed = importlib.import_module("ray.train").TrainingFailedError
    for attempt in range(max_restarts + 1):
        try:
            _trainer(plan, run_path, config, attempt).fit()
            return
        except failed as error:
            if attempt < max_restarts and not is_final(run_path, attempt):
                continue
            if has_failure(run_path, attempt):
                raise failure_of(run_path, run_path / LOG_FILE) from None
            line = str(error).strip().splitlines()[-1]
            raise WorkerFailed(f"Ray: {line}; more in Ray's logs of the worker") from None


def _trainer(plan: Plan, run_path: Path, config: RunConfig, attempt: int) -> Any:
    train = importlib.import_module("ray.train")
    torch = importlib.import_module("ray.train.torch")
    threads, hosts = plan.strategy.threads, ranks_by_host(plan)
    cuda = plan.strategy.devices[0].needs_gpu
    together = "STRICT_PACK" if len(hosts) == 1 else "PACK"
    return torch.TorchTrainer(
        _rank,
        train_loop_config={"config": str(run_path / CONFIG_FILE), "attempt": attempt},
        torch_config=torch.TorchConfig(
            backend="nccl" if cuda else "gloo", timeout_s=round(config.collective_seconds)
        ),
        scaling_config=train.ScalingConfig(
            num_workers=plan.num_ranks,
            use_gpu=cuda,
            resources_per_worker={"CPU": threads.compute + threads.sample, "GPU": int(cuda)},
            placement_strategy=("STRICT_SPREAD" if len(hosts) == plan.num_ranks > 1 else together),
        ),
        run_config=train.RunConfig(
            name="ray",
            storage_path=str(run_path),
            failure_config=train.FailureConfig(max_failures=0),
        ),
    )


def _rank(settings: dict[str, Any]) -> None:
    config = read_config(Path(settings["config"]))
    os.environ[RESTARTS_VARIABLE] = str(settings["attempt"])
    heartbeat = Heartbeat()
    try:
        run(config, heartbeat)
    except Exception as error:
        record_end(config, error, heartbeat)
        raise


def main(arguments: list[str]) -> int:
    """Train as the request says, on the cluster that this process belongs to."""
    try:
        request = json.loads(Path(arguments[0]).read_text())
        train_on_ray(
            Path(request["plan_folder"]),
            run_folder=Path(request["run_folder"]),
            **request["options"],
        )
    except GnnplanError as error:
        sys.stderr.write(f"gnnplan: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, InputError) else 1
    except OSError as error:
        sys.stderr.write(f"gnnplan: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    from gnnplan.runtime.launch import ray

    sys.exit(ray.main(sys.argv[1:]))  # of the imported module: Ray pickles its functions by name
