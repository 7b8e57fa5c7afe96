"""Every command of the how-to pages and of the README's scripts runs, in a folder of its own."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.howto import Block, blocks
from tests.support.probed import keep_as_probed
from tests.test_docs_howto import PAGES, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder to run in and its environment; this machine counts as probed already."""
    cache = tmp_path / "cache"
    cache.mkdir()
    keep_as_probed(cache)
    folder = tmp_path / "work"
    folder.mkdir()
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {
        "GNNPLAN_CACHE": str(cache),
        "PATH": paths,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "default",
        "OMP_NUM_THREADS": "1",
    }
    return folder, environment


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def with_ports(page: str) -> str:
    """The same page with addresses of this machine and ports that are free."""
    named = sorted(set(re.findall(r"(?:host0|localhost|--port )[: ]?(\d{4,5})", page)))
    for old, new in zip(named, free_ports(len(named)), strict=True):
        page = re.sub(rf"\b{old}\b", str(new), page)
    return page.replace("host0:", f"{own_address()}:")


def own_address() -> str:
    """An address of this machine that is not its loopback, which hosts of a job are refused."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to_nobody:
        # Nothing is sent: this asks which of its addresses the machine would send from.
        to_nobody.connect(("192.0.2.1", 9))
        return str(to_nobody.getsockname()[0])


def run_page(page: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a page's blocks in order; what they printed."""
    script = list[str]()
    parts = blocks(with_ports(page))
    for number, block in enumerate(parts):
        if block.kind == "file":
            (folder / block.name).write_text(block.text)
        elif block.kind == "python":
            script.append(f"python - <<'END_OF_PYTHON'\n{block.text}END_OF_PYTHON\n")
        elif block.kind == "sh":
            script.append(block.text)
        elif block.kind == "host":
            script.append(
                f"( {block.text.strip()} ) > host{block.name}.log 2>&1 & HOST{block.name}=$!\n"
            )
            if not _is_host(parts, number + 1):
                script.append(f"wait $HOST0\nwait $HOST{block.name}\n")
    code = run_script("\n".join(script), folder, environment)
    logs = [folder / "page.log", *sorted(folder.glob("host*.log"))]
    said = "".join(log.read_text() for log in logs)
    assert code == 0, said[-3000:]
    return said


def run_script(text: str, folder: Path, environment: dict[str, str]) -> int:
    """The exit code of a script; what it started in the background ends with it.

    Its processes are one group of a session of their own. The shell's job control (`set -m`) would
    do that too, but takes a command that was stopped for a while (SIGSTOP) for one that ended.
    """
    with (folder / "page.log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return shell.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
            shell.wait()


def _is_host(parts: list[Block], number: int) -> bool:
    return number < len(parts) and parts[number].kind == "host"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_how_to_page_runs(path: Path, place: tuple[Path, dict[str, str]]):
    if "curl" in path.read_text() and shutil.which("curl") is None:
        pytest.skip("no curl (Debian: apt-get install curl)")
    said = run_page(path.read_text(), *place)
    assert "Traceback" not in said


def test_the_readmes_scripts_run(place: tuple[Path, dict[str, str]]):
    folder, environment = place
    page = (ROOT / "README.md").read_text()
    ten, script = [b.text for b in blocks(page) if b.kind == "python"]
    (planned,) = [b.text for b in blocks(page) if b.kind == "sh"]
    (folder / "script.py").write_text(script)
    text = (
        "gnnplan graph generate sbm demo/graph --nodes 3000 --features 16 --classes 5\n"
        f"python - <<'END_OF_PYTHON'\n{ten}END_OF_PYTHON\n"
        f"{planned}gnnplan launch my-plan script.py\n"
    )
    said = run_page(f"```sh\n{text}```\n", folder, environment)
    assert "rank 1 epoch 2 loss" in said
    assert (folder / "model.pt").is_file()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl (apt-get install curl)")
def test_three_commands_of_the_services_page_make_a_first_plan(place: tuple[Path, dict[str, str]]):
    folder, environment = place
    commands = re.findall(r"^curl .*$", (ROOT / "api" / "README.md").read_text(), re.MULTILINE)
    assert 1 <= len(commands) <= 3
    made = ["gnnplan", "graph", "generate", "sbm", "demo/graph", "--nodes", "3000"]
    subprocess.run(made, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    (port,) = free_ports(1)
    with (folder / "serve.log").open("w") as log:
        service = subprocess.Popen(
            ["gnnplan-serve", "--port", str(port)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            wait_until_ready(port, service)
            names, answer = dict[str, str](), ""
            for command in commands:
                for name, value in names.items():
                    command = re.sub(rf"\b{name}\b", value, command)
                done = subprocess.run(
                    ["bash", "-c", command.replace(":8000", f":{port}")],
                    cwd=folder, env=environment, capture_output=True, text=True, check=True,
                )  # fmt: skip
                answer = done.stdout
                names |= named_in(answer)
        finally:
            service.terminate()
            service.wait()
    explained = json.loads(answer)
    assert explained["plan_id"] == names["PLAN_ID"]


def wait_until_ready(port: int, service: subprocess.Popen[bytes]) -> None:
    """Return once the service takes requests."""
    while service.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
            return
        time.sleep(0.2)
    raise AssertionError("the service ended; see its log")


def named_in(answer: str) -> dict[str, str]:
    """What a reader finds in an answer: the job's id, or the plan that its last event names."""
    job = re.match(r'\{"id":\s*"(\w+)"', answer)
    plan = re.findall(r'^data: .*"subject":\s*"(\w+)"', answer, re.MULTILINE)
    return ({"ID": job[1]} if job else {}) | ({"PLAN_ID": plan[-1]} if plan else {})
