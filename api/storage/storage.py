"""Everything the service keeps: rows in a database, files in the data folder.

DATA/service.sqlite3     tables, where no other database is named
DATA/plans/ID            plan folders
DATA/jobs/ID             request, log, events and outcome of a job
DATA/runs/ID             run folders of training jobs
DATA/artefacts/ab/ab...  documents named by the sha256 of their content

All of it is closed to other users, whatever the umask: folders 0700, files 0600.
"""

import contextlib
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError

from gnnplan.api.storage.database import SQLITE_FILE, Database, sqlite_url
from gnnplan.api.storage.job_queue import ENDED, JobQueue
from gnnplan.api.storage.tables import (
    AuditRow,
    JobRow,
    KeyRow,
    MachineRow,
    PlanRequestRow,
    PlanRow,
    ProfileRow,
    WrittenRow,
)
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError

FOLDER, FILE = 0o700, 0o600
WRITTEN_FILE = ".written"
"""File that is written to see whether the folder is writable."""
LOCK_FILE = "service.lock"
REMOVED = ".removed-"
"""Begin of the names of plan folders that are being removed."""
DAY_SECONDS = 86400.0
GRACE_SECONDS = 3600.0
"""Age in seconds below which files are kept: the row that names them may not be written yet."""


class PlanInUseError(Exception):
    """A plan cannot be removed; the text says why."""


class Catalogue:
    """Reads and writes rows that describe files; each method is one short transaction."""

    def __init__(self, database: Database, plans: Path) -> None:
        self._database = database
        self._plans = plans

    def plan_folder(self, plan_id: str) -> Path:
        """Return where the plan of an id is kept, whether it exists or not."""
        return self._plans / plan_id

    def plan(self, plan_id: str) -> PlanRow | None:
        """Return the plan of an id, or None."""
        return self._database.get(PlanRow, plan_id)

    def plan_of_request(self, key: str) -> str | None:
        """Return the id of the plan that answers a request, or None."""
        row = self._database.get(PlanRequestRow, key)
        if row is None or not self.plan_folder(row.plan_id).is_dir():
            return None
        return row.plan_id

    def runs_of(self, plan_id: str) -> list[JobRow]:
        """Return every training job under a plan."""
        with self._database.reading() as session:
            return list(session.scalars(select(JobRow).where(*_runs_of(plan_id))))

    def forget_plan(self, plan_id: str, runs: Collection[str]) -> None:
        """Remove a plan's row, the requests it answers, and the rows of `runs`: all that it has.

        Raises:
            PlanInUseError: an unfinished job uses it, or it has further runs.
        """
        with self._database.writing() as session:
            # Locked, so that no job begins to use it meanwhile.
            session.get(PlanRow, plan_id, with_for_update=True)
            about = JobRow.subject == plan_id
            unended = select(JobRow.id).where(about, JobRow.state.in_(("queued", "running")))
            if session.execute(unended.limit(1)).first() is not None:
                raise PlanInUseError("a job is about it; cancel that first")
            found = set(session.scalars(select(JobRow.id).where(*_runs_of(plan_id))))
            if not found <= set(runs):
                raise PlanInUseError(
                    f"it has runs ({len(found)}), which could not be read without it; remove it "
                    "with them by ?with_runs=true"
                )
            session.execute(delete(JobRow).where(*_runs_of(plan_id)))
            session.execute(delete(PlanRequestRow).where(PlanRequestRow.plan_id == plan_id))
            session.execute(delete(PlanRow).where(PlanRow.id == plan_id))

    def add_machine(self, row: MachineRow) -> None:
        """Add an uploaded machine, unless a machine of the same content is there."""
        try:
            with self._database.writing() as session:
                if session.get(MachineRow, row.id) is None:
                    session.add(row)
        except IntegrityError:
            return  # the same content was uploaded twice at once


def _runs_of(plan_id: str) -> tuple[Any, ...]:
    return JobRow.subject == plan_id, JobRow.kind == "train"


