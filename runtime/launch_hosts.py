"""One host's part in a job on several: its ranks, and how its torchrun finds the others.

Every host runs the same command with a `--node-rank` of its own. The plan's folder may be shared or
a copy: each host writes its logs and failures to a folder of its own, and only host 0, which has
rank 0, writes events, checkpoints and the plan's report.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from runtime import codec
from runtime.comm.route import address_towards, split_endpoint
from runtime.config import RunConfig
from runtime.errors import InputError
from runtime.plan import Device, Plan
from runtime.rollcall import VARIABLE, Roll

WAIT_SECONDS = 300.0
"""Longest wait for the other hosts."""
_OF_ONE_HOST = ("plan_folder", "run_folder", "pin")
"""Fields of the run's configuration that hosts may differ in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This host among the hosts of a job."""

    node_rank: int = 0
    """Number of this host in the plan's order of hosts."""
    endpoint: str = ""
    """HOST:PORT on host 0, the same text on every host; empty for a job on one host."""
    wait_seconds: float = WAIT_SECONDS


def ranks_by_host(plan: Plan) -> list[list[Device]]:
    """The plan's devices by host, hosts in the order of their numbers.

    Raises:
        InputError: the ranks of a host do not follow one another, so that torchrun cannot number
            them.
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
    """The devices that this host starts.

    Raises:
        InputError: the host's number or the endpoint does not fit the plan.
    """
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
    """Folder of this host's logs; host 0 has the job's own, which the others may share."""
    return run_folder if place.node_rank == 0 else run_folder / f"host{place.node_rank}"


def torchrun_arguments(plan: Plan, place: Place) -> list[str]:
    """How torchrun on this host starts its ranks and meets the other hosts.

    Raises:
        InputError: the endpoint is none, cannot be reached, or is this machine's loopback.
    """
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
    """What this host's torchrun tells the others before anything starts; nothing on one host."""
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
