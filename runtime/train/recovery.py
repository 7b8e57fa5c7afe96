"""A job's checkpoints: what is in one, and how a job goes on from it.

No generator's state is kept: every draw, dropout's too, comes from a stream that the seed, the
epoch, the step and the rank give.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import codec
from runtime.errors import PlanError
from runtime.failure import attempt_line
from runtime.heartbeat import Phase, attempt
from runtime.report import EpochReport
from runtime.train.checkpoint import read_newest, save_checkpoint, state_of
from runtime.train.checkpoint_files import CHECKPOINTS, set_aside
from runtime.train.epochs_file import EPOCHS_FILE, Mark, append_epochs, read_epochs

if TYPE_CHECKING:
    from runtime.train.job import Job

_log = logging.getLogger(__name__)


def begin(job: "Job") -> None:
    """Go on from a checkpoint where that is asked for, or where the job was started again.

    Raises:
        PlanError: the checkpoint is of another plan.
    """
    restarts = attempt()
    if restarts:
        why = attempt_line(job.config.run_path, restarts - 1)
        job.notes.append(f"restart {restarts}: {why}")
        job.events.emit("restart", line=job.notes[-1])
    if job.config.resume or restarts:
        resume(job)
    elif job.loop.comm.rank == 0:
        aside = set_aside(job.config.run_path / CHECKPOINTS)
        if aside is not None:
            job.notes.append(f"checkpoints of an earlier run are in {aside}")


def save(job: "Job") -> None:
    """Write a checkpoint (rank 0); where the disk refuses it, warn once and train on."""
    if job.config.keep_checkpoints == 0:
        return
    job.heartbeat.begin(Phase.SAVING)
    factor = None if job.factor is None else job.factor.state(job.loop.comm)
    if job.loop.comm.rank != 0:
        return
    folder = job.config.run_path / CHECKPOINTS
    state: dict[str, Any] = {
        "plan_id": job.plan.plan_id,
        "steps": job.steps,
        "loader": job.loader.state_dict(),
        "factor": factor,
        "epoch_losses": job.epoch_losses,
        "epoch_seconds": job.epoch_seconds,
        "model": job.loop.model.state_dict(),
        "optimizer": job.loop.optimizer.state_dict(),
        "precision": job.loop.precision.state(),
    }
    try:
        job.epochs_mark = append_epochs(folder, job.epochs, job.epochs_mark)
        state["epochs"] = {"before": job.first_epoch, "mark": codec.to_plain(job.epochs_mark)}
        save_checkpoint(folder, job.steps, state, keep=job.config.keep_checkpoints)
        job.disk_full = False
    except OSError as error:
        _warn_of_disk(job, folder, error)


def resume(job: "Job") -> None:
    """Go on from the newest whole checkpoint; without one, start at the beginning.

    Rank 0 reads it for all, so that hosts without the run's folder resume as well.

    Raises:
        PlanError: it is of another plan.
    """
    comm, plan_id = job.loop.comm, job.plan.plan_id
    found = read_newest(job.config.run_path / CHECKPOINTS) if comm.rank == 0 else (None, [])
    data, warnings = comm.broadcast_object(found)
    job.notes += warnings
    if data is None:
        job.notes.append("no checkpoint to resume from; started at the beginning")
        return
    state = state_of(data, device=str(job.loop.gradients.flat.device))
    if state["plan_id"] != plan_id:
        raise PlanError(
            f"{job.config.run_folder}: expected checkpoints of plan {plan_id[:12]}, "
            f"found {str(state['plan_id'])[:12]}; use another run folder"
        )
    job.loop.model.load_state_dict(state["model"])
    job.loop.optimizer.load_state_dict(state["optimizer"])
    if "precision" in state:  # not in checkpoints of versions before it
        job.loop.precision.load_state(state["precision"])
    known: dict[str, Any] = {"plan_id": plan_id}  # what loaders' states of earlier versions lack
    if job.factor is not None:
        job.factor.load_state(state["factor"], rank=comm.rank)
        known["factor"] = job.factor.factor
    job.loader.load_state_dict(known | state["loader"])
    job.steps = job.first_step = int(state["steps"])
    job.epoch_losses = [float(loss) for loss in state["epoch_losses"]]
    job.epoch_seconds = float(state["epoch_seconds"])
    _resume_epochs(job, state["epochs"])
    job.notes.append(f"resumed after step {job.steps}")


def _resume_epochs(job: "Job", known: dict[str, Any] | str) -> None:
    """Take the reports of the epochs before; without them training goes on all the same."""
    if isinstance(known, str):  # checkpoints of versions before the file hold all reports
        job.epochs = [codec.decode(EpochReport, each) for each in codec.parse(known)]
        return
    mark = codec.decode(Mark, known["mark"])
    found, warning = None, ""
    if job.loop.comm.rank == 0:
        folder = job.config.run_path / CHECKPOINTS
        try:
            found = read_epochs(folder, mark)
        except (OSError, ValueError) as error:
            warning = (
                f"{folder / EPOCHS_FILE}: {error}; the report begins after epoch "
                f"{known['before'] + mark.epochs - 1}, training is not affected"
            )
    found, warning = job.loop.comm.broadcast_object((found, warning))
    if found is None:
        job.notes.append(warning)
        job.first_epoch, job.epochs, job.epochs_mark = known["before"] + mark.epochs, [], Mark()
        return
    job.first_epoch, job.epochs, job.epochs_mark = known["before"], found, mark


def _warn_of_disk(job: "Job", folder: Path, error: OSError) -> None:
    """One warning for each time the disk fills up; older checkpoints are whole."""
    if not job.disk_full:
        line = (
            f"{folder}: no checkpoint after step {job.steps} ({error}); training goes on and "
            "tries again at the next one, the older ones are untouched"
        )
        _log.warning("%s", line)
        job.notes.append(line)
        job.events.emit("warning", line=line)
    job.disk_full = True
