"""The Python client of the service.

    from gnnplan.api.client import Client

It is written in `planner.client`, below this package, since `gnnplan --server` uses it too.
"""

from gnnplan.planner.client import (
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
