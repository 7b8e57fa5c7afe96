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
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from gnnplan.api.storage.catalogue import Access, Catalogue
from gnnplan.api.storage.database import SQLITE_FILE, Database, sqlite_url
from gnnplan.api.storage.job_queue import ENDED, JobQueue
from gnnplan.api.storage.tables import AuditRow, JobRow, MachineRow, ProfileRow, WrittenRow
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
