"""A client of the service: HTTP requests, with answers in the planner's own types.

    Client -> groups (graphs, machines, profiles, plans, runs, jobs) -> Connection -> httpx2

`gnnplan --server` and Python programs both use it, so it is part of the planner, below `api`.
"""

from gnnplan.planner.client.client import Client
from gnnplan.planner.client.connection import (
    JobCancelledError,
    ServiceProblemError,
    ServiceUnreachableError,
)
from gnnplan.planner.client.resources import Event, Job, Run

__all__ = [
    "Client",
    "Event",
    "Job",
    "JobCancelledError",
    "Run",
    "ServiceProblemError",
    "ServiceUnreachableError",
]
