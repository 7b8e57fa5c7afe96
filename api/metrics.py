"""What /metrics shows, in a registry of the service's own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.storage.job_queue import JobQueue
from api.storage.tables import JobRow

JOB_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400)
APE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


class Metrics:
    """Counters of one service."""

    def __init__(self, queue: JobQueue) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "gnnplan_requests_total",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "gnnplan_request_seconds",
            "Seconds until the answer began.",
            ["method", "route"],
            registry=self.registry,
        )
        self.followers = Gauge(
            "gnnplan_event_followers", "Open streams of events.", registry=self.registry
        )
        self.cached_plans = Counter(
            "gnnplan_cached_plans_total",
            "Planning requests answered by a plan that was there.",
            registry=self.registry,
        )
        self.refusals = Counter(
            "gnnplan_refusals_total",
            "Requests refused, by status.",
            ["status"],
            registry=self.registry,
        )
        self.job_seconds = Histogram(
            "gnnplan_job_seconds",
            "Seconds of a job's last attempt.",
            ["kind", "state"],
            buckets=JOB_SECONDS,
            registry=self.registry,
        )
        self.step_ape = Histogram(
            "gnnplan_step_seconds_ape",
            "|predicted - measured| / measured seconds per step of finished runs.",
            buckets=APE,
            registry=self.registry,
        )
        self.registry.register(_JobCounts(queue))

    def job_ended(self, job: JobRow, state: str, seconds: float) -> None:
        """Count a job that has ended."""
        self.job_seconds.labels(job.kind, state).observe(seconds)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)


class _JobCounts(Collector):
    """Jobs by kind and state, counted when asked for."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    def describe(self) -> list[Metric]:
        """Named ahead, so that registering does not ask the database."""
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        """One sample per kind and state."""
        family = self._family()
        for (kind, state), count in sorted(self._queue.counts().items()):
            family.add_metric([kind, state], count)
        yield family

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily("gnnplan_jobs", "Jobs known.", labels=["kind", "state"])
