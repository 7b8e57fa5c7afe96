"""NVLinks of one GPU, and how many join a pair: directly or through a switch.

The remote end of a link may be a peer, a switch or hidden from us; in the last case links count as
a way between two GPUs only where the driver says that peer access over NVLink works.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_LINKS = 36
FIELD_STATE = 165
"""NVML_FI_DEV_NVLINK_GET_STATE, for compute capability 9 and later."""
FIELD_SPEED = 164
"""NVML_FI_DEV_NVLINK_GET_SPEED, MB/s per link."""
FIELD_COMMON_SPEED = 90
"""NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, MB/s per link, all alike."""
CAPABILITY_P2P = 0
REMOTE_KINDS = {0: "gpu", 1: "npu", 2: "switch"}

Ask = Callable[..., Any]
"""Calls an NVML function by name; None where it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvLink:
    """One link of one GPU."""

    index: int
    up: bool | None
    peer_access: bool | None
    remote_kind: str
    """gpu | npu | switch | unknown."""
    remote_bus_id: str
    """Empty where unknown."""
    bytes_per_second: float | None
    """One direction, as the driver states it."""


def bus_key(bus_id: Any) -> str:
    """A PCI address made comparable: lower case, domain of at least four hex digits, as in sysfs.

    NVML writes 00000000:07:00.0 where sysfs writes 0000:07:00.0; an address of all ones or without
    a domain is no address.

    >>> bus_key(b"00000000:C1:00.0"), bus_key("soon:1")
    ('0000:c1:00.0', '')
    """
    text = bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().strip("\0 ").partition(":")
    if not re.fullmatch(r"[0-9a-f]{1,8}:[0-9a-z:.]{1,16}", f"{domain}:{rest}", re.ASCII):
        return ""
    if set(domain) <= {"f"}:
        return ""
    return f"{int(domain, 16):04x}:{rest}"


def read_links(ask: Ask, nvml: Any, handle: Any, major: int | None) -> list[NvLink] | None:
    """Links of a GPU; [] where it has none, None where they could not be asked for.

    Args:
        ask: calls NVML, None on refusal.
        nvml: the module, for its exceptions.
        handle: the device.
        major: compute capability; from 9 on the state is read by a field, as NCCL does.
    """
    links: list[NvLink] = []
    for index in range(MAX_LINKS):
        try:
            access = nvml.nvmlDeviceGetNvLinkCapability(handle, index, CAPABILITY_P2P)
        except nvml.NVMLError as error:
            if index == 0 and not _has_no_links(nvml, error):
                return None
            break
        remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, index)
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, index)
        links.append(
            NvLink(
                index=index,
                up=_state(ask, handle, index, major),
                peer_access=bool(access),
                remote_kind=REMOTE_KINDS.get(-1 if kind is None else int(kind), "unknown"),
                remote_bus_id="" if remote is None else bus_key(remote.busId),
                bytes_per_second=_speed(ask, handle, index),
            )
        )
    return links


def _has_no_links(nvml: Any, error: Exception) -> bool:
    """True where the driver says that this GPU has no NVLink at all."""
    kinds = tuple(
        kind
        for name in ("NVMLError_NotSupported", "NVMLError_InvalidArgument")
        if isinstance(kind := getattr(nvml, name, None), type)
    )
    return isinstance(error, kinds)


def _state(ask: Ask, handle: Any, index: int, major: int | None) -> bool | None:
    if major is not None and major >= 9:
        value = _field(ask, handle, FIELD_STATE, index)
    else:
        value = ask("nvmlDeviceGetNvLinkState", handle, index)
    return None if value is None else int(value) == 1


def _speed(ask: Ask, handle: Any, index: int) -> float | None:
    speed = _field(ask, handle, FIELD_SPEED, index)
    if not speed:
        speed = _field(ask, handle, FIELD_COMMON_SPEED, 0)
    return float(speed) * 1e6 if speed else None


def _field(ask: Ask, handle: Any, field: int, scope: int) -> int | None:
    answer = ask("nvmlDeviceGetFieldValues", handle, [(field, scope)])
    if not answer or int(answer[0].nvmlReturn) != 0:
        return None
    return int(answer[0].value.uiVal)


def pair_links(
    links_a: list[NvLink] | None,
    bus_a: str,
    links_b: list[NvLink] | None,
    bus_b: str,
    *,
    nvlink_peer: bool | None,
) -> tuple[int | None, bool | None]:
    """Number of NVLinks between two GPUs, and whether they pass a switch.

    direct = links of a whose remote end is b. Where there are none, both have links to a switch
    (or to an end they cannot see) and the driver says peer access over NVLink works:
    min(links_a, links_b) through the switch. Otherwise none.

    Returns:
        (count, via switch); (None, None) where a GPU's links are unknown, (0, None) where none.
    """
    if links_a is None or links_b is None:
        return None, None
    up_a, up_b = _active(links_a), _active(links_b)
    direct = max(
        sum(link.remote_bus_id == bus_b != "" for link in up_a),
        sum(link.remote_bus_id == bus_a != "" for link in up_b),
    )
    if direct:
        return direct, False
    switched = min(_switched(up_a), _switched(up_b))
    if switched and nvlink_peer is None:
        return None, None
    return (switched, True) if switched and nvlink_peer else (0, None)


def _active(links: list[NvLink]) -> list[NvLink]:
    return [link for link in links if link.up]


def _switched(links: list[NvLink]) -> int:
    """Links that end at a switch, or where the driver does not say."""
    return sum(
        link.remote_kind == "switch" or (link.remote_kind == "unknown" and not link.remote_bus_id)
        for link in links
    )
