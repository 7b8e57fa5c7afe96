"""Jobs on several hosts: network namespaces with shaped links, one launcher in each."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from gnnplan.runtime import worker
from gnnplan.runtime.comm.route import split_endpoint
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.launch.hosts import (
    Place,
    Roll,
    own_devices,
    place_ranks,
    torchrun_arguments,
)
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.report import RunReport, load_report
from tests.hosts import Hosts, needs_root
from tests.support.plans import make_plan

SETTINGS: dict[str, Any] = {
    "batch_size": 128, "fanouts": [5, 3], "dialect": "every_hop", "seed": 3, "learning_rate": 0.01,
}  # fmt: skip
LAUNCH = """
import json, sys
from pathlib import Path
from gnnplan.runtime import launch
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.launch.hosts import Place

folder, node_rank, endpoint, options = sys.argv[1:]
options = json.loads(options)
place = Place(node_rank=int(node_rank), endpoint=endpoint, wait_seconds=options.pop("wait", 60.0))
try:
    launch.train(Path(folder), place=place, pin=False, oversubscribe=True, **options)
except GnnplanError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def start(
    hosts: Hosts, node_rank: int, folder: Path, *, fault: str = "", **options: Any
) -> "subprocess.Popen[str]":
    """Launch host `node_rank` of the job, with a fault: the hosts in the order of their names."""
    names = sorted(hosts.names)
    arguments = [str(node_rank), f"{hosts.address(names[0])}:29400", json.dumps(options)]
    return hosts.start(
        names[node_rank], [sys.executable, "-c", LAUNCH, str(folder), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"GNNPLAN_TEST_FAULT": fault} if fault else {},
    )  # fmt: skip


def finish(launchers: list["subprocess.Popen[str]"]) -> list[tuple[int, str]]:
    """Exit code and last line of every launcher."""
    out = []
    for launcher in launchers:
        _, errors = launcher.communicate(timeout=300)
        out.append((launcher.returncode, (errors.strip().splitlines() or [""])[-1]))
    return out


def one_process(graph: Graph, folder: Path) -> RunReport:
    make_plan(graph, folder / "one", **SETTINGS)
    (folder / "run").mkdir()
    return worker.run(
        RunConfig(
            plan_folder=str(folder / "one"),
            run_folder=str(folder / "run"),
            epochs=2,
            eval_every=0,
            pin=False,
        )
    )


@needs_root
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "copied"),
    [
        ([0, 1, 1], True),
        pytest.param([0, 1], False, marks=pytest.mark.slow),
        pytest.param([0, 0, 1, 1], False, marks=pytest.mark.slow),
    ],
)
def test_hosts_on_a_slow_link_and_one_process_have_the_same_losses(
    small_graph: Graph, tmp_path: Path, ranks: list[int], copied: bool
) -> None:
    """Host 0 has the larger address: the plan's order of hosts counts, not torchrun's."""
    plan = tmp_path / "plan"
    make_plan(
        small_graph, plan, ranks=len(ranks), hosts=ranks, peers=True, own_rows=200, **SETTINGS
    )
    folders = [plan, plan]
    if copied:
        folders[1] = tmp_path / "copy"
        shutil.copytree(plan, folders[1])
    with Hosts(["b", "a"], rate_bits_per_second=1e9) as hosts:
        launchers = [start(hosts, i, folders[i], epochs=2, eval_every=0) for i in (1, 0)]
        assert finish(launchers) == [(0, ""), (0, "")]
    report = load_report(plan)
    single = one_process(small_graph, tmp_path)
    assert len(report.losses) == len(single.losses) == 6
    np.testing.assert_allclose(report.losses, single.losses, rtol=1e-4)
    assert [each.rank for each in report.ranks] == list(range(len(ranks)))
    assert all(each.rows_by_source["peer"] > 0 for each in report.ranks)
    assert (folders[1] / "run" / "host1" / "report.json").is_file()
    if copied:
        assert not (folders[1] / "report.json").exists()


