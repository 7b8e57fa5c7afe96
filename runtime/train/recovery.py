"""Checkpoints: what one holds, how it is written and read, and how a job goes on from it.

A file `checkpoint-<step>-<sha256, 12 digits>.pt` is written as a whole or not at all. The digits
are of its content: one that was cut short or altered is recognised, and the one before it is used.
It holds tensors and plain values only, loaded with torch's `weights_only`, which runs no code. No
generator's state is kept: every draw comes from seed, epoch, step and rank.

An epoch that is evaluated is saved before, as trained but without a report, and again with it: a
job that goes on from the first ends the epoch anew.

Reports of epochs are appended to one file beside the checkpoints, which so stay of one size. A
checkpoint holds a mark: how much of the file was there, and its checksum. Lines behind the mark of
the checkpoint that a job goes on from are overwritten.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError, PlanError
from gnnplan.runtime.faults.failure import attempt_line, ended_elsewhere
from gnnplan.runtime.faults.heartbeat import Phase, attempt
from gnnplan.runtime.folders import sweep_temporary
from gnnplan.runtime.graph.format import one_line
from gnnplan.runtime.report import EpochReport

if TYPE_CHECKING:
    from gnnplan.runtime.train.job import Job

_log = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"
"""Name of the checkpoints' folder within the run's."""
_NAME = re.compile(r"checkpoint-(\d{10})-([0-9a-f]{12})\.pt")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint files of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[str, float]:
    """Return a checkpoint's step and time; rank 0 may have removed it meanwhile."""
    try:
        return path.name[:21], path.stat().st_mtime
    except FileNotFoundError:
        return path.name[:21], 0.0


def newest_name(folder: Path) -> str:
    """Return the name of the newest checkpoint, whole or not; empty where there is none."""
    found = list_checkpoints(folder)
    return found[-1].name if found else ""


def set_aside(folder: Path) -> Path | None:
    """Rename an earlier run's checkpoints to `<folder>.previous`, in place of what lay there.

    A restart would else take them for its own.
    """
    if not list_checkpoints(folder):
        return None
    aside = folder.with_name(f"{folder.name}.previous")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write `state` as the checkpoint of optimiser step `step` and remove all but the last `keep`.

    It takes the place of an earlier one of that step, so that those that are kept lie steps apart.
    `state` holds tensors, numbers, strings, and dicts and lists of them. On a full disk it raises
    OSError, and older checkpoints are untouched.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    path = folder / f"checkpoint-{step:010d}-{_digest(data)}.pt"
    codec.write_bytes_atomically(path, data)
    for old in list_checkpoints(folder):
        if old != path and old.name[:21] == path.name[:21]:
            old.unlink(missing_ok=True)
    for old in list_checkpoints(folder)[: -max(1, keep)]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def read_newest(folder: Path) -> tuple[bytes | None, list[str]]:
    """Read the newest whole checkpoint (None without one), with a warning per damaged one."""
    warnings: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            data = path.read_bytes()
        except OSError as error:
            warnings.append(f"{path} cannot be read ({error}); the one before it is used")
            continue
        match = _NAME.fullmatch(path.name)
        if match is not None and match.group(2) == _digest(data):
            break
        warnings.append(
            f"{path} is damaged (its content does not match its name); the one before it is used"
        )
    else:
        data = None
    for warning in warnings:
        _log.warning("%s", warning)
    return data, warnings


def state_of(data: bytes, *, device: str = "cpu") -> dict[str, Any]:
    """Decode a checkpoint, with its tensors on `device`; raise InputError for other content."""
    import torch

    try:
        state: Any = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except Exception as error:  # pickle, zip and torch raise nearly anything
        raise InputError(_refusal(one_line(error))) from None
    if not isinstance(state, dict):
        raise InputError(_refusal(f"a {type(state).__name__}"))
    return state


def _refusal(found: str) -> str:
    return f"expected a checkpoint of tensors and plain values, found something else: {found}"


def load_newest(folder: Path, *, device: str = "cpu") -> dict[str, Any] | None:
    """Return the newest whole checkpoint; None where there is none."""
    data, _ = read_newest(folder)
    return None if data is None else state_of(data, device=device)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


EPOCHS_FILE = "epochs.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Part of the file of epochs, from its beginning."""

    epochs: int = 0
    size_bytes: int = 0
    checksum: int = 0
    """CRC-32 of the part."""


