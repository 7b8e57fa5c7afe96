"""Caches that cannot be written: refused where the user named them, done without where not."""

import os
from pathlib import Path

import pytest

from gnnplan.planner import array_cache as caches
from gnnplan.planner.array_cache import cache_folder
from gnnplan.planner.cli.main import main
from gnnplan.planner.profile import cache as profiles
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph


def occupied(tmp_path: Path) -> Path:
    """A path that cannot be a folder, for root neither: a file stands in its way."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "cache"


def test_a_named_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "a/b"))
    assert cache_folder() == tmp_path / "a/b"
    assert profiles.cache_folder() == tmp_path / "a/b/profiles"
    assert (tmp_path / "a/b").is_dir()


def test_a_named_folder_that_cannot_be_is_refused_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(occupied(tmp_path)))
    for folder in (cache_folder, profiles.cache_folder):
        with pytest.raises(InputError, match=r"^GNNPLAN_CACHE: expected a folder .*Not a dir"):
            folder()


def test_a_named_folder_that_is_read_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(caches.os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(InputError, match=r"GNNPLAN_CACHE: .*not writable"):
        cache_folder()


def test_a_plan_with_such_a_cache_ends_before_anything_is_measured(
    small_graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(occupied(tmp_path)))
    graph, out = str(small_graph.path), str(tmp_path / "plan")
    assert main(["plan", graph, "-o", out, "--machine", "cpu-2core"]) == 2
    assert "GNNPLAN_CACHE" in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()


def test_without_a_cache_of_the_users_plans_use_a_folder_that_goes_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GNNPLAN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied(tmp_path)))
    first, second = cache_folder(), profiles.cache_folder()
    assert first.is_dir()
    assert second == first / "profiles"
    said = capsys.readouterr().err
    assert said.count("planning without a cache") == 1
    assert "set GNNPLAN_CACHE" in said
    assert str(tmp_path / "file/cache/gnnplan") in said
