"""`make bench-peers`: what it writes, and a run with the systems that are here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import peers
from tests.benchmarks.peers_worker import ACTS


class Stub:
    """A system whose turns take as long as it is told."""

    def __init__(self, seconds: float, core_seconds: float) -> None:
        self.seconds, self.core_seconds = seconds, core_seconds
        self.versions = {"torch": "2"}
        self.done: list[str] = []

    def do(self, act: str) -> dict[str, float]:
        self.done.append(act)
        return {"seconds": self.seconds, "core_seconds": self.core_seconds, "edges": 10.0}


def test_page_and_picture_show_what_was_measured_and_name_what_was_not(tmp_path: Path):
    workers = {
        "gnnplan": Stub(0.5, 0.5),
        "gnnplan_every_hop": Stub(0.25, 0.25),
        "graphbolt": Stub(1.0, 0.5),
    }
    found = peers.measure(workers, 2)  # pyright: ignore[reportArgumentType]
    assert workers["graphbolt"].done == [*ACTS] * 3
    missing = {"pyg": "No matching distribution found for pyg_lib"}
    lines = peers.summarise(found, workers, missing, 100)  # pyright: ignore[reportArgumentType]
    by_name = {line["name"]: line for line in lines}
    assert by_name["sample_gnnplan"]["value"] == 200
    assert by_name["train_graphbolt"]["ratio"] == 4
    assert by_name["pyg"]["value"] is None
    facts = {"graph": "rmat-10", "cores": "1 cores", "machine": "x"}
    peers.write_table(tmp_path / "peers.md", lines, facts)
    text = (tmp_path / "peers.md").read_text()
    row = "| 100 | 100 to 100 | 500.0 | 10 | 4.00 times | 2.00 times |"
    assert f"| DGL's GraphBolt | torch 2 {row}" in text
    assert "In 6 turns a system waited" in text
    assert "- PyG's NeighborLoader (pyg-lib): No matching distribution found" in text
    peers.draw(tmp_path / "peers.svg", lines, facts)
    assert (tmp_path / "peers.svg").read_text().rstrip().endswith("</svg>")


def test_what_cannot_be_installed_is_told_by_pips_last_error(tmp_path: Path):
    code = "import sys; sys.stderr.write('a\\nERROR: no such wheel\\nhint\\n'); sys.exit(1)"
    assert peers.run([sys.executable, "-c", code]) == "no such wheel"
    assert peers.run([sys.executable, "-c", "raise SystemExit(3)"]) == "exit code 3"
    assert peers.run([sys.executable, "-c", ""]) == ""


@pytest.mark.slow
def test_the_systems_that_are_here_take_turns_on_one_graph(tmp_path: Path):
    words = ["--graph", "rmat-12", "--rounds", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.peers", *words],
        cwd=peers.ROOT,
        env=os.environ | {"GNNPLAN_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [
        json.loads(line)
        for line in (tmp_path / "out" / "peers.jsonl").read_text().split("\n")
        if line
    ]
    measured = {line["name"]: line for line in lines if line["value"] is not None}
    for system in ("gnnplan", "gnnplan_every_hop", "pyg_over_gnnplan"):
        assert all(measured[f"{act}_{system}"]["value"] > 0 for act in ACTS)
    one, other = (measured[f"load_{name}"]["edges"] for name in ("gnnplan", "pyg_over_gnnplan"))
    assert one == pytest.approx(other, rel=0.05)
    assert {line["system"] for line in lines} == set(peers.TITLES.values())
    assert (tmp_path / "out" / "peers.svg").exists()
