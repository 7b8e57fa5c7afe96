"""One host's part in a job on several: its ranks, and how its torchrun finds the others.

Every host runs the same command with a `--node-rank` of its own. The plan's folder may be shared or
copied: each host writes logs and failures to its own folder, and host 0, which has rank 0, alone
writes events, checkpoints and the plan's report.

Before torchrun's rendezvous the hosts call the roll. Host 0 serves a small store at the endpoint,
where every host writes its plan, options and number of ranks and waits for the others. A host that
never comes is so named, and hosts that differ stop with one line instead of hanging in a
collective.

torchrun orders hosts by their addresses, and each counts restarts by itself. `place_ranks` numbers
the ranks as the plan does, also after a restart, and makes all hosts count alike.
"""

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gnnplan.runtime import codec
from gnnplan.runtime.comm.route import address_towards, split_endpoint
from gnnplan.runtime.errors import InputError, WorkerFailed
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.plan.schema import Device, Plan

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
    """Text of the options that all hosts must share."""
    wait_seconds: float
    """Longest wait for the other hosts."""


def read_roll() -> Roll | None:
    """Read the roll that `launch` left in the environment; None for a job on one host."""
    text = os.environ.get(VARIABLE, "")
    return codec.decode(Roll, json.loads(text)) if text else None


def call_roll(roll: Roll) -> Any:
    """Wait until every host is here with the same plan and options.

    Host 0 must keep the returned store for as long as the job runs. WorkerFailed names a host that
    did not come, or differs.
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
        # Host 0 serves the store, so it stays until all hosts have read, whatever it found.
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
    """Make torchrun's agent of this process number ranks as the plan does, and agree on restarts.

    By the number of restarts ranks look for each other, and go on from a checkpoint. An agent by
    itself counts none that another host's rank was the reason for.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, Worker

    first, size = sum(roll.ranks_by_host[: roll.host]), sum(roll.ranks_by_host)

    def assign(agent: Any, store: Any, group_rank: int, num_groups: int, spec: Any) -> list[Any]:
        del group_rank, num_groups  # order of arrival and of addresses: not the plan's
        restarts = agree_max(store, roll, spec.max_restarts - agent._remaining_restarts)
        agent._remaining_restarts = spec.max_restarts - restarts
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


def agree_max(store: Any, roll: Roll, value: int) -> int:
    """Return the largest of all hosts' values; every host calls it, once with each store."""
    store.set(_key("value", roll.host), str(value))
    hosts = range(len(roll.ranks_by_host))
    return max(int(store.get(_key("value", host))) for host in hosts)


WAIT_SECONDS = 300.0
_OF_ONE_HOST = ("plan_folder", "run_folder", "pin")
"""Fields of the run's configuration that may differ between hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This host among the hosts of a job."""

    node_rank: int = 0
    """Number of this host in the plan's order of hosts."""
    endpoint: str = ""
    """HOST:PORT on host 0, the same text on every host; empty for a job on one host."""
    wait_seconds: float = WAIT_SECONDS
    """Longest wait for the other hosts."""


def ranks_by_host(plan: Plan) -> list[list[Device]]:
    """Return the plan's devices by host, in the order of the hosts' numbers.

    torchrun cannot number ranks of a host that do not follow one another: InputError.
    """
    devices = plan.strategy.devices
    hosts = sorted({device.host for device in devices})
    found = [[device for device in devices if device.host == host] for host in hosts]
    if [device for each in found for device in each] != list(devices):
        raise InputError(
            "expected the plan's ranks in the order of their hosts, found "
            f"{[device.host for device in devices]}; plan again"
        )
    return found


def own_devices(plan: Plan, place: Place) -> list[Device]:
    """Return the devices that this host starts."""
    hosts = ranks_by_host(plan)
    if not 0 <= place.node_rank < len(hosts):
        raise InputError(
            f"expected a --node-rank from 0 to {len(hosts) - 1} (the plan's hosts), "
            f"found {place.node_rank}"
        )
    if len(hosts) > 1 and not place.endpoint:
        raise InputError(
            f"the plan spans {len(hosts)} hosts; run on each of them the same command with "
            f"--node-rank 0 to {len(hosts) - 1} and --rdzv-endpoint HOST:PORT, an address and a "
            "free port of host 0"
        )
    return hosts[place.node_rank]


def run_folder_of(run_folder: Path, place: Place) -> Path:
    """Return the folder of this host's logs; host 0 has the job's own, perhaps a shared one."""
    return run_folder if place.node_rank == 0 else run_folder / f"host{place.node_rank}"


def torchrun_arguments(plan: Plan, place: Place) -> list[str]:
    """Return the arguments by which torchrun here starts its ranks and meets the other hosts."""
    hosts = ranks_by_host(plan)
    processes = f"--nproc-per-node={len(hosts[place.node_rank])}"
    if len(hosts) == 1:
        # Port 0 lets the rendezvous take a free port, so that two jobs on a host never collide.
        meet = ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        return ["--nnodes=1", processes, "--rdzv-backend=c10d", *meet]
    name, _ = split_endpoint(place.endpoint)
    address = address_towards(name)
    if address.startswith("127.") or address == "::1":
        raise InputError(
            f"{place.endpoint}: expected an address that the other hosts can reach, found this "
            "machine's loopback"
        )
    serves = "true" if place.node_rank == 0 else "false"
    return [
        *(f"--nnodes={len(hosts)}", processes, f"--local-addr={address}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={place.endpoint}", f"--rdzv-id={plan.plan_id}"),
        f"--rdzv-conf=is_host={serves},join_timeout={max(1, round(place.wait_seconds))}",
    ]


def roll_environment(plan: Plan, place: Place, config: RunConfig) -> dict[str, str]:
    """Return the variables that bring the roll to this host's torchrun; empty on one host."""
    hosts = ranks_by_host(plan)
    if len(hosts) == 1:
        return {VARIABLE: ""}
    options = json.loads(codec.dumps(config))
    for name in _OF_ONE_HOST:
        del options[name]
    roll = Roll(
        endpoint=place.endpoint,
        host=place.node_rank,
        ranks_by_host=[len(each) for each in hosts],
        plan_id=plan.plan_id,
        options=json.dumps(options, sort_keys=True),
        wait_seconds=place.wait_seconds,
    )
    return {VARIABLE: codec.dumps(roll)}