@needs_root
@pytest.mark.distributed
@pytest.mark.slow
def test_a_host_that_never_comes_is_named_after_the_wait(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=3, hosts=[0, 1, 2], **SETTINGS)
    with Hosts(["a", "b", "c"]) as hosts:
        endpoint = f"{hosts.address('a')}:29400"
        launchers = [start(hosts, i, tmp_path / "plan", wait=15.0) for i in (0, 2)]
        for code, line in finish(launchers):
            assert code == 1
            assert line.startswith("WorkerFailed: ")
            assert f"expected 3 hosts at {endpoint}, host 1 did not come within 15 s" in line or (
                f"host 0 at {endpoint} left before all hosts were there" in line
            )
        launcher = start(hosts, 1, tmp_path / "plan", wait=3.0)
        ((code, line),) = finish([launcher])
    assert code == 1
    assert f"expected 3 hosts at {endpoint}, host 0 did not come within 3 s; start" in line


@needs_root
@pytest.mark.distributed
def test_hosts_with_different_options_stop_with_one_line(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=2, hosts=[0, 1], **SETTINGS)
    with Hosts(["a", "b"]) as hosts:
        launchers = [start(hosts, i, tmp_path / "plan", epochs=i + 1) for i in (0, 1)]
        for code, line in finish(launchers):
            assert code == 1
            assert "expected the same options on every host, found on host" in line


def test_a_place_that_is_not_the_plans_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "plan", ranks=3, hosts=[0, 1, 1])
    plan = load_plan(tmp_path / "plan")
    devices = own_devices(plan, Place(node_rank=1, endpoint="10.0.0.1:1"))
    assert [device.rank for device in devices] == [1, 2]
    with pytest.raises(InputError, match=r"the plan spans 2 hosts; run on each .*--node-rank 0"):
        launch.train(tmp_path / "plan")
    with pytest.raises(InputError, match=r"expected a --node-rank from 0 to 1 .*, found 2"):
        launch.train(tmp_path / "plan", place=Place(node_rank=2, endpoint="a:1"))
    for endpoint in ("localhost", "host:0", ":29400", "host:port"):
        with pytest.raises(InputError, match="expected an endpoint HOST:PORT"):
            split_endpoint(endpoint)
    with pytest.raises(InputError, match="found this machine's loopback"):
        torchrun_arguments(plan, Place(endpoint="127.0.0.1:29400"))
    make_plan(small_graph, tmp_path / "mixed", ranks=3, hosts=[0, 1, 0])
    with pytest.raises(InputError, match=r"in the order of their hosts, found \[0, 1, 0\]"):
        own_devices(load_plan(tmp_path / "mixed"), Place())


def test_hosts_start_the_same_attempt_whoever_saw_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun counts a restart on the host whose rank failed; the other only joins it again."""
    from torch._C._distributed_c10d import HashStore

    hosts, agent_class = [1, 2], SimpleElasticAgent
    assigned: list[Any] = []
    for host in range(len(hosts)):
        roll = Roll(
            endpoint="a:1", host=host, ranks_by_host=hosts, plan_id="p", options="",
            wait_seconds=1.0,
        )  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(agent_class, "_assign_worker_ranks", None)
            place_ranks(roll)
            assigned.append(agent_class.__dict__["_assign_worker_ranks"])
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))
    agents = [SimpleNamespace(_remaining_restarts=left) for left in (3, 2)]

    def assign(host: int) -> list[int]:
        spec = SimpleNamespace(max_restarts=3, local_world_size=hosts[host])
        workers = assigned[host](agents[host], store, 1 - host, 2, spec)
        return [worker.global_rank for worker in workers]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(assign, range(2))) == [[0], [1, 2]]
    assert [agent._remaining_restarts for agent in agents] == [2, 2]
