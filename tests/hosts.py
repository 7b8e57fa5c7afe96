"""Several hosts on one machine: network namespaces on a bridge, with links of a chosen rate.

    with Hosts(["a", "b"], rate_bits_per_second=1e9) as hosts:
        hosts.run("a", ["ping", "-c1", hosts.address("b")])

Each host is a network namespace with one card, `eth0`. The cards meet in a bridge that lives in a
namespace of its own, so that nothing is left in the machine's own network. A card sends and
receives at `rate_bits_per_second` in all; `links` hold single pairs of hosts below that, in each
direction. Rates are those of Ethernet frames: TCP moves at most 94% of them as payload.

It needs root, `ip` and `tc`. Namespaces carry the process id of their maker: they go when the block
ends, at the maker's exit, or, after it was killed, when the next `Hosts` is made.
"""

import itertools
import os
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMESPACES = Path("/var/run/netns")
PREFIX = "gnnplan-"
SWITCH = "switch"
INTERFACE = "eth0"
UNSHAPED = 100e9
"""Bits per second of a card without a chosen rate."""
BURST_SECONDS = 0.002
LEAST_BURST_BYTES = 128 * 1024  # more than one 64 KiB segment, which is what a veth carries
FIRST_LINK = 10
GONE_SECONDS = 10.0

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="network namespaces need root; as root this test must run"
)

_serial = itertools.count()


