"""A host without a loopback interface is told so before anything waits for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gnnplan.runtime.comm.route import check_loopback
from gnnplan.runtime.graph.dataset import Graph
from tests.support.plans import make_plan

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_LOOPBACK = """
import sys, time
from pathlib import Path
from gnnplan.planner.probe.probe import probe
from gnnplan.runtime.launch.launch import train
for work in (lambda: train(Path(sys.argv[1])), lambda: probe(quick=True)):
    start = time.monotonic()
    try:
        work()
    except Exception as error:
        print(type(error).__name__, error, round(time.monotonic() - start), sep="|")
"""


@pytest.mark.distributed
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network without a loopback")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")
def test_without_a_loopback_jobs_and_probes_name_the_cause_at_once(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path / "plan")
    made = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", WITHOUT_LOOPBACK, str(tmp_path / "plan")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"GNNPLAN_CACHE": str(tmp_path / "cache")},
    )
    if "unshare failed" in made.stderr:
        pytest.skip(f"no network name spaces here: {made.stderr.strip()}")
    lines = [line.split("|") for line in made.stdout.splitlines()]
    assert [kind for kind, _, _ in lines] == ["WorkerFailed", "WorkerFailed"], made.stderr
    for _, text, seconds in lines:
        assert "the loopback interface is down" in text
        assert "ip link set lo up" in text
        assert int(seconds) < 20  # torchrun alone waited for minutes


def test_with_a_loopback_nothing_is_refused() -> None:
    check_loopback()
