"""NVML recorded and played back, in a form that any binding can be recorded to.

A recording is JSON: each call with its arguments, and its answer or error code. Devices are written
`device:<index>`, their slices `device:<index>/<number>`. `Recorder` stands before a module like
pynvml and notes what passes; `Replay` stands in for the module and answers from the notes. What was
not recorded is refused, as an old driver would.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from gnnplan.planner.errors import MachineError
from gnnplan.planner.probe.gpu.nvml import PciDevices, PciFacts, bus_key
from gnnplan.runtime import codec

FORMAT = "gnnplan-nvml-1"
NOT_FOUND = 13
"""NVML_ERROR_FUNCTION_NOT_FOUND: what a call that was not recorded is answered with."""
HANDLE = "nvmlDeviceGetHandleByIndex"
SLICE_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
FIELDS: dict[str, tuple[str, ...]] = {
    "nvmlDeviceGetPciInfo": ("busId",),
    "nvmlDeviceGetNvLinkRemotePciInfo": ("busId",),
    "nvmlDeviceGetMemoryInfo": ("total",),
}
"""Calls that answer with a structure, and the fields that are kept."""
OPTIONAL: dict[str, tuple[str, ...]] = {"nvmlDeviceGetMemoryInfo": ("free", "used", "reserved")}
"""Fields that are kept where they are answered."""
PROCESSES = "nvmlDeviceGetComputeRunningProcesses"
HELD = "usedGpuMemory"
NOTHING = ("nvmlInit", "nvmlShutdown")
TEXTS = (
    HANDLE,
    SLICE_HANDLE,
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlSystemGetDriverVersion",
)
MASKS = ("nvmlDeviceGetCpuAffinity", "nvmlDeviceGetMemoryAffinity")
PAIRS = ("nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode")
COUNTS = ("nvmlDeviceGetCount", "nvmlDeviceGetMaxMigDeviceCount")
MOST_GPUS, MOST_WORDS = 64, 64


class RecordedDevices:
    """Devices of a recording.

    Raises:
        MachineError: the facts are not of that form.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        try:
            self._facts = {bus: codec.decode(PciFacts, each) for bus, each in plain.items()}
        except ValueError as error:
            raise MachineError(f"expected PCI devices in a recording, found {error}") from None

    def facts(self, bus_id: str) -> PciFacts | None:
        """What was recorded of a device."""
        return self._facts.get(bus_id)


