"""The command that a service submits to a Ray cluster."""

import importlib.util
import json
from pathlib import Path

import pytest

from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.launch import ray as launch_ray


def request_file(folder: Path) -> Path:
    path = folder / "request.json"
    path.write_text(json.dumps({"plan_folder": "p", "run_folder": "r", "options": {"epochs": 3}}))
    return path


def test_it_trains_as_the_request_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[object, ...]] = []

    def train(plan: Path, *, run_folder: Path, **options: object) -> None:
        asked.append((plan, run_folder, options))

    monkeypatch.setattr(launch_ray, "train_on_ray", train)
    assert launch_ray.main([str(request_file(tmp_path))]) == 0
    assert asked == [(Path("p"), Path("r"), {"epochs": 3})]


def test_without_ray_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert launch_ray.main([str(request_file(tmp_path))]) == 2
    assert capsys.readouterr().err == (
        "gnnplan: expected Ray Train, found none; pip install 'gnnplan[ray]'\n"
    )


def test_an_error_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object, **__: object) -> None:
        raise WorkerFailed("rank 1:\nRuntimeError")

    monkeypatch.setattr(launch_ray, "train_on_ray", fail)
    assert launch_ray.main([str(request_file(tmp_path))]) == 1
    assert capsys.readouterr().err == "gnnplan: rank 1: RuntimeError\n"
    assert launch_ray.main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
