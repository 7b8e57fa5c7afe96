"""Runs of the service on a real Ray cluster of two nodes; skipped where Ray is not installed."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.api.jobs.ray import RayJobs
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.report import load_report
from tests.api.test_ray_jobs import served_plan, until
from tests.support.plans import make_plan
from tests.support.service import ENDED, ServiceProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow", "aiohttp_cors")),
        reason="Ray with its dashboard is not installed; pip install 'gnnplan[ray]'",
    ),
]
ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {"batch_size": 128, "fanouts": [5, 3], "seed": 3, "learning_rate": 0.01}
CLUSTER = """
import importlib, sys
utilities = importlib.import_module("ray.cluster_utils")
head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": int(sys.argv[1])}
cluster = utilities.Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print("ready", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the dashboard of a fresh cluster, whose Python is this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": str(folder),  # where Ray keeps a token, and the service looks for it
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        address = f"http://127.0.0.1:{port}"
        jobs = RayJobs(address)
        assert jobs.ray_version()
        jobs.close()
        yield address
    finally:
        process.stdin.close()
        process.wait(timeout=120)
        process.stdout.close()


def test_a_run_on_two_nodes_has_torchruns_losses_and_survives_the_service(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = SETTINGS | {"ranks": 2, "peers": True, "own_rows": 300}
    data = tmp_path / "data"
    plan = served_plan(small_graph, data, hosts=[0, 1], **settings)
    with cluster(tmp_path, monkeypatch) as address:
        service = ServiceProcess(data, "--executor", "ray", "--address", address)
        service.start()
        try:
            body = {"plan": plan, "epochs": 2, "max_restarts": 0}
            job = service.call("POST", "/v1/runs", body)["id"]
            events = data / "runs" / job / "events.jsonl"
            until(lambda: events.exists() and events.stat().st_size > 0, seconds=300)
            service.kill()
            service.start()
            until(lambda: service.call("GET", f"/v1/jobs/{job}")["state"] in ENDED, seconds=300)
            done = service.call("GET", f"/v1/jobs/{job}")
            assert done["state"] == "succeeded", done
            assert done["attempt"] == 2
            jobs = RayJobs(address)
            assert [each.submission_id for each in jobs.list()] == [f"gnnplan-{job}-1"]

            endless = {"plan": plan, "epochs": 100_000, "eval_every": 0}
            other = service.call("POST", "/v1/runs", endless)["id"]
            name = f"gnnplan-{other}-1"
            until(lambda: (found := jobs.get(name)) and found.status == "RUNNING", seconds=300)
            service.call("POST", f"/v1/runs/{other}/cancel")
            until(lambda: (found := jobs.get(name)) and found.ended, seconds=300)
            jobs.close()
            assert service.call("GET", f"/v1/jobs/{other}")["state"] == "cancelled"
        finally:
            service.stop()
        report = load_report(data / "runs" / job)
    make_plan(small_graph, tmp_path / "torchrun", **settings)
    single = launch.train(tmp_path / "torchrun", epochs=2, oversubscribe=True, pin=False)
    np.testing.assert_allclose(report.losses, single.losses, rtol=1e-5)
    assert [each.rank for each in report.ranks] == [0, 1]
