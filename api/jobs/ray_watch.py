"""What runs on the Ray cluster for no job of ours any more is stopped there.

A run's process here ends before what it has started there: it is killed, its service is, or the run
is cancelled while it waits to be taken up again. Whichever it was, the run's row says that it has
ended, and that decides.
"""

import logging
import threading

from api.jobs.ray_jobs import JOB_KEY, ClusterUnreachableError, RayJobs
from api.storage.job_queue import ENDED
from api.storage.storage import Storage
from api.storage.tables import JobRow

LOOK_SECONDS = 30.0
LOG = logging.getLogger("gnnplan.ray")


class RayWatch:
    """A thread that looks every half minute, and when a run has ended.

    Args:
        storage: where the jobs are.
        address: of the cluster's dashboard.
    """

    def __init__(self, storage: Storage, address: str) -> None:
        self._storage = storage
        self._cluster = RayJobs(address)
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ray-watch", daemon=True)
        self._away = False

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def job_ended(self, job: JobRow, state: str, seconds: float) -> None:
        """Look now, if the job may have left something on the cluster."""
        del state, seconds
        if job.kind == "train":
            self._wake.set()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._cluster.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                stop_left_over(self._storage, self._cluster)
                self._away = False
            except ClusterUnreachableError as error:
                if not self._away:
                    LOG.warning(str(error))
                self._away = True
            except Exception:
                LOG.exception("what is left on the cluster could not be looked at")
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()


def stop_left_over(storage: Storage, cluster: RayJobs) -> list[str]:
    """Stop what runs for jobs of this database that have ended; returns the submissions.

    Raises:
        ClusterUnreachableError: the cluster does not answer.
    """
    stopped: list[str] = []
    for each in cluster.list():
        job_id = each.metadata.get(JOB_KEY)
        if each.ended or job_id is None:
            continue
        row = storage.jobs.get(job_id)  # None: of another service, or its database is new
        if row is not None and row.state in ENDED:
            cluster.stop(each.submission_id)
            LOG.info("stopped on the cluster", extra={"job_id": job_id, "state": row.state})
            stopped.append(each.submission_id)
    return stopped
