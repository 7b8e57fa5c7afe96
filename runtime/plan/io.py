"""Write and read plan folders.

A plan is a folder: `plan.json` (`schema.Plan`) and one memory-mapped `.npy` file per array, whose
sha256 stand in plan.json. `plan_id` is the hash of the content, but for the UUIDs of GPUs; the time
of creation is not part of it, so equal inputs give byte-identical folders.
"""

import filecmp
import glob
import hashlib
import io
import logging
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime import codec
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.folders import (
    OWNER,
    UNNAMED,
    Unfinished,
    flush,
    free_name,
    hold,
    is_named,
    make_beside,
    real_folder,
    sweep_unfinished,
    take_name,
)
from gnnplan.runtime.npy import map_npy
from gnnplan.runtime.plan.schema import SCHEMA_VERSION, ArrayRef, Plan

PLAN_FILE = "plan.json"
_log = logging.getLogger(__name__)


def _npy_parts(array: NDArray[Any]) -> tuple[bytes, memoryview]:
    """Return a .npy file's header and values, these without a copy."""
    values = np.ascontiguousarray(array)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    return header.getvalue(), values.reshape(-1).view(np.uint8).data


def _sha256(parts: tuple[bytes, memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def with_identity(plan: Plan) -> Plan:
    """Return the plan with `plan_id` set to the hash of its content."""
    bare = replace(plan, plan_id="", gpu_uuids=[])
    return replace(plan, plan_id=codec.content_hash(bare)[:32])


def save_plan(plan: Plan, arrays: dict[str, NDArray[Any]], folder: Path) -> Plan:
    """Write a plan folder as a whole or not at all; return the plan with hashes and identity.

    An existing plan folder is replaced; what it raises is `plan_in_making`'s.
    """
    with plan_in_making(Path(folder)) as staging:
        refs: dict[str, ArrayRef] = {}
        written: dict[str, str] = {}
        hashed: dict[int, str] = {}
        for name in sorted(arrays):
            parts = _npy_parts(arrays[name])
            same = id(arrays[name])  # ranks that hold the same share one array
            digest = hashed[same] if same in hashed else _sha256(parts)
            hashed[same] = digest
            if digest not in written:
                written[digest] = f"{name}.npy"
                with (staging / f"{name}.npy").open("wb") as file:
                    file.writelines(parts)
            refs[name] = ArrayRef(
                file=written[digest],
                sha256=digest,
                dtype=str(arrays[name].dtype),
                shape=list(arrays[name].shape),
            )
        # As a reader decodes it: where a field is a float, 4 is written and 4.0 is read.
        plan = codec.decode(Plan, codec.parse(codec.dumps(replace(plan, arrays=refs))))
        plan = with_identity(plan)
        (staging / PLAN_FILE).write_text(codec.dumps(plan))
    return plan


@contextmanager
def plan_in_making(folder: Path) -> Generator[Path]:
    """Give a hidden folder to write a plan to, which is `folder` once the block has ended well.

    An earlier plan there is deleted, unless it was trained: a folder with anything beside a plan's
    own files (a run with its checkpoints, a report) is kept as `<folder>.previous`, also where this
    process is interrupted or killed as the two change places. The same plan made again leaves it
    in its place. What killed processes have left unfinished beside it is removed.

    Raises:
        PlanError: the folder holds something else, or a training runs in it.
        OSError: it cannot be written or renamed.
    """
    refuse_unplaced(folder)
    folder = real_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep_beside(folder)
    unfinished = Unfinished(folder)
    made = unfinished.folder
    try:
        yield made
        flush(made)
        unfinished.finish()
        if _is_trained(folder) and _same_files(made, folder):
            return
        earlier = take_name(made, folder)
        if earlier is not None and earlier != made:
            _leave_name(earlier, folder)
    finally:
        if made.exists() and not unfinished.is_ours:
            _leave_name(made, folder)  # the earlier one, with which it has changed places
        unfinished.remove()


def _sweep_beside(folder: Path) -> None:
    """Remove what killed processes have left of plans that were to be `folder`.

    A trained plan under such a name had just given its own away.
    """
    sweep_unfinished(folder.parent)
    hidden = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{12}}(\.earlier)?")
    for each in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        whole = (each / PLAN_FILE).is_file() and not (each / OWNER).exists()
        if hidden.fullmatch(each.name) and whole and _is_trained(each):
            _leave_name(each, folder)


def _leave_name(earlier: Path, folder: Path) -> None:
    """Keep a plan that another took the name of if it was trained, else delete it."""
    if not _is_trained(earlier):
        shutil.rmtree(earlier, ignore_errors=True)
        return
    with suppress(FileNotFoundError):  # another process has just kept it
        kept = earlier.rename(free_name(folder))
        _log.warning("the earlier plan of %s was trained: it is kept in %s", folder, kept)


def _is_trained(folder: Path) -> bool:
    """Return whether a plan's folder holds more than the plan."""
    return folder.is_dir() and any(not _is_of_plan(each) for each in folder.iterdir())


def _is_of_plan(path: Path) -> bool:
    return path.name == PLAN_FILE or path.suffix == ".npy"


def _same_files(made: Path, folder: Path) -> bool:
    """Return whether the folder has the same plan, to the byte."""
    names = [each.name for each in made.iterdir()]
    return not any(filecmp.cmpfiles(made, folder, names, shallow=False)[1:])


NEXT = f".{PLAN_FILE}.next"
"""Folder, within a plan's, of the whole plan that is about to take its place."""


def copy_plan(source: Path, folder: Path) -> Plan:
    """Put a folder's plan into another folder, in place of its plan and beside all else there.

    All is copied before anything is exchanged: a full disk leaves the earlier plan. While files are
    exchanged the folder has no plan.json: it never holds a mixture. Where that is interrupted, or
    this process killed, who reads the folder next (`load_plan`) ends it.
    """
    plan = load_plan(source)
    folder.mkdir(parents=True, exist_ok=True)
    if _has_plan(folder) and load_plan(folder).plan_id == plan.plan_id:
        return plan
    names = [*{ref.file for ref in plan.arrays.values()}, PLAN_FILE]
    for left in folder.glob(f".{PLAN_FILE}.*"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed amid this
    staging = make_beside(folder / PLAN_FILE)
    try:
        for name in names:
            shutil.copyfile(source / name, staging / name)
        flush(staging)
        staging.rename(folder / NEXT)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    (folder / PLAN_FILE).unlink(missing_ok=True)
    _take_next(folder)
    return plan


def _take_next(folder: Path) -> None:
    """Move the next plan's files into a folder that has no plan; two processes may do it at once.

    plan.json comes last, when one or the other has moved all arrays.
    """
    found = folder / NEXT
    with suppress(FileNotFoundError):  # the other one has ended it
        refs = codec.parse((found / PLAN_FILE).read_bytes())["arrays"].values()
        arrays = {ref["file"] for ref in refs}
        for old in folder.glob("*.npy"):
            if old.name not in arrays:
                old.unlink(missing_ok=True)
        for path in [each for each in found.iterdir() if each.name != PLAN_FILE]:
            with suppress(FileNotFoundError):
                path.rename(folder / path.name)
        (found / PLAN_FILE).rename(folder / PLAN_FILE)
    shutil.rmtree(found, ignore_errors=True)
    codec.sync_folder(folder)


def _has_plan(folder: Path) -> bool:
    """Return whether a folder holds a plan, or the next one that an ended process had copied."""
    if not (folder / PLAN_FILE).is_file() and (folder / NEXT / PLAN_FILE).is_file():
        with suppress(OSError, ValueError, LookupError, TypeError):  # what is left is no plan
            _take_next(folder)
    return (folder / PLAN_FILE).is_file()


RUN_FOLDER = "run"
"""Folder, within a plan's, of the run that trains under it."""
LAUNCH_FOLDER = "launch"
"""Folder, within a plan's, of the script that is launched under it."""


def refuse_foreign_folder(folder: Path) -> None:
    """Raise PlanError where an output folder holds no plan but something else, or is trained in.

    A run whose plan's folder was exchanged would go on in the other plan's.
    """
    if folder.is_file():
        raise PlanError(f"{folder}: expected a folder to write the plan to, found a file")
    if folder.is_dir() and any(folder.iterdir()) and not _has_plan(folder):
        raise PlanError(
            f"{folder}: expected an empty folder or an earlier plan, found other files; "
            "choose another output folder"
        )
    for name in (RUN_FOLDER, LAUNCH_FOLDER):
        if not (folder / name).is_dir():
            continue
        with hold(folder / name) as is_ours:
            if not is_ours:
                raise PlanError(
                    f"{folder}: expected a plan that is not being trained, found a training that "
                    f"runs in its folder {name}; wait for its end or end it, or choose another "
                    "output folder"
                )


def refuse_unplaced(folder: Path) -> None:
    """Raise PlanError where no new plan can take an output folder's name."""
    if not is_named(folder):
        raise PlanError(f"{folder}: {UNNAMED}")
    refuse_foreign_folder(folder)


def load_plan(folder: Path, *, verify_arrays: bool = False) -> Plan:
    """Read and check plan.json; with `verify_arrays`, re-hash every array file too.

    Raises PlanError where it is missing, damaged, altered, or of another schema version.
    """
    path = Path(folder) / PLAN_FILE
    if not _has_plan(Path(folder)):
        raise PlanError(f"{folder}: expected a plan folder, found no {PLAN_FILE}")
    try:
        document = codec.parse(path.read_bytes())
    except (OSError, codec.CodecError) as error:
        raise PlanError(f"{path}: not readable as JSON ({error}); plan again") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, found {version!r}; plan again"
        )
    try:
        plan = codec.decode(Plan, document)
    except codec.CodecError as error:
        raise PlanError(f"{path}: {error}; plan again") from None
    for name, ref in plan.arrays.items():
        if Path(ref.file).name != ref.file or "\0" in ref.file:
            raise PlanError(
                f"{path}: expected array {name!r:.80} in a file beside it, found {ref.file!r:.80}"
            )
    content = {name: document[name] for name in document if name != "gpu_uuids"}
    if codec.content_hash({**content, "plan_id": ""})[:32] != plan.plan_id:
        raise PlanError(f"{path}: content does not match its plan_id; it was altered, plan again")
    if verify_arrays:
        for name in plan.arrays:
            _check_array_bytes(plan, Path(folder), name)
    return plan


def load_array(plan: Plan, folder: Path, name: str) -> NDArray[Any]:
    """Map one array of a plan into memory; raises PlanError where it is missing or damaged."""
    if name not in plan.arrays:
        raise PlanError(f"{folder}: the plan has no array {name!r}")
    ref = plan.arrays[name]
    path = Path(folder) / ref.file
    try:
        array = map_npy(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read ({error}); plan again") from None
    if str(array.dtype) != ref.dtype or list(array.shape) != ref.shape:
        raise PlanError(
            f"{path}: expected {ref.dtype}{ref.shape}, found {array.dtype}{list(array.shape)}"
        )
    return array


def _check_array_bytes(plan: Plan, folder: Path, name: str) -> None:
    ref = plan.arrays[name]
    path = folder / ref.file
    if not path.is_file():
        raise PlanError(f"{path}: the file is missing; plan again")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != ref.sha256:
        raise PlanError(f"{path}: expected sha256 {ref.sha256[:12]}, found {digest[:12]}")
