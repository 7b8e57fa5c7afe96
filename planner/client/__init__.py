"""A client of the service: requests over HTTP, answers in the planner's own types.

    Client -> groups (graphs, machines, profiles, plans, runs, jobs) -> Connection -> httpx2

It stands below `api`, which may import the planner but not the other way, so that the commands of
`gnnplan --server` and Python programs use one client; `api.client` names it for the latter.
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
