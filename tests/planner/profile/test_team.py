"""A team whose processes had kernels to compile is started once more before its bytes are read."""

from pathlib import Path

import pytest

from gnnplan.planner.profile.team import Team

MEMBER = """
import json, pathlib, sys
starts = pathlib.Path(__file__).with_name("starts")
before = starts.read_text() if starts.exists() else ""
starts.write_text(before + "x")
cold = len(before) < {cold_starts}
print(json.dumps({{"resident_bytes": 900 if cold else 300, "compiled": cold}}), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("cold_starts", "starts", "resident"),
    [(0, 1, 300), (1, 2, 300), (9, 2, 900)],
    ids=["warm", "cold", "no cache"],
)
def test_bytes_are_those_of_a_process_that_compiled_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cold_starts: int,
    starts: int,
    resident: int,
) -> None:
    (tmp_path / "member.py").write_text(MEMBER.format(cold_starts=cold_starts))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Team(1, "member") as team:
        assert team.process.resident_bytes == resident
    assert len((tmp_path / "starts").read_text()) == starts