class NVMLError(Exception):
    """An error code, as in pynvml."""

    def __init__(self, value: int = NOT_FOUND) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class NVMLError_InvalidArgument(NVMLError):  # noqa: N801, N818
    """Code 2: there is no such link or device."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
    """Code 3: the device cannot do this."""


class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818
    """Code 4: the user may not, or MIG is on."""


class NVMLError_NotFound(NVMLError):  # noqa: N801, N818
    """Code 6: there is no slice of that number."""


ERRORS: dict[int, type[NVMLError]] = {
    2: NVMLError_InvalidArgument,
    3: NVMLError_NotSupported,
    4: NVMLError_NoPermission,
    6: NVMLError_NotFound,
}


class Recorder:
    """Stands before a module like pynvml: passes every call on and notes it.

    Args:
        nvml: the module.
        devices: where PCI devices are looked up; noted too.
    """

    def __init__(self, nvml: Any, devices: PciDevices | None = None) -> None:
        self._nvml = nvml
        self._devices = devices
        self._handles: list[tuple[Any, str]] = []
        self.calls: dict[str, Any] = {}
        self.NVMLError = nvml.NVMLError
        for name in ("NVMLError_NotSupported", "NVMLError_InvalidArgument"):
            if hasattr(nvml, name):
                setattr(self, name, getattr(nvml, name))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._nvml, name)
        if not callable(function) or not name.startswith("nvml"):
            return function
        return functools.partial(self._pass_on, name, function)

    def _pass_on(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        key = call_key(name, [self._plain_argument(a) for a in arguments])
        try:
            answer = function(*arguments)
        except self._nvml.NVMLError as error:
            self.calls[key] = {"error": int(getattr(error, "value", NOT_FOUND))}
            raise
        if name in (HANDLE, SLICE_HANDLE):
            self.calls[key] = _handle_text([self._plain_argument(a) for a in arguments])
            self._handles.append((answer, self.calls[key]))
        else:
            self.calls[key] = _plain(name, answer)
        return answer

    def _plain_argument(self, value: Any) -> Any:
        for handle, text in self._handles:
            if value is handle:
                return text
        return value

    def recording(self, *, name: str, real: bool, source: str) -> dict[str, Any]:
        """What was noted so far, as plain data.

        Args:
            name: of the machine.
            real: a driver answered, not a construction.
            source: which machine, when, by whom; or what it was constructed from.
        """
        bus_ids = sorted({_bus_of(v) for k, v in self.calls.items() if "PciInfo" in k} - {""})
        known = {} if self._devices is None else {b: self._devices.facts(b) for b in bus_ids}
        return {
            "format": FORMAT,
            "name": name,
            "real": real,
            "source": source,
            "calls": dict(sorted(self.calls.items())),
            "pci": {bus: codec.to_plain(facts) for bus, facts in known.items() if facts},
        }


def call_key(name: str, arguments: Sequence[Any]) -> str:
    """A call as text.

    >>> call_key("nvmlDeviceGetNvLinkState", ["device:0", 3])
    'nvmlDeviceGetNvLinkState(device:0, 3)'
    """
    words = [a if isinstance(a, str) else json.dumps(a, default=list) for a in arguments]
    return f"{name}({', '.join(words)})"


def _handle_text(arguments: Sequence[Any]) -> str:
    """How a handle is written: `device:<index>`, and `device:<index>/<number>` of its slices."""
    return f"device:{arguments[0]}" if len(arguments) == 1 else f"{arguments[0]}/{arguments[1]}"


def _bus_of(answer: dict[str, Any]) -> str:
    return bus_key(answer.get("busId") or "")


def _plain(name: str, answer: Any) -> Any:
    """An answer as JSON's types: text, numbers, lists, and structures as objects."""
    if name in FIELDS:
        kept = [f for f in OPTIONAL.get(name, ()) if getattr(answer, f, None) is not None]
        return {field: _scalar(getattr(answer, field)) for field in (*FIELDS[name], *kept)}
    if name == "nvmlDeviceGetFieldValues":
        first = answer[0]
        return [{"nvmlReturn": int(first.nvmlReturn), "uiVal": int(first.value.uiVal)}]
    if name == PROCESSES:  # how many, and what they hold; who they are is nobody's business
        held = [getattr(each, HELD, None) for each in answer]
        return [{} if each is None else {HELD: int(each)} for each in held]
    if isinstance(answer, str | bytes) or answer is None:
        return _scalar(answer)
    if hasattr(answer, "__len__"):  # lists, and arrays of ctypes, which have no __iter__
        return [int(each) for each in answer]
    return _scalar(answer)


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, str) or value is None else int(value)


