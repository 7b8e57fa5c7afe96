"""A recorded NVML: GPUs as data, with the refusals real drivers give.

Not a test; imported by path from the tests beside it.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in pynvml."""

    value = 999


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
    """As in pynvml."""

    value = 3


class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818
    """As in pynvml."""

    value = 4


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818
    """As in pynvml."""

    value = 12


GPU, SWITCH, UNKNOWN = 0, 2, 255


@dataclass
class Link:
    """One NVLink as the driver tells it."""

    remote: str
    kind: int = GPU
    up: int = 1
    mb_per_second: int = 26562


@dataclass
class Device:
    """One GPU as the driver tells it."""

    uuid: str
    bus_id: str
    name: bytes = b"NVIDIA A100-SXM4-80GB"
    capability: tuple[int, int] = (8, 0)
    memory_bytes: int = 80 * 2**30
    mig: int = 0
    numa_mask: int = 1
    links: list[Link] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    """Functions that raise NotSupported for this device."""
    processes: int = 0
    pcie_generation: int = 4
    pcie_width: int = 16
    """In use; the slot has 16."""
    links_forbidden: bool = False
    """Asking for links is refused for want of permission, as under MIG."""


class FakeNvml:
    """Stands in for the module pynvml."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NoPermission = NVMLError_NoPermission

    def __init__(
        self,
        devices: list[Device],
        *,
        nvlink_peer: dict[tuple[int, int], int] | None = None,
        ancestor: int = 40,
        ancestors: dict[tuple[int, int], int] | None = None,
        init_error: NVMLError | None = None,
    ):
        self.devices = devices
        self.nvlink_peer = nvlink_peer or {}
        self.ancestor = ancestor
        self.ancestors = ancestors or {}
        self.init_error = init_error
        self.shut_down = False

    def _check(self, device: Device, name: str) -> Device:
        if name in device.refused:
            raise NVMLError_NotSupported(name)
        return device

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise self.init_error

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        return self._check(self.devices[index], "nvmlDeviceGetHandleByIndex")

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12080

    def nvmlDeviceGetFieldValues(self, device: Device, fields: list[Any]) -> list[Any]:  # noqa: N802
        self._check(device, "nvmlDeviceGetFieldValues")
        number, scope = fields[0]
        known = {
            165: lambda: device.links[scope].up,
            164: lambda: device.links[scope].mb_per_second,
        }
        if number not in known:
            return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=known[number]()))]

    def nvmlDeviceGetNvLinkCapability(self, device: Device, index: int, _: int) -> int:  # noqa: N802
        self._check(device, "nvmlDeviceGetNvLinkCapability")
        if device.links_forbidden:
            raise NVMLError_NoPermission("MIG")
        if index >= len(device.links):
            raise NVMLError_NotSupported("no such link")
        return 1

    def nvmlDeviceGetP2PStatus(self, a: Device, b: Device, index: int) -> int:  # noqa: N802
        assert isinstance(index, int)  # the module's tuple constant would fail in ctypes
        self._check(a, "nvmlDeviceGetP2PStatus")
        pair = (self.devices.index(a), self.devices.index(b))
        return self.nvlink_peer.get(pair, 5) if index == 2 else 0

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Device, b: Device) -> int:  # noqa: N802
        self._check(a, "nvmlDeviceGetTopologyCommonAncestor")
        pair = (self.devices.index(a), self.devices.index(b))
        return self.ancestors.get(pair, self.ancestor)

    def __getattr__(self, name: str) -> Any:
        """Plain getters of one device."""
        simple: dict[str, Any] = {
            "nvmlDeviceGetUUID": lambda d: d.uuid,
            "nvmlDeviceGetName": lambda d: d.name,
            "nvmlDeviceGetPciInfo": lambda d: SimpleNamespace(busId=d.bus_id.encode()),
            "nvmlDeviceGetCudaComputeCapability": lambda d: d.capability,
            "nvmlDeviceGetMemoryInfo": lambda d: SimpleNamespace(total=d.memory_bytes),
            "nvmlDeviceGetMigMode": lambda d: [d.mig, d.mig],
            "nvmlDeviceGetMemoryAffinity": lambda d, n, _: [d.numa_mask] + [0] * (n - 1),
            "nvmlDeviceGetCpuAffinity": lambda _, n: [0b1100] + [0] * (n - 2) + [1],
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 1,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda d: d.pcie_width,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda d: d.pcie_generation,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
            "nvmlDeviceGetComputeRunningProcesses": lambda d: [None] * d.processes,
            "nvmlDeviceGetNvLinkState": lambda d, i: d.links[i].up,
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda d, i: d.links[i].kind,
            "nvmlDeviceGetNvLinkRemotePciInfo": lambda d, i: SimpleNamespace(
                busId=d.links[i].remote
            ),
        }
        if name not in simple:
            raise AttributeError(name)

        def call(device: Device, *arguments: Any) -> Any:
            self._check(device, name)
            return simple[name](device, *arguments)

        return call
