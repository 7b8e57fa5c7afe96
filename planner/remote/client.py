"""The client: one service, and a group of methods for each kind of its resources."""

import os
from types import TracebackType
from typing import Any

import httpx2

from planner.remote.connection import TIMEOUT, Connection
from planner.remote.errors import KEY_VARIABLE
from planner.remote.groups import Graphs, Machines, Profiles, Runs
from planner.remote.jobs import Jobs
from planner.remote.plans import Plans


class Client:
    """A gnnplan service.

    >>> with Client("http://127.0.0.1:8000") as client:  # doctest: +SKIP
    ...     plan = client.plans.make("graph", PlanSettings(devices=2))
    ...     print(client.plans.explain(plan.plan_id).summary)
    ...     for event in client.runs.follow(client.runs.start(plan.plan_id).id):
    ...         print(event.name, event.data)

    Every method raises `ServiceProblemError` where the service refuses (its `problem` is the RFC
    9457 document; InputError and PlanDoesNotFit are among its bases where they fit) and
    `ServiceUnreachableError` where no service answers.

    Args:
        url: of the service, such as http://127.0.0.1:8000.
        key: API key; None: that of the environment's GNNPLAN_API_KEY, if any.
        timeout: of each request; streams of events are open as long as their job.
        http: the HTTP client to use instead of one of its own.

    Raises:
        SettingsError: no http or https address.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout: httpx2.Timeout = TIMEOUT,
        http: httpx2.Client | None = None,
    ) -> None:
        key = key if key is not None else os.environ.get(KEY_VARIABLE)
        self._connection = Connection(url, key=key or None, timeout=timeout, http=http)
        self.jobs = Jobs(self._connection)
        self.graphs = Graphs(self._connection)
        self.machines = Machines(self._connection)
        self.profiles = Profiles(self._connection, self.jobs)
        self.plans = Plans(self._connection, self.jobs)
        self.runs = Runs(self._connection, self.jobs)

    def health(self) -> dict[str, Any]:
        """Status and version of the service."""
        return self._connection.get("/healthz")

    def close(self) -> None:
        """Close the kept connections."""
        self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
