"""Training as a job of the service."""

import json
from pathlib import Path
from typing import Any

import pytest

from gnnplan.api.dashboard.jobs import read_told
from gnnplan.api.jobs import train
from gnnplan.api.jobs.process import JobContext
from gnnplan.api.jobs.recording import RESULT_FILE
from gnnplan.api.service.jobs import LONGEST_LOG_BYTES
from gnnplan.runtime.launch import launch


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_run_has_a_folder_named_after_its_job_and_goes_on_there_at_its_second_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        launch, "train", lambda folder, **options: asked.update(options, plan=folder) or {"done": 1}
    )
    folder = tmp_path / "jobs" / "run-5"
    folder.mkdir(parents=True)
    request = {
        "plan_folder": str(tmp_path / "plan"),
        "runs": str(tmp_path / "runs"),
        "options": {"epochs": 3, "force": True},
    }
    train.run(request, JobContext(folder=folder, attempt=attempt))
    assert callable(asked.pop("progress"))
    assert asked == {
        "plan": tmp_path / "plan", "run_folder": tmp_path / "runs" / "run-5",
        "resume": attempt > 1, "epochs": 3, "force": True,
    }  # fmt: skip
    assert json.loads((folder / RESULT_FILE).read_text()) == {"done": 1}


def test_the_steps_of_a_run_are_counted_over_all_attempts() -> None:
    for given, wanted in (
        ({"epochs": 3, "max_steps": 7}, {"epochs": 3, "max_steps": 7, "steps_in_all": True}),
        ({"epochs": 3, "max_steps": None}, {"epochs": 3, "max_steps": None}),
    ):
        assert train.options_of({"options": given}) == wanted


def test_every_epoch_is_told_of_however_many_steps_came_after_it(tmp_path: Path) -> None:
    job = JobContext(folder=tmp_path, attempt=1)
    relay, vals = train.Relay(job, epochs=5), [0.5, 0.9, 0.6, 0.7]
    for epoch, val in enumerate(vals):
        told = {"epoch": epoch, "loss": 3.0 - epoch / 2, "val": val, "seconds": 2.0, "share": 1.0}
        relay({"event": "epoch", **told})
        job.event("step", {"words": "x" * LONGEST_LOG_BYTES})  # as those of hours
    found = read_told(tmp_path)
    assert [each.val for each in found.epochs] == vals
    assert found.best is not None
    assert found.best.epoch == 1
    assert [each.loss for each in found.losses] == [3.0, 2.5, 2.0, 1.5]
