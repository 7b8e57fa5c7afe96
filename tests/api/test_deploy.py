"""The container file and the systemd unit name flags, folders and variables that there are."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gnnplan.api.app import COMMITTED
from gnnplan.api.jobs.lanes import STOP_SECONDS, lock_folder, sign_folder
from gnnplan.api.serve import GRACE_SECONDS, main, parse, settings_of
from gnnplan.planner.probe.probe import cache_folder

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "api" / "deploy"
CONTAINER = (DEPLOY / "Containerfile").read_text()
UNIT = (DEPLOY / "gnnplan-serve.service").read_text()
PAGE = (DEPLOY / "README.md").read_text()


def settings_in(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def instruction(name: str) -> str:
    lines = re.sub(r"\\\n\s*", "", CONTAINER).splitlines()
    return next(line for line in lines if line.startswith(f"{name} "))


def commands() -> list[list[str]]:
    """Every command line of the service in the files' own examples."""
    text = PAGE + CONTAINER.replace("#", "")
    lines = [line for line in text.splitlines() if "keys " in line and "--" in line]
    found = [shlex.split(line) for line in lines]
    return [words for words in found if "keys" in words]


def words_of_the_unit() -> list[str]:
    program, *words = settings_in(UNIT)["ExecStart"][0].split()
    assert Path(program).name == "gnnplan-serve"
    assert words.pop() == "$GNNPLAN_SERVE_OPTIONS"
    return words


def words_of_the_container() -> list[str]:
    program, *words = json.loads(instruction("ENTRYPOINT").partition(" ")[2])
    assert program == "gnnplan-serve"
    return [*words, *json.loads(instruction("CMD").partition(" ")[2])]


def test_the_unit_starts_the_service_on_loopback_in_its_state_folder():
    unit, options = settings_in(UNIT), parse(words_of_the_unit())
    state = f"/var/lib/{unit['StateDirectory'][0]}"
    assert str(options.data_dir).startswith(state)
    assert unit["WorkingDirectory"] == [state]
    assert unit["User"] == ["gnnplan"]
    assert [str(root) for root in options.graph_root] == ["/srv/gnnplan/graphs"]
    assert options.host == "127.0.0.1"
    # A stop that is cut short would lose what jobs do when they are asked to end.
    assert int(unit["TimeoutStopSec"][0]) > STOP_SECONDS + GRACE_SECONDS
    assert not {"MemoryDenyWriteExecute", "PrivateDevices"} & set(
        unit
    )  # kernels are compiled; GPUs


@pytest.mark.parametrize("text", [UNIT, CONTAINER])
def test_caches_lie_in_the_folder_that_stays(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    values = dict(re.findall(r"([A-Z_]+)=(/var/lib/gnnplan[^\s\\]*)", text))
    assert set(values) == {"GNNPLAN_CACHE", "NUMBA_CACHE_DIR"}
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"  # the name is the one the planner reads


def test_the_container_starts_the_service_as_a_user_of_its_own(tmp_path: Path):
    options = parse(words_of_the_container())
    assert str(options.data_dir).startswith("/var/lib/gnnplan/")
    assert instruction("VOLUME") == "VOLUME /var/lib/gnnplan"
    assert instruction("EXPOSE") == f"EXPOSE {options.port}"
    assert instruction("USER") == "USER gnnplan"
    assert f":{options.port}/readyz" in instruction("HEALTHCHECK")
    options.graph_root = [tmp_path]
    assert settings_of(options).require_key


def test_the_container_copies_what_is_there_and_installs_what_is_declared():
    copied = [w for line in CONTAINER.splitlines() if line.startswith("COPY ")
              for w in line.split()[1:-1]]  # fmt: skip
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = (ROOT / "pyproject.toml").read_text()
    packages = re.search(r"packages = \[(.*)\]", project)
    assert packages
    assert set(re.findall(r'"(\w+)"', packages[1])) <= set(copied)
    (extra,) = re.findall(r"\.\[(\w+)\]", CONTAINER)
    assert f"\n{extra} = [" in project


def test_every_command_that_the_pages_show_is_one(tmp_path: Path):
    assert len(commands()) >= 4
    for words in commands():
        at = next((i for i, w in enumerate(words) if w.endswith("gnnplan-serve")), None)
        ours = words[at + 1 :] if at is not None else words[words.index("keys") :]
        assert parse(ours).command == "keys"
    flags = set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--server", "--shm-size"}
    known = help_text()
    assert [flag for flag in flags if flag not in known] == []
    paths = set(json.loads(COMMITTED.read_text())["paths"])
    assert set(re.findall(r"`GET (/\w+)`", PAGE)) <= paths


def test_passwords_are_kept_off_the_command_line_which_every_user_reads():
    service = (ROOT / "api" / "README.md").read_text()
    for text in (UNIT, CONTAINER, PAGE, service):
        assert re.search(r"://[^@/\s]*:[^@/\s]+@", text) is None
    options = next(line for line in UNIT.splitlines() if "EnvironmentFile" in line)
    assert options.startswith("EnvironmentFile=-/etc/gnnplan/")
    assert "$GNNPLAN_SERVE_OPTIONS" in settings_in(UNIT)["ExecStart"][0]
    (home,) = re.findall(r"useradd .*--home-dir (\S+)", PAGE)
    assert f"`{home}/.pgpass`" in PAGE
    assert "~/.pgpass" in UNIT


def help_text() -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        parse(["--help"])
    return text.getvalue()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path):
    # Programs and users of the file are not on this machine; everything else must be right.
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT)
    unit = tmp_path / "gnnplan-serve.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if str(unit) in line]
    assert ours == []


def test_a_second_service_on_a_data_folder_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--data-dir", str(tmp_path), "keys", "list"]) == 0
    lock, _ = lock_folder(tmp_path)
    sign_folder(lock, "first")
    assert main(["--data-dir", str(tmp_path), "--graph-root", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "expected a data folder of its own, found another service on it" in captured.err
    assert (tmp_path / "service.lock").read_text() == "first"
    os.close(lock)
