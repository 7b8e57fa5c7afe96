"""The GPU benchmark runs from end to end in Triton's interpreter, and ends in time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


def lines(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The lines of a run on tiny sizes, by name."""
    environment = {**os.environ, "GNNPLAN_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--json", "--interpret", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    parsed = [json.loads(line) for line in found.stdout.splitlines()]
    return {line["name"]: line for line in parsed}


@pytest.mark.slow
def test_every_part_of_the_gpu_benchmark_runs_and_names_its_bars(tmp_path: Path) -> None:
    found = lines(tmp_path, "--budget-seconds", "600")
    asked = {
        "sample_neighbor_bulk_hbm": 2.0,
        "sample_neighbor_bulk_pinned": 0.5,
        "sample_labor0_bulk_hbm": 20.0,
        "epoch_sage": 5.0,
        "cache_curve_0.5": 0.9,
        "cache_curve_planner_split": 1 / 1.05,
    }
    assert {name: found[name]["bar"] for name in asked} == asked
    # A planner's split cannot beat the best that was measured, itself among them.
    assert found["cache_curve_planner_split"]["ratio"] <= 1
    assert "our CPU sampler" in found["epoch_sage"]["baseline"]
    assert {"sample", "gather"} <= set(found["epoch_sage"]["stages"])
    # One edge per seed and hop at least, and as many in the graph's way as without it.
    edges = {name: line["edges"] for name, line in found.items() if "neighbor" in name}
    assert edges["sample_neighbor_graph_hbm"] == edges["sample_neighbor_batch_pinned"]
    assert edges["sample_neighbor_stack_hbm"] >= edges["sample_neighbor_bulk_hbm"]
    assert edges["sample_neighbor_bulk_hbm"] > edges["sample_neighbor_batch_hbm"] > 0
    assert not any(name.startswith("skipped") for name in found)


def test_without_time_every_part_says_that_it_was_left_out(tmp_path: Path) -> None:
    found = lines(tmp_path, "--budget-seconds", "0", "--parts", "epoch,gathers")
    assert set(found) == {"device", "skipped_epoch", "skipped_gathers_1xfp32", "seconds_left"}
    assert "of the budget are left" in found["skipped_epoch"]["reason"]


def test_gathers_are_measured_beside_their_limits(tmp_path: Path) -> None:
    found = lines(tmp_path, "--parts", "gathers")
    for name in ("hbm", "uva", "mixed"):
        assert found[f"{name}_gather_100xfp32"]["row_bytes"] == 400
    assert found["uva_gather_100xfp32"]["baseline"] == "pinned_copy"
    # The larger of two parts is at most their sum.
    mixed = found["mixed_gather_100xfp32"]
    assert mixed["ratio_to_larger_part"] <= mixed["ratio"]
