"""The Python client of the service.

    from api.client import Client

It is written in `planner.remote`, below this package, since `gnnplan --server` uses it too.
"""

from planner.remote import (
    Client,
    Event,
    Job,
    JobCancelledError,
    Run,
    ServiceProblemError,
    ServiceUnreachableError,
)

__all__ = [
    "Client",
    "Event",
    "Job",
    "JobCancelledError",
    "Run",
    "ServiceProblemError",
    "ServiceUnreachableError",
]