class Access:
    """Reads and writes API keys and the audit log; each method is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_key(self, row: KeyRow) -> None:
        """Add an API key."""
        with self._database.writing() as session:
            session.add(row)

    def key_of_hash(self, sha256: str) -> KeyRow | None:
        """Return the key of a hash, revoked or not, or None."""
        with self._database.reading() as session:
            return session.scalars(select(KeyRow).where(KeyRow.sha256 == sha256)).one_or_none()

    def list_keys(self) -> list[KeyRow]:
        """Return all keys, oldest first."""
        with self._database.reading() as session:
            return list(session.scalars(select(KeyRow).order_by(KeyRow.created_seconds)))

    def has_keys(self, *, revoked_too: bool = False) -> bool:
        """Return whether there is a valid key, or with `revoked_too` any key."""
        query = select(KeyRow.id).limit(1)
        if not revoked_too:
            query = query.where(KeyRow.revoked_seconds.is_(None))
        with self._database.reading() as session:
            return session.execute(query).first() is not None

    def revoke(self, key_id: str) -> bool:
        """Revoke a key; return False where there is no such key."""
        with self._database.writing() as session:
            found = session.execute(
                update(KeyRow)
                .where(KeyRow.id == key_id)
                .values(revoked_seconds=time.time())
                .returning(KeyRow.id)
            ).scalar_one_or_none()
        return found is not None

    def write_audit(self, row: AuditRow) -> None:
        """Add a line to the audit log."""
        with self._database.writing() as session:
            session.add(row)


class Artefacts:
    """A folder of files named by their content, each written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes) -> str:
        """Store bytes, unless they are stored already, and return their sha256."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.path(digest)
        if path.is_file():
            os.utime(path)  # a sweep that has just begun must see that it is wanted again
            return digest
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        codec.write_bytes_atomically(path, data, mode=0o600)
        return digest

    def get(self, digest: str) -> bytes | None:
        """Return the bytes of a sha256; None where they are missing or altered."""
        try:
            data = self.path(digest).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def path(self, digest: str) -> Path:
        """Return where the bytes of a sha256 are stored."""
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"expected a sha256 in hexadecimal, found {digest!r}")
        return self._folder / digest[:2] / digest

    def sweep(self, wanted: Iterable[str], *, older_than_seconds: float) -> int:
        """Remove unwanted files that are older than a Unix time; return their number."""
        keep, removed = set(wanted), 0
        for path in self._folder.glob("??/*"):
            if path.name not in keep and path.stat().st_mtime < older_than_seconds:
                path.unlink(missing_ok=True)
                removed += 1
        return removed


class Storage:
    """The database and the data folder of a service; without a URL the database is SQLite in it."""

    def __init__(self, data_dir: Path, url: str | None = None) -> None:
        try:
            _make_folders(data_dir, sqlite=url is None)
        except OSError as error:
            raise InputError(
                f"{data_dir}: expected a data folder that can be written, found: "
                f"{error.strerror}; choose another --data-dir"
            ) from None
        self.data_dir = data_dir
        self.database = Database(url or sqlite_url(data_dir))
        self.database.migrate()
        self.jobs = JobQueue(self.database)
        self.catalogue = Catalogue(self.database, data_dir / "plans")
        self.access = Access(self.database)
        self.artefacts = Artefacts(data_dir / "artefacts")

    def job_folder(self, job_id: str) -> Path:
        """Return the folder of a job's request, log, events and outcome."""
        return self.data_dir / "jobs" / job_id

    def run_folder(self, job_id: str) -> Path:
        """Return the folder of a training job's checkpoints and report."""
        return self.data_dir / "runs" / job_id

    def check_writable(self) -> None:
        """Write to the folder and the database; raise OSError or SQLAlchemyError where it fails."""
        codec.write_bytes_atomically(self.data_dir / WRITTEN_FILE, bytes(4096), mode=FILE)
        with contextlib.suppress(IntegrityError), self.database.writing() as session:
            # Another service that writes the same row at the same moment shows as much.
            session.merge(WrittenRow(id=1, time_seconds=time.time()))

    def remove_plan_files(self, plan_id: str) -> None:
        """Remove a plan's folder; whoever is killed meanwhile leaves no part of it under its name.

        What is left of it, and of earlier ones, goes at the next time, or with a sweep.
        """
        plans = self.data_dir / "plans"
        with contextlib.suppress(OSError):
            (plans / plan_id).rename(plans / f"{REMOVED}{uuid.uuid4().hex}")
        self._remove_halfway_plans()

    def remove_job_files(self, job_ids: Iterable[str]) -> None:
        """Remove the folders of jobs; their documents stay until the next sweep."""
        for job_id in job_ids:
            shutil.rmtree(self.job_folder(job_id), ignore_errors=True)
            shutil.rmtree(self.run_folder(job_id), ignore_errors=True)

    def sweep(self, retention_days: float) -> int:
        """Remove jobs that ended `retention_days` ago and their files; return their number.

        Artefacts, and folders of jobs and runs, that no row names go too: a service that is killed
        while it removes a job or a plan leaves such. Plans, machines and profiles stay.
        """
        now = time.time()
        before = now - retention_days * DAY_SECONDS
        with self.database.writing() as session:
            ended = (JobRow.state.in_(ENDED), JobRow.finished_seconds < before)
            ids = list(session.scalars(delete(JobRow).where(*ended).returning(JobRow.id)))
            session.execute(delete(AuditRow).where(AuditRow.time_seconds < before))
        self.remove_job_files(ids)
        old = min(before, now - GRACE_SECONDS)
        found = _names_before(self.data_dir / "jobs", old)
        found |= _names_before(self.data_dir / "runs", old)
        with self.database.reading() as session:
            known = set(session.scalars(select(JobRow.id)))
            wanted: set[str] = set()
            for column in (JobRow.result_sha256, MachineRow.sha256, ProfileRow.sha256):
                wanted |= {each for each in session.scalars(select(column)) if each}
        self.remove_job_files(found - known)
        self._remove_halfway_plans()
        self.artefacts.sweep(wanted, older_than_seconds=old)
        return len(ids)

    def _remove_halfway_plans(self) -> None:
        for each in (self.data_dir / "plans").glob(f"{REMOVED}*"):
            shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Close the database."""
        self.database.close()


def _names_before(folder: Path, time_seconds: float) -> set[str]:
    """Return the names in a folder that were last changed before a Unix time."""
    found = set[str]()
    for each in folder.iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile
            if each.stat().st_mtime < time_seconds:
                found.add(each.name)
    return found


def _make_folders(data_dir: Path, *, sqlite: bool) -> None:
    if _is_of_services(data_dir):
        make_private(data_dir)
    for name in ("plans", "jobs", "runs", "artefacts"):
        make_private(data_dir / name)
    if sqlite:
        open_private(data_dir / SQLITE_FILE).close()  # its journals are as open as it is


def _is_of_services(folder: Path) -> bool:
    """Return whether a folder is missing, empty or a service's data folder."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return True
    return any((folder / name).exists() for name in (SQLITE_FILE, LOCK_FILE))


def make_private(folder: Path) -> None:
    """Make a folder where it is missing, and close it to other users if we own it."""
    folder.mkdir(FOLDER, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a mounted volume may be another user's
        folder.chmod(FOLDER)


def open_private(path: Path) -> BinaryIO:
    """Open a file to append to, and close it to other users if we own it."""
    return os.fdopen(private_descriptor(path, os.O_WRONLY | os.O_APPEND), "ab")


def private_descriptor(path: Path, flags: int) -> int:
    """Open a file, made where it is missing, and close it to other users if we own it."""
    descriptor = os.open(path, flags | os.O_CREAT, FILE)
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, FILE)
    return descriptor
