"""Before torchrun's rendezvous, the hosts of a job call the roll: who is there, and with what.

Host 0 serves a small store at the endpoint; every host writes down its plan, its options and its
number of ranks, and waits for all others. So a host that never comes is named, and two hosts that
were started with different plans or options stop with one line instead of hanging in a collective.

torchrun orders hosts by their addresses; a plan orders them by their numbers. `place_ranks` gives
the ranks to the hosts as the plan does, also after a restart.
"""

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from runtime import codec
from runtime.comm.route import split_endpoint
from runtime.errors import WorkerFailed

VARIABLE = "GNNPLAN_ROLL"
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """What one host of a job knows of it."""

    endpoint: str
    """HOST:PORT, an address of host 0."""
    host: int
    """Number of this host, from 0."""
    ranks_by_host: list[int]
    plan_id: str
    options: str
    """What every host must have been started with alike, as text."""
    wait_seconds: float
    """Longest wait for the other hosts."""


def read_roll() -> Roll | None:
    """The roll that `launch` left in the environment; None for a job on one host."""
    text = os.environ.get(VARIABLE, "")
    return codec.decode(Roll, json.loads(text)) if text else None


def call_roll(roll: Roll) -> Any:
    """Wait until every host is here with the same plan and options.

    Returns:
        The store; on host 0 it must be kept for as long as the job runs.

    Raises:
        WorkerFailed: a host did not come, or is not alike; the text names it.
    """
    end = time.monotonic() + roll.wait_seconds
    store = _open_store(roll)
    hosts = range(len(roll.ranks_by_host))
    try:
        if store.add(_key("count", roll.host), 1) > 1:
            raise WorkerFailed(
                f"expected one host with --node-rank {roll.host} at {roll.endpoint}, found another"
            )
        store.set(_key("host", roll.host), codec.dumps(_entry(roll)))
        while missing := [host for host in hosts if not store.check([_key("host", host)])]:
            if time.monotonic() > end:
                raise WorkerFailed(_absent(roll, missing))
            time.sleep(POLL_SECONDS)
        entries = [json.loads(store.get(_key("host", host))) for host in hosts]
        store.set(_key("read", roll.host), "")
        # Host 0 serves the store: it stays until everybody has read, whatever it has found itself.
        while roll.host == 0 and not store.check([_key("read", host) for host in hosts]):
            if time.monotonic() > end + GRACE_SECONDS:
                break
            time.sleep(POLL_SECONDS)
    except RuntimeError as error:  # torch's errors of a lost connection
        raise WorkerFailed(
            f"host 0 at {roll.endpoint} left before all hosts were there ({_line(error)})"
        ) from None
    for host, entry in enumerate(entries):
        _check_alike(roll, host, entry)
    return store


def _open_store(roll: Roll) -> Any:
    import torch.distributed

    stores: Any = torch.distributed  # its stubs leave the stores out
    name, port = split_endpoint(roll.endpoint)
    try:
        # Several users of one process share the server: torchrun's rendezvous is the next.
        return stores.TCPStore(
            name,
            port,
            is_master=roll.host == 0,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=roll.wait_seconds),
        )
    except RuntimeError as error:
        if roll.host == 0:
            raise WorkerFailed(
                f"{roll.endpoint}: expected a free port on this host, host 0 ({_line(error)})"
            ) from None
        raise WorkerFailed(
            f"{_absent(roll, [0])}; start the same command there with --node-rank 0"
        ) from None


def _entry(roll: Roll) -> dict[str, str]:
    return {"plan": roll.plan_id, "options": roll.options}


def _check_alike(roll: Roll, host: int, found: dict[str, str]) -> None:
    for name, here in _entry(roll).items():
        if found[name] != here:
            raise WorkerFailed(
                f"expected the same {name} on every host, found on host {host}: {found[name]}; "
                f"on host {roll.host}: {here}"
            )


def _absent(roll: Roll, missing: list[int]) -> str:
    names = "hosts " if len(missing) > 1 else "host "
    names += ", ".join(str(host) for host in missing)
    return (
        f"expected {len(roll.ranks_by_host)} hosts at {roll.endpoint}, {names} did not come within "
        f"{roll.wait_seconds:g} s"
    )


def _key(what: str, host: int) -> str:
    return f"gnnplan/{what}/{host}"


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]


def place_ranks(roll: Roll) -> None:
    """Make torchrun's agent of this process give its ranks the plan's numbers."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, Worker

    first, size = sum(roll.ranks_by_host[: roll.host]), sum(roll.ranks_by_host)

    def assign(agent: Any, store: Any, group_rank: int, num_groups: int, spec: Any) -> list[Any]:
        del agent, store, group_rank, num_groups  # the order of arrival and of addresses
        return [
            Worker(
                local_rank=place,
                global_rank=first + place,
                role_rank=first + place,
                world_size=size,
                role_world_size=size,
            )
            for place in range(spec.local_world_size)
        ]

    agents: Any = SimpleElasticAgent
    agents._assign_worker_ranks = assign
