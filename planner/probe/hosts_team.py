"""One process per host in one group: the team that measures the links between hosts."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from planner.probe.collectives import distributed
from planner.probe.sizes import ProbeSizes
from runtime.comm.route import split_endpoint, use_route_to
from runtime.cores import batch_threads
from runtime.rollcall import Roll, call_roll

GROUP_SECONDS = 1800.0
"""Longest wait of one host for another while both probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """This host among those that are probed together."""

    node_rank: int
    num_hosts: int
    endpoint: str
    wait_seconds: float


class HostTeam:
    """The process group of one process per host; use as a context manager.

    Raises:
        WorkerFailed: a host did not come, or probes with other sizes.
    """

    def __init__(self, meeting: Meeting, sizes: ProbeSizes) -> None:
        self.host, self.size = meeting.node_rank, meeting.num_hosts
        self.sizes, self._meeting = sizes, meeting
        self._store: Any = None
        self.dist = distributed()

    def __enter__(self) -> "HostTeam":
        meeting = self._meeting
        use_route_to(split_endpoint(meeting.endpoint)[0])
        roll = Roll(
            endpoint=meeting.endpoint,
            host=meeting.node_rank,
            ranks_by_host=[1] * meeting.num_hosts,
            plan_id="probe",
            options=self.sizes.name,
            wait_seconds=meeting.wait_seconds,
        )
        self._store = call_roll(roll)
        with batch_threads():  # as the runtime makes its groups
            self.dist.init_process_group(
                "gloo",
                store=self.dist.PrefixStore("probe", self._store),
                rank=self.host,
                world_size=self.size,
                timeout=timedelta(seconds=GROUP_SECONDS),
            )
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.dist.barrier()  # host 0 serves the store until nobody needs it
        self.dist.destroy_process_group()

    def gather(self, value: Any) -> list[Any]:
        """Every host's value (picklable), in the order of the hosts."""
        values: list[Any] = [None] * self.size
        self.dist.all_gather_object(values, value)
        return values
