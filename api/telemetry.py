"""What the service reports about itself: log lines as JSON, and metrics for Prometheus."""

import contextvars
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gnnplan.api.storage.job_queue import JobQueue
from gnnplan.api.storage.tables import JobRow

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON, with its `extra` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        extra = {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        line |= {k: v for k, v in extra.items() if not k.startswith("_") and k != "color_message"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_json() -> None:
    """Log the service and uvicorn to stderr as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("gnnplan", "uvicorn", "uvicorn.error", "alembic"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.propagate = name == "uvicorn.error"
        logger.setLevel(logging.INFO if name != "alembic" else logging.WARNING)


JOB_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400)
APE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


class Metrics:
    """Counters of one service."""

    def __init__(self, queue: JobQueue) -> None:
        self.registry = here = CollectorRegistry()
        route, job = ["method", "route"], ["kind", "state"]
        self.requests = Counter(
            "gnnplan_requests_total", "Requests answered.", [*route, "status"], registry=here
        )
        self.request_seconds = Histogram(
            "gnnplan_request_seconds", "Seconds until the answer began.", route, registry=here
        )
        self.followers = Gauge("gnnplan_event_followers", "Open streams of events.", registry=here)
        self.cached_plans = Counter(
            "gnnplan_cached_plans_total",
            "Planning requests answered by a plan that was there.",
            registry=here,
        )
        self.refusals = Counter(
            "gnnplan_refusals_total", "Requests refused, by status.", ["status"], registry=here
        )
        self.job_seconds = Histogram(
            "gnnplan_job_seconds",
            "Seconds of a job's last attempt.",
            job,
            buckets=JOB_SECONDS,
            registry=here,
        )
        self.step_ape = Histogram(
            "gnnplan_step_seconds_ape",
            "|predicted - measured| / measured seconds per step of finished runs.",
            buckets=APE,
            registry=here,
        )
        here.register(_JobCounts(queue))

    def job_ended(self, job: JobRow, state: str, seconds: float) -> None:
        """Count an ended job."""
        self.job_seconds.labels(job.kind, state).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self.registry)


class _JobCounts(Collector):
    """Numbers of jobs by kind and state, counted when they are read."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    def describe(self) -> list[Metric]:
        """Return the name alone, so that registering reads no database."""
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        """Return one sample per kind and state."""
        family = self._family()
        for (kind, state), count in sorted(self._queue.counts().items()):
            family.add_metric([kind, state], count)
        yield family

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily("gnnplan_jobs", "Jobs known.", labels=["kind", "state"])