def append_epochs(folder: Path, epochs: list[EpochReport], mark: Mark) -> Mark:
    """Write the reports behind a mark; return the new mark.

    On a full disk it raises OSError, and what the mark covers is untouched.
    """
    new = epochs[mark.epochs :]
    if not new:
        return mark
    folder.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(codec.to_plain(each)) + "\n" for each in new).encode()
    with os.fdopen(os.open(folder / EPOCHS_FILE, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        file.truncate(mark.size_bytes)
        file.seek(mark.size_bytes)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Mark(
        epochs=mark.epochs + len(new),
        size_bytes=mark.size_bytes + len(data),
        checksum=zlib.crc32(data, mark.checksum),
    )


def read_epochs(folder: Path, mark: Mark) -> list[EpochReport]:
    """Return the reports that a mark covers; raise OSError or ValueError without them."""
    if mark.epochs == 0:
        return []
    with (folder / EPOCHS_FILE).open("rb") as file:
        data = file.read(mark.size_bytes)
    if len(data) != mark.size_bytes or zlib.crc32(data) != mark.checksum:
        raise ValueError("its content does not match the checkpoint's checksum")
    return [codec.decode(EpochReport, codec.parse(line)) for line in data.splitlines()]


def begin(job: "Job") -> None:
    """Resume a job where that is asked for, or where it was started again.

    What killed ranks have left of checkpoints goes first: their writer alone is alive now.
    """
    restarts, folder = attempt(), job.config.run_path / CHECKPOINTS
    if job.loop.comm.rank == 0:
        sweep_temporary(folder, _NAME.pattern)
    if restarts:
        job.notes.append(f"restart {restarts}: {_why_ended(job, restarts - 1)}")
        job.events.emit("restart", line=job.notes[-1])
    if job.config.resume or restarts:
        resume(job)
    elif job.loop.comm.rank == 0:
        aside = set_aside(folder)
        if aside is not None:
            job.notes.append(f"checkpoints of an earlier run are in {aside}")


def _why_ended(job: "Job", attempt: int) -> str:
    """Say why an attempt ended, in the words of the host that knows its cause. Collective."""
    folder = job.config.run_path
    told = ended_elsewhere(folder, attempt), attempt_line(folder, attempt)
    return min(job.loop.comm.all_gather_objects(told), key=lambda each: each[0])[1]


def save(job: "Job") -> None:
    """Write a job's checkpoint (rank 0); where the disk refuses it, warn once and train on."""
    if job.config.keep_checkpoints == 0:
        return
    job.heartbeat.begin(Phase.SAVING)
    factor = None if job.factor is None else job.factor.state(job.loop.comm)
    _note_saved(job)
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
    if job.trials is not None:
        state["trials"] = job.trials.plain()
    try:
        job.epochs_mark = append_epochs(folder, job.epochs, job.epochs_mark)
        state["epochs"] = {"before": job.first_epoch, "mark": codec.to_plain(job.epochs_mark)}
        save_checkpoint(folder, job.steps, state, keep=job.config.keep_checkpoints)
        job.disk_full = False
    except OSError as error:
        _warn_of_disk(job, folder, error)


def _note_saved(job: "Job") -> None:
    """Tell every rank's heartbeat how far the newest checkpoint is."""
    epochs = job.first_epoch + len(job.epochs)
    job.heartbeat.saved = f"step {job.steps}, {epochs} epoch{'s' * (epochs != 1)} reported"


def resume(job: "Job") -> None:
    """Go on from the newest whole checkpoint, or start at the beginning without one.

    Rank 0 reads it for all, so that hosts without the run's folder resume as well. A checkpoint of
    another plan raises PlanError, unless the run has tried that plan too.
    """
    comm, trials, plan_id = job.loop.comm, job.trials, job.plan.plan_id
    found = read_newest(job.config.run_path / CHECKPOINTS) if comm.rank == 0 else (None, [])
    data, warnings = comm.broadcast_object(found)
    for line in warnings:
        job.warn(line)
    if data is None:
        job.warn("no checkpoint to resume from; started at the beginning")
        if trials is not None:
            trials.resume(job, plan_id, None)
        return
    # By the type: an emulated GPU's number means nothing to a file.
    state = state_of(data, device=job.loop.gradients.flat.device.type)
    if trials is None and state["plan_id"] != plan_id:
        raise PlanError(
            f"{job.config.run_folder}: expected checkpoints of plan {plan_id[:12]}, "
            f"found {str(state['plan_id'])[:12]}; use another run folder"
        )
    job.loop.model.load_state_dict(state["model"])
    job.loop.optimizer.load_state_dict(state["optimizer"])
    if "precision" in state:  # not in checkpoints of earlier versions
        job.loop.precision.load_state(state["precision"])
    known: dict[str, Any] = {}
    if job.factor is not None:
        job.factor.load_state(state["factor"], rank=comm.rank)
        known["factor"] = job.factor.factor
    # The id is missing in states of earlier versions, and may be of another plan on trial.
    job.loader.load_state_dict(known | state["loader"] | {"plan_id": plan_id})
    job.steps = job.first_step = int(state["steps"])
    job.epoch_losses = [float(loss) for loss in state["epoch_losses"]]
    job.epoch_seconds = float(state["epoch_seconds"])
    _resume_epochs(job, state["epochs"])
    _note_saved(job)
    job.notes.append(f"resumed after step {job.steps}")
    if trials is not None:
        trials.resume(job, state["plan_id"], state.get("trials"))


def _resume_epochs(job: "Job", known: dict[str, Any] | str) -> None:
    """Take the reports of the epochs before; without them training goes on all the same."""
    if isinstance(known, str):  # checkpoints of earlier versions hold all reports
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
        job.warn(warning)
        job.first_epoch, job.epochs, job.epochs_mark = known["before"] + mark.epochs, [], Mark()
        return
    job.first_epoch, job.epochs, job.epochs_mark = known["before"], found, mark


def _warn_of_disk(job: "Job", folder: Path, error: OSError) -> None:
    if not job.disk_full:
        line = (
            f"{folder}: no checkpoint after step {job.steps} ({error}); training goes on and "
            "tries again at the next one, the older ones are untouched"
        )
        _log.warning("%s", line)
        job.warn(line)
    job.disk_full = True