class Hosts:
    """Named hosts joined by shaped links; use as a context manager."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        rate_bits_per_second: float | None = None,
        links: Mapping[tuple[str, str], float] | None = None,
        latency_seconds: float | None = None,
    ) -> None:
        """Say which hosts there are; they exist from the start of the block to its end.

        Args:
            names: of the hosts.
            rate_bits_per_second: of every card, in each direction, shared by all who use it.
            links: pairs of hosts -> bits per second of their link, in each direction.
            latency_seconds: added to every frame, one way; needs the kernel's netem.
        """
        unknown = {name for pair in links or {} for name in pair} - set(names)
        if unknown or len(set(names)) < len(names):
            raise ValueError(f"expected distinct hosts, and links between them; found {names}")
        self.names = list(names)
        self.rate_bits_per_second = rate_bits_per_second
        self.links = {frozenset(pair): rate for pair, rate in (links or {}).items()}
        self.latency_seconds = latency_seconds
        self._prefix = f"{_owner(os.getpid())}-{next(_serial)}-"
        self._started: list[subprocess.Popen[Any]] = []
        self._close = weakref.finalize(self, _remove, self._prefix, self._started)

    def __enter__(self) -> "Hosts":
        _check_tools()
        sweep()
        try:
            self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def address(self, name: str) -> str:
        """The host's address, for the other hosts; this machine's own network does not reach it."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        """Name of the host's network namespace."""
        return self._prefix + name

    def command(self, name: str, command: Sequence[str | os.PathLike[str]]) -> list[str]:
        """A command line that runs `command` in a host, with the same process id and files."""
        # Not `ip netns exec`: that would also replace /sys, and with it the control group's limits.
        path = NAMESPACES / self.namespace(name)
        return ["nsenter", f"--net={path}", "--", *[os.fspath(word) for word in command]]

    def run(
        self,
        name: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_seconds: float = 600.0,
        **options: Any,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in a host to its end; output is captured as text.

        Args:
            name: of the host.
            command: and its arguments.
            env: variables beside this process's own.
            check: raise CalledProcessError where it fails.
            timeout_seconds: longest wait.
            options: of subprocess.run.
        """
        options = {"capture_output": True, "text": True} | options
        return subprocess.run(
            self.command(name, command),
            env={**os.environ, **(env or {})},
            check=check,
            timeout=timeout_seconds,
            **options,
        )

    def start(
        self,
        name: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command in a host; it is killed at the end of the block if it still runs."""
        process = subprocess.Popen(
            self.command(name, command), env={**os.environ, **(env or {})}, **options
        )
        self._started.append(process)
        return process

    def set_rate(self, name: str, rate_bits_per_second: float) -> None:
        """Give a host's card another rate, in both directions."""
        self._set_classes(self.namespace(SWITCH), self._port(name), rate_bits_per_second, {})
        limits = self._limits(name)
        self._set_classes(self.namespace(name), INTERFACE, rate_bits_per_second, limits)

    def set_link(self, name: str, *, up: bool) -> None:
        """Pull a host's cable, or put it back: the switch's end of it, as a switch that fails."""
        state = "up" if up else "down"
        _in(self.namespace(SWITCH), f"ip link set {self._port(name)} {state}")

    def _port(self, name: str) -> str:
        return f"port{self.names.index(name)}"

    def _build(self) -> None:
        switch = self.namespace(SWITCH)
        for name in (SWITCH, *self.names):
            _call(f"ip netns add {self.namespace(name)}")
            _in(self.namespace(name), "ip link set lo up")
        _in(switch, "ip link add bridge0 type bridge")
        _in(switch, "ip link set bridge0 up")
        for name in self.names:
            host, port = self.namespace(name), self._port(name)
            _call(f"ip link add {INTERFACE} netns {host} type veth peer name {port} netns {switch}")
            _in(host, f"ip address add {self.address(name)}/24 dev {INTERFACE}")
            _in(host, f"ip link set {INTERFACE} up")
            _in(switch, f"ip link set {port} master bridge0 up")
            for namespace, device in ((switch, port), (host, INTERFACE)):
                _in(namespace, f"tc qdisc add dev {device} root handle 1: htb default 2")
            self.set_rate(name, self.rate_bits_per_second or UNSHAPED)
            for number in self._limits(name):
                address = self.address(self.names[number - FIRST_LINK])
                _in(
                    host,
                    f"tc filter add dev {INTERFACE} parent 1: protocol ip prio 1 u32 "
                    f"match ip dst {address}/32 flowid 1:{number}",
                )
                self._delay(host, number)
            self._delay(host, 2)

    def _limits(self, name: str) -> dict[int, float]:
        """Bits per second by the number of the class that holds a link of this host."""
        rates = {
            number: self.links.get(frozenset((name, other)))
            for number, other in enumerate(self.names, FIRST_LINK)
        }
        return {number: rate for number, rate in rates.items() if rate is not None}

    def _set_classes(
        self, namespace: str, device: str, card: float, limits: Mapping[int, float]
    ) -> None:
        """The card's class 1:1, in it 1:2 for hosts without a rate of their own and the links'.

        A class may always send at its `rate`, whatever its parent says: to hold the card to its
        own, theirs add up to it, and up to its `ceil` each borrows what the others leave.
        """
        share = card / (card + sum(limits.values()))
        classes = {2: card} | {number: min(rate, card) for number, rate in limits.items()}
        for parent, number, rate, most in (
            ("1:", 1, card, card),
            *(("1:1", number, share * rate, rate) for number, rate in classes.items()),
        ):
            burst = max(LEAST_BURST_BYTES, int(most / 8 * BURST_SECONDS))
            _in(
                namespace,
                f"tc class replace dev {device} parent {parent} classid 1:{number} htb "
                f"rate {rate / 1e3:.0f}kbit ceil {most / 1e3:.0f}kbit "
                f"burst {burst}b cburst {burst}b quantum 65536",
            )

    def _delay(self, namespace: str, number: int) -> None:
        if not self.latency_seconds:
            return
        delay = f"tc qdisc add dev {INTERFACE} parent 1:{number} netem limit 100000 delay"
        try:
            _in(namespace, f"{delay} {self.latency_seconds * 1e6:.0f}us")
        except RuntimeError as error:
            raise RuntimeError(f"this kernel cannot delay frames, it has no netem ({error})") from (
                None
            )


def sweep() -> None:
    """Remove the namespaces of makers that are gone, with whatever still runs in them."""
    for prefix in {_prefix_of(path.name) for path in NAMESPACES.glob(f"{PREFIX}*")}:
        pid = prefix.removeprefix(PREFIX).partition("-")[0]
        if not prefix.startswith(_owner(int(pid)) + "-"):
            _remove(prefix)


def _prefix_of(namespace: str) -> str:
    return "-".join(namespace.split("-")[:4]) + "-"


def _owner(pid: int) -> str:
    """Prefix of a process's namespaces: its id and start, so that a later process differs."""
    state = _state(pid)
    return f"{PREFIX}{pid}-{state[19] if state[0] not in 'ZX' else 'gone'}"


def _remove(prefix: str, started: Sequence["subprocess.Popen[Any]"] = ()) -> None:
    for process in started:  # first: one that has not entered its namespace yet is not found there
        process.kill()
    for path in NAMESPACES.glob(f"{prefix}*"):
        end = time.monotonic() + GONE_SECONDS
        while (pids := _processes(path.name)) and time.monotonic() < end:
            for pid in pids:
                _kill(pid)
            time.sleep(0.02)
        subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)
    for process in started:
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _processes(namespace: str) -> list[int]:
    found = subprocess.run(
        ["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True
    )
    return [pid for pid in map(int, found.stdout.split()) if _state(pid)[0] not in "ZX"]


def _state(pid: int) -> list[str]:
    """What /proc/PID/stat says after the name; of a process that is gone, only that it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ["X"]
    return stat.rpartition(")")[2].split()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _check_tools() -> None:
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"expected the commands ip, tc and nsenter, found no {', '.join(missing)}; install "
            "them (Debian: apt-get install iproute2 util-linux)"
        )
    if os.geteuid() != 0:
        raise RuntimeError("network namespaces need root")


def _in(namespace: str, command: str) -> None:
    tool, _, rest = command.partition(" ")
    _call(f"{tool} -n {namespace} {rest}")


def _call(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