class Replay:
    """Stands in for the module pynvml and answers from a recording.

    Args:
        recording: what `Recorder.recording` returned, or a file's content.

    Raises:
        MachineError: it is no recording.
    """

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_InvalidArgument = NVMLError_InvalidArgument
    NVMLError_NoPermission = NVMLError_NoPermission

    def __init__(self, recording: dict[str, Any]) -> None:
        calls, pci = recording.get("calls"), recording.get("pci", {})
        if recording.get("format") != FORMAT or not isinstance(calls, dict):
            found = str(recording.get("format"))[:40]
            raise MachineError(f"expected a recording of format {FORMAT}, found {found!r}")
        if not isinstance(pci, dict):
            raise MachineError(f"expected PCI devices in a recording, found {type(pci).__name__}")
        self.calls = cast("dict[str, Any]", calls)
        for call, answer in self.calls.items():
            if not is_answer(call.partition("(")[0], answer):
                raise MachineError(f"expected the answer of a driver to {call[:80]!r}, found none")
        self.recording = recording
        self.devices = RecordedDevices(cast("dict[str, Any]", pci))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return functools.partial(self._answer, name)

    def _answer(self, name: str, *arguments: Any) -> Any:
        if name in NOTHING and call_key(name, ()) not in self.calls:
            return None
        answer: Any = self.calls.get(call_key(name, arguments), {"error": NOT_FOUND})
        code = _error_code(answer)
        if code is not None:
            raise ERRORS.get(code, NVMLError)(code)
        if name in FIELDS:
            return SimpleNamespace(**answer)
        if name == "nvmlDeviceGetFieldValues":
            value = SimpleNamespace(uiVal=answer[0]["uiVal"])
            return [SimpleNamespace(nvmlReturn=answer[0]["nvmlReturn"], value=value)]
        if name == PROCESSES:
            return [SimpleNamespace(usedGpuMemory=each.get(HELD)) for each in answer]
        return answer


def is_answer(name: str, answer: Any) -> bool:
    """Whether a driver could have answered a function so; anything else would surprise readers.

    >>> is_answer("nvmlDeviceGetCount", 8), is_answer("nvmlDeviceGetCount", "many")
    (True, False)
    """
    if isinstance(answer, dict) and "error" in answer:
        return _is_whole(cast("dict[str, Any]", answer)["error"])
    if name in NOTHING:
        return answer is None
    if name in FIELDS:
        return _is_structure(answer, FIELDS[name], OPTIONAL.get(name, ()))
    if name == "nvmlDeviceGetFieldValues":
        return _is_list(answer, 1) and _is_structure(answer[0], ("nvmlReturn", "uiVal"))
    if name in TEXTS:
        return isinstance(answer, str)
    if name in MASKS or name in PAIRS:
        length = 2 if name in PAIRS else None
        found = cast("list[Any]", answer)
        return _is_list(answer, length) and all(_is_whole(x, low=0) for x in found)
    if name == PROCESSES:
        found = cast("list[Any]", answer)
        return isinstance(answer, list) and all(_is_process(x) for x in found)
    if not _is_whole(answer):
        return False
    return name not in COUNTS or 0 <= cast("int", answer) <= MOST_GPUS


def _is_structure(answer: Any, fields: tuple[str, ...], optional: tuple[str, ...] = ()) -> bool:
    if not isinstance(answer, dict):
        return False
    found = set(cast("dict[str, Any]", answer))
    if not set(fields) <= found <= {*fields, *optional}:
        return False
    values = cast("dict[str, Any]", answer).items()
    return all(isinstance(v, str) if k == "busId" else _is_whole(v, low=0) for k, v in values)


def _is_process(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    held = cast("dict[str, Any]", value).get(HELD)
    return held is None or _is_whole(held, low=0)


def _is_list(answer: Any, length: int | None) -> bool:
    if not isinstance(answer, list):
        return False
    size = len(cast("list[Any]", answer))
    return size == length or (length is None and size <= MOST_WORDS)


def _is_whole(value: Any, low: int = -(2**63)) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**64


def _error_code(answer: Any) -> int | None:
    """The code of an answer that is an error."""
    if not isinstance(answer, dict):
        return None
    code: Any = cast("dict[str, Any]", answer).get("error")
    return None if code is None else int(code)


def load_replay(path: Path) -> Replay:
    """A recording from its file.

    Raises:
        MachineError: missing, not JSON, or no recording.
    """
    try:
        document = codec.parse(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise MachineError(f"{path}: expected an NVML recording, found {error}") from None
    if not isinstance(document, dict):
        raise MachineError(f"{path}: expected an NVML recording, found {type(document).__name__}")
    return Replay(cast("dict[str, Any]", document))
