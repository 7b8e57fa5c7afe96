"""Who is who: under torchrun on hosts, in groups that users made."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnnplan.runtime.comm.mesh import backend_of, check_place
from gnnplan.runtime.comm.route import LOOPBACK, address_towards, interface_of, use_route_to
from gnnplan.runtime.errors import InputError, PlanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Device
from tests.hosts import INTERFACE, Hosts, needs_root
from tests.support.plans import make_plan

RANK = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from gnnplan.runtime.comm.mesh import open_mesh
from gnnplan.runtime.plan import load_plan
from gnnplan.runtime.stages import Stage

plan, out, own_group = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "own"
if own_group:
    dist.init_process_group("gloo")
mesh = open_mesh(load_plan(plan), timeout_seconds=120)
twin = mesh.comm.duplicate()
for _ in range(2):
    twin.all_reduce_sum(torch.zeros(2**18))
def wire():
    return int(Path("/proc/self/net/dev").read_text().split("eth0:")[1].split()[8])
mesh.comm.barrier()
before = wire()
for number in (10**6, 0, 10**6):
    rows = torch.zeros(number * (mesh.rank == 0), 1)
    counts = [0] * mesh.size
    counts[-1] = rows.shape[0]
    received = [number * (mesh.rank == mesh.size - 1)] + [0] * (mesh.size - 1)
    twin.all_to_all_rows(rows, counts, received)
mesh.comm.barrier()
sent = twin.traffic[Stage.EXCHANGE_ROWS].sent_bytes
out.joinpath(f"{mesh.rank}.json").write_text(json.dumps({
    "size": mesh.size, "host": mesh.host, "owns": mesh.owns_group,
    "reduced": twin.traffic[Stage.ALL_REDUCE].sent_bytes, "sent": sent, "wire": wire() - before,
    "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
}))
mesh.comm.barrier()
mesh.close()
assert dist.is_initialized() == own_group
"""


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_ranks_meet_under_torchrun_on_two_hosts(
    small_graph: Graph, tmp_path: Path, backend: str
) -> None:
    """Ranks 0 and 1, 2 on two hosts; with c10d, ranks join a group that the script made before."""
    make_plan(small_graph, tmp_path / "plan", ranks=3, hosts=[0, 1, 1])
    (tmp_path / "rank.py").write_text(RANK)
    with Hosts(["a", "b"], rate_bits_per_second=1e9) as hosts:
        started = []
        for node_rank, name in enumerate(hosts.names):
            meet = {
                "static": [
                    f"--node-rank={node_rank}",
                    f"--master-addr={hosts.address('a')}",
                    "--master-port=29400",
                ],
                "c10d": [
                    f"--rdzv-endpoint={hosts.address('a')}:29400",
                    f"--rdzv-conf=is_host={node_rank == 0}",
                ],
            }[backend]
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *(f"--rdzv-backend={backend}", f"--nproc-per-node={node_rank + 1}", *meet),
                *(f"--local-addr={hosts.address(name)}", str(tmp_path / "rank.py")),
                *(str(tmp_path / "plan"), str(tmp_path)),
                "own" if backend == "c10d" else "plan",
            ]
            environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
            if backend == "c10d":  # who makes a group chooses its card
                environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            started.append(
                hosts.start(name, command, env=environment, stderr=subprocess.PIPE, text=True)
            )
        for process in started:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    found: list[dict[str, Any]] = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)
    ]
    assert [each["host"] for each in found] == [0, 1, 1]
    assert {each["interface"] for each in found} == {INTERFACE}
    assert {each["owns"] for each in found} == {backend == "static"}
    assert {each["reduced"] for each in found} == {2 * 4 * 2**18}
    # What the meter counts crosses the card, with the headers of its frames and little beside.
    assert [each["sent"] for each in found] == [2 * 4 * 10**6, 0, 0]
    assert 1.0 < found[0]["wire"] / found[0]["sent"] < 1.1


def test_ranks_on_other_hosts_than_planned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device(rank=rank, kind="cpu", host=host) for rank, host in enumerate((0, 1, 1))]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    check_place(devices, 2)
    for place, size in (("1", "2"), ("2", "3")):  # as planned; all on one machine
        monkeypatch.setenv("LOCAL_RANK", place)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
        check_place(devices, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(PlanError, match="rank 2 is planned as place 1 of 2 on host 1, torchrun"):
        check_place(devices, 2)


def test_the_interface_is_the_one_that_leads_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("localhost") in ("127.0.0.1", "::1")
    assert interface_of("127.0.0.1") == LOOPBACK
    assert interface_of("192.0.2.1") is None  # documentation addresses belong to nobody
    with pytest.raises(InputError, match="expected a host that can be reached from here"):
        address_towards("no-such-host.invalid")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert use_route_to("127.0.0.1") == LOOPBACK
    import os

    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("kinds", "places", "backend"),
    [
        (["cpu", "cpu"], [(0, 0), (0, 1)], "gloo"),
        (["cuda", "cuda"], [(0, 0), (0, 1)], "nccl"),
        (["cuda", "cuda"], [(0, 0), (1, 0)], "nccl"),
        (["cuda", "cuda"], [(0, 0), (0, 0)], "gloo"),  # nccl refuses two ranks on one GPU
        (["cuda", "cpu"], [(0, 0), (0, 1)], "gloo"),
    ],
)
def test_the_backend_follows_from_the_plans_devices(
    kinds: list[Any], places: list[tuple[int, int]], backend: str
) -> None:
    devices = [
        Device(rank=rank, kind=kind, host=host, index=index)
        for rank, (kind, (host, index)) in enumerate(zip(kinds, places, strict=True))
    ]
    assert backend_of(devices) == backend
