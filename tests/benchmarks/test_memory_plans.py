"""Two of the benchmark's random plans train in control groups limited to what they predict."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.memory_groups import NoGroups, limited_group


@pytest.mark.slow
@pytest.mark.distributed
def test_two_random_plans_run_within_their_predicted_memory(tmp_path: Path) -> None:
    try:
        with limited_group(1 << 30):
            pass
    except NoGroups as error:
        pytest.skip(str(error))
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.benchmarks.memory_plans", "--json", "--only", "10-11"]
    command += ["--work", str(tmp_path), "--out", str(out)]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    lines = {line["name"]: line for line in map(json.loads, found.stdout.splitlines())}
    assert len(out.read_text().splitlines()) == lines["memory_ape_median"]["plans"] == 2
    assert lines["memory_killed"]["value"] == 0, out.read_text()
    assert lines["memory_ape_worst"]["value"] < 0.25
    assert lines["memory_plan"]["baseline"] >= 10**9
