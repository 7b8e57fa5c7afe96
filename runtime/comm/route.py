"""Network interface towards another host, for gloo and NCCL.

Left alone, gloo binds to the address of this host's own name, often the loopback or a card that
other hosts do not reach.
"""

import ipaddress
import os
import socket
from pathlib import Path

from gnnplan.runtime.errors import InputError, WorkerFailed

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK, LOOPBACK_ADDRESS = "lo", "127.0.0.1"
LOOPBACK_SECONDS = 10.0
_IF_INET6 = Path("/proc/net/if_inet6")
_ANY_PORT = 9  # no packet is sent: connecting a datagram socket only looks the route up
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split HOST:PORT or [IPV6]:PORT into host and port."""
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InputError(f"expected an endpoint HOST:PORT, found {endpoint!r}")
    return host, int(port)


def check_loopback() -> None:
    """Refuse a host whose processes cannot reach each other over its loopback interface.

    Ranks meet there; without it they would wait for each other for minutes.
    """
    try:
        with socket.create_server((LOOPBACK_ADDRESS, 0)) as server:
            there = server.getsockname()
            socket.create_connection(there, timeout=LOOPBACK_SECONDS).close()
    except OSError as error:
        raise WorkerFailed(
            f"processes of this host cannot reach each other at {LOOPBACK_ADDRESS} ({error}): the "
            f"loopback interface is down, as in a sandbox without network; bring it up (ip link "
            f"set {LOOPBACK} up), or run where it is"
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_towards(host: str) -> str:
    """Return this host's own address on the way to another one (or to itself)."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(
            f"{host}: expected a host that can be reached from here ({error})"
        ) from None


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; None where none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return LOOPBACK
    if wanted.version == 6:
        return _ipv6_interfaces().get(wanted)
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) == address:
            return name
    return None


def use_route_to(host: str) -> str | None:
    """Make gloo and NCCL use the interface towards a host; variables that are set stay.

    Returns None, with nothing set, where the interface was not found.
    """
    try:
        interface = interface_of(address_towards(host))
    except InputError:
        return None  # joining the group will say what is wrong with the name
    if interface is not None:
        for variable in VARIABLES:
            # NCCL needs no socket within a host, and refuses the loopback beside other hosts.
            if interface != LOOPBACK or variable != "NCCL_SOCKET_IFNAME":
                os.environ.setdefault(variable, interface)
    return interface


def _ipv4_of(interface: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = interface.encode()[:15].ljust(256, b"\0")
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])


def _ipv6_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    if not _IF_INET6.exists():
        return {}
    rows = [line.split() for line in _IF_INET6.read_text().splitlines()]
    return {ipaddress.IPv6Address(int(row[0], 16)): row[5] for row in rows}
