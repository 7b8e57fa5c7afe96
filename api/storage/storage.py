"""Everything the service keeps, opened together: rows in a database, files in the data folder.

DATA/service.sqlite3     tables, where no other database is named
DATA/plans/ID            plan folders
DATA/jobs/ID             request, log, events and outcome of a job
DATA/runs/ID             run folders of training jobs
DATA/artefacts/ab/ab...  documents named by their content

All of it is for its owner alone, whatever the umask: folders 0700, files 0600.
"""

import contextlib
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from gnnplan.api.storage.access import Access
from gnnplan.api.storage.artefacts import FILE, Artefacts, make_private, open_private
from gnnplan.api.storage.catalogue import Catalogue
from gnnplan.api.storage.database import SQLITE_FILE, Database, sqlite_url
from gnnplan.api.storage.job_queue import ENDED, JobQueue
from gnnplan.api.storage.tables import AuditRow, JobRow, MachineRow, ProfileRow, WrittenRow
from gnnplan.runtime import codec

WRITTEN_FILE = ".written"
"""Written again and again, to see whether anything can be."""
LOCK_FILE = "service.lock"
DAY_SECONDS = 86400.0
GRACE_SECONDS = 3600.0
"""Files younger than this are never swept: the row that will name them may not be written yet."""


class Storage:
    """The service's state.

    Args:
        data_dir: folder of its files.
        url: database; None: SQLite in the folder.

    Raises:
        InputError: the database is none we know, or does not answer.
    """

    def __init__(self, data_dir: Path, url: str | None = None) -> None:
        if _is_of_services(data_dir):
            make_private(data_dir)
        for name in ("plans", "jobs", "runs", "artefacts"):
            make_private(data_dir / name)
        if url is None:
            open_private(data_dir / SQLITE_FILE).close()  # its journals are as open as it is
        self.data_dir = data_dir
        self.database = Database(url or sqlite_url(data_dir))
        self.database.migrate()
        self.jobs = JobQueue(self.database)
        self.catalogue = Catalogue(self.database, data_dir / "plans")
        self.access = Access(self.database)
        self.artefacts = Artefacts(data_dir / "artefacts")

    def job_folder(self, job_id: str) -> Path:
        """Where a job's request, log, events and outcome lie."""
        return self.data_dir / "jobs" / job_id

    def run_folder(self, job_id: str) -> Path:
        """Where a training job's checkpoints and report lie."""
        return self.data_dir / "runs" / job_id

    def check_writable(self) -> None:
        """Write to the folder and to the database.

        Raises:
            OSError: the disk is full or the folder cannot be written.
            SQLAlchemyError: the database cannot be written, or does not answer.
        """
        codec.write_bytes_atomically(self.data_dir / WRITTEN_FILE, bytes(4096), mode=FILE)
        with contextlib.suppress(IntegrityError), self.database.writing() as session:
            # Another service that writes the same row at the same moment shows as much.
            session.merge(WrittenRow(id=1, time_seconds=time.time()))

    def remove_job_files(self, job_ids: Iterable[str]) -> None:
        """Remove what jobs have left in their folders; documents stay until the next sweep."""
        for job_id in job_ids:
            shutil.rmtree(self.job_folder(job_id), ignore_errors=True)
            shutil.rmtree(self.run_folder(job_id), ignore_errors=True)

    def sweep(self, retention_days: float) -> int:
        """Remove jobs that ended longer ago, their files, and artefacts that nobody names.

        Plans, machines and profiles stay. Returns the number of jobs removed.
        """
        now = time.time()
        before = now - retention_days * DAY_SECONDS
        with self.database.writing() as session:
            ended = (JobRow.state.in_(ENDED), JobRow.finished_seconds < before)
            ids = list(session.scalars(delete(JobRow).where(*ended).returning(JobRow.id)))
            session.execute(delete(AuditRow).where(AuditRow.time_seconds < before))
        self.remove_job_files(ids)
        with self.database.reading() as session:
            wanted: set[str] = set()
            for column in (JobRow.result_sha256, MachineRow.sha256, ProfileRow.sha256):
                wanted |= {each for each in session.scalars(select(column)) if each}
        self.artefacts.sweep(wanted, older_than_seconds=min(before, now - GRACE_SECONDS))
        return len(ids)

    def close(self) -> None:
        """Release the database."""
        self.database.close()


def _is_of_services(folder: Path) -> bool:
    """Whether a folder holds nothing but a service's data: one is here, or it is new."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return True
    return any((folder / name).exists() for name in (SQLITE_FILE, LOCK_FILE))
