"""The hosts of tests: links carry what was asked, and nothing stays behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import NAMESPACES, PREFIX, Hosts, needs_root

pytestmark = [pytest.mark.distributed, needs_root]
ROOT = Path(__file__).resolve().parents[1]
PAYLOAD = 1448 / 1514  # bytes of a full TCP segment with time stamps over those of its frame
MIB = 2**20

RECEIVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
start, received = None, 0
while data := connection.recv(1 << 20):
    start = start or time.perf_counter()
    received += len(data)
print(8 * received / (time.perf_counter() - start), flush=True)
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def bits_per_second(hosts: Hosts, source: str, target: str, num_bytes: int) -> float:
    """Payload that one receiver gets from one sender."""
    command = [sys.executable, "-c", RECEIVER, hosts.address(target)]
    receiver = hosts.start(target, command, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    sender = [sys.executable, "-c", SENDER, hosts.address(target), str(num_bytes)]
    hosts.run(source, sender)
    return float(receiver.communicate(timeout=120)[0])


def best(hosts: Hosts, source: str, target: str, num_bytes: int) -> float:
    """The faster of two: a pause of this machine can only make a transfer slower."""
    return max(bits_per_second(hosts, source, target, num_bytes) for _ in range(2))


def test_links_carry_the_rate_that_was_asked_for() -> None:
    rates = {("a", "c"): 50e6}
    with Hosts(["a", "b", "c"], rate_bits_per_second=400e6, links=rates) as hosts:
        assert best(hosts, "a", "b", 16 * MIB) == pytest.approx(400e6 * PAYLOAD, rel=0.05)
        assert best(hosts, "c", "a", 8 * MIB) == pytest.approx(50e6 * PAYLOAD, rel=0.05)
        hosts.set_rate("b", 100e6)
        assert best(hosts, "a", "b", 6 * MIB) == pytest.approx(100e6 * PAYLOAD, rel=0.05)
        assert best(hosts, "b", "a", 6 * MIB) == pytest.approx(100e6 * PAYLOAD, rel=0.05)


def test_a_pulled_cable_stops_frames_until_it_is_put_back() -> None:
    listening = "import socket, sys; server = socket.create_server((sys.argv[1], 5001)); input()"
    knock = "import socket, sys; socket.create_connection((sys.argv[1], 5001), timeout=1.5)"
    with Hosts(["a", "b"]) as hosts:
        command = [sys.executable, "-c", listening, hosts.address("b")]
        hosts.start("b", command, stdin=subprocess.PIPE)
        # The listener needs a moment to start.
        knocking = [sys.executable, "-c", knock, hosts.address("b")]
        assert any(hosts.run("a", knocking, check=False).returncode == 0 for _ in range(50))
        hosts.set_link("b", up=False)
        assert hosts.run("a", knocking, check=False).returncode != 0
        hosts.set_link("b", up=True)
        assert any(hosts.run("a", knocking, check=False).returncode == 0 for _ in range(20))


def test_programs_and_namespaces_end_with_the_block() -> None:
    with Hosts(["a"]) as hosts:
        sleeper = hosts.start("a", ["sleep", "1000"])
        namespace = NAMESPACES / hosts.namespace("a")
        assert namespace.exists()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not namespace.exists()


def test_a_killed_maker_leaves_nothing_once_hosts_are_made_again() -> None:
    body = """
import os, signal, subprocess
from tests.hosts import Hosts
with Hosts(["a", "b"]) as hosts:
    print(hosts.start("a", ["sleep", "1000"], stdout=subprocess.DEVNULL).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", body], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False, stdout=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    sleeper = Path("/proc") / killed.stdout.strip()
    assert killed.returncode == -signal.SIGKILL
    while not (sleeper / "cmdline").read_bytes().startswith(b"sleep"):
        assert (sleeper / "status").exists()  # it enters the host first
    with Hosts(["a"]) as hosts:
        ours = {hosts.namespace("a"), hosts.namespace("switch")}
        gone = {path.name for path in NAMESPACES.glob(f"{PREFIX}*")} - ours
        makers = {int(name.split("-")[1]) for name in gone}
        assert all(Path(f"/proc/{maker}").exists() for maker in makers)  # other tests' hosts
    assert not sleeper.exists() or b"sleep" not in (sleeper / "cmdline").read_bytes()


def test_hosts_that_cannot_be_are_refused() -> None:
    for names, links in ((["a", "a"], {}), (["a"], {("a", "b"): 1e9})):
        with pytest.raises(ValueError, match="expected distinct hosts"):
            Hosts(names, links=links)
