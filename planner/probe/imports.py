"""Other tools' files put onto a machine model (`gnnplan machine import`).

NCCL's topology file (NCCL_TOPO_DUMP_FILE) has GPUs and links, and no sizes or rates:

    <cpu numaid> -> <pci busid link_speed link_width> (bridges, nested) -> <gpu dev sm>
                                                              <nvlink target count tclass> inside

nvbandwidth's JSON (`nvbandwidth -j`) has rates, of copy engines and of kernels, which gathers are:

    host_to_device_memcpy_ce   device_to_host_memcpy_ce     a slot's copies, one GPU at a time
    host_to_device_memcpy_sm   device_to_host_memcpy_sm     the same by a kernel, as gathers read
    host_to_all_memcpy_ce                                   all at once: a switch's port
    device_to_device_memcpy_read_ce, ..._read_sm            peers: the row's GPU reads the column's

A machine file or preset supplies the rest. What stays of it, tests that failed, and links that the
machine does not have are noted.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast
from xml.etree import ElementTree

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import Link, MachineModel
from gnnplan.planner.probe.gpu.inventory import Gpu, GpuPair, Inventory, NvLink
from gnnplan.planner.probe.gpu.nvml import bus_key, pair_links
from gnnplan.planner.probe.links import gpu_links, gpu_parts, gpu_switches, nvlink_covers
from gnnplan.runtime import codec


def import_machine(path: Path, onto: MachineModel) -> MachineModel:
    """Return a machine from NCCL's topology (XML) or nvbandwidth's output (JSON).

    `onto` supplies what the file does not say.

    Raises:
        MachineError: the file is missing or is neither, or does not fit the machine.
    """
    if not path.is_file():
        raise MachineError(
            f"{path}: expected NCCL's topology XML or nvbandwidth's JSON, found none"
        )
    with path.open("rb") as file:
        first = file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if not onto.gpus:
        raise MachineError(f"expected a machine with GPUs to import onto, found {onto.name}")
    if first == b"<":
        machine = _with_topology(path, onto)
    elif first == b"{":
        machine = with_nvbandwidth(onto, *read_nvbandwidth(path))
    else:
        raise MachineError(
            f"{path}: expected NCCL's topology XML or nvbandwidth's JSON, found neither"
        )
    name = f"{onto.name} with {path.name}"
    return replace(machine, name=name, fingerprint=f"imported:{name}")


def _with_topology(path: Path, onto: MachineModel) -> MachineModel:
    """Take the file's GPUs, links and cliques; memory sizes and rates from `onto`."""
    first = onto.gpus[0]
    inventory = read_nccl(path, onto.memory(first.memory).capacity_bytes)
    processors, memories, notes = gpu_parts(inventory)
    covers = nvlink_covers(inventory)
    old = {link.name: link for link in onto.links}
    pattern = old.get(f"{first.name}.hbm")
    own = [
        replace(pattern, name=f"{p.name}.hbm", source=p.memory, target=p.name)
        for p in processors
        if pattern is not None
    ]
    gone = {m.name for m in onto.memories if m.kind == "device"} | {s.name for s in onto.switches}
    kept = [x for x in onto.links if x.source not in gone and x.target not in gone]
    return replace(
        onto,
        processors=[p for p in onto.processors if p.kind == "cpu"]
        + [replace(p, model=first.model) for p in processors],
        memories=[m for m in onto.memories if m.kind != "device"]
        + [replace(m, provenance="derived") for m in memories],
        switches=gpu_switches(inventory),
        links=kept + own + [_with_rates_of_kind(link, old) for link in gpu_links(inventory)],
        cliques=covers[0],
        other_covers=covers[1:],
        notes=[
            *onto.notes,
            *notes,
            f"GPUs, links and cliques from {path.name}; memory of a GPU, rates of kernels and the "
            f"host from {onto.name}; host memory is taken as one, without its NUMA nodes' bridges",
        ],
    )


def _with_rates_of_kind(link: Link, old: dict[str, Link]) -> Link:
    """Give a link the shares and latency that its kind has in the other machine."""
    kind = link.name.rstrip("0123456789").split(".")[0].rstrip("0123456789")
    for other in old.values():
        if other.name.split(".")[0].rstrip("0123456789") == kind and other.lanes:
            share = other.gather_bytes_per_second / other.bandwidth_bytes_per_second
            return replace(
                link,
                latency_seconds=other.latency_seconds,
                transaction_bytes=other.transaction_bytes,
                gather_bytes_per_second=link.bandwidth_bytes_per_second * share,
            )
    return link


MOST_XML_BYTES = 16 << 20
MOST_DEPTH = 64


class _StrictBuilder(ElementTree.TreeBuilder):
    """Builds a tree of few levels, from a file that defines nothing of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._depth = path, 0

    def start(self, tag: str, attrs: dict[str, str], /) -> ElementTree.Element:
        """Refuse an element below the lowest level."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise MachineError(f"{self._path}: expected XML of at most {MOST_DEPTH} levels")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        """Leave a level."""
        self._depth -= 1
        return super().end(tag)

    def doctype(self, *_: object) -> None:
        """Refuse definitions, of entities too."""
        raise MachineError(f"{self._path}: expected XML without DOCTYPE and entities, found one")


def read_xml(path: Path) -> ElementTree.Element:
    """Return the root of an XML file without DOCTYPE, neither too large nor too deep."""
    data = path.read_bytes()
    if len(data) > MOST_XML_BYTES:
        raise MachineError(
            f"{path}: expected at most {MOST_XML_BYTES} bytes of XML, found {len(data)}"
        )
    parser = ElementTree.XMLParser(target=_StrictBuilder(path))
    try:
        parser.feed(data)
        return parser.close()
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: its encoding
        raise MachineError(f"{path}: not XML ({' '.join(str(error).split())[:120]})") from None


GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCI Express generation by GT/s per lane."""
SWITCH_CLASS = "0x0680"
"""Beginning of the PCI class of an NVSwitch."""
LINK_BYTES_PER_SECOND = {6: 20e9}
"""Rate of NVLink, one direction, by compute capability; 25 GB/s from 7.0 on (NVIDIA's white
papers)."""
MOST_GPUS, MOST_LINKS = 64, 36


def read_nccl(path: Path, memory_bytes: int) -> Inventory:
    """Read the GPUs of a topology file; each has `memory_bytes`, which the file does not say."""
    root = read_xml(path)
    if root.tag != "system":
        raise MachineError(f"{path}: expected NCCL's <system>, found <{root.tag[:40]}>")
    try:
        found = (
            gpu
            for cpu in root.findall("cpu")
            for pci in cpu
            for gpu in _find_gpus(pci, [], _whole(cpu, "numaid", -1), memory_bytes)
        )
        gpus = list(itertools.islice(found, MOST_GPUS + 1))
    except ValueError as error:
        raise MachineError(f"{path}: {error}") from None
    if not 0 < len(gpus) <= MOST_GPUS:
        raise MachineError(f"{path}: expected 1 to {MOST_GPUS} GPUs, found {len(gpus)}")
    gpus.sort(key=lambda gpu: gpu.index)
    if [gpu.index for gpu in gpus] != list(range(len(gpus))):
        raise MachineError(f"{path}: expected GPUs numbered from 0 (dev), each once")
    pairs = [_pair(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    return Inventory(driver_version="", cuda_driver_version=None, gpus=gpus, pairs=pairs)


def _find_gpus(
    pci: ElementTree.Element, above: list[str], node: int, memory_bytes: int
) -> Iterator[Gpu]:
    """Yield the GPUs under a PCI device; `above` are the bridges over it."""
    if pci.tag != "pci":
        return
    bus = bus_key(pci.get("busid", ""))
    for child in pci:
        if child.tag == "gpu":
            yield _gpu(pci, child, above, node, memory_bytes)
        else:
            yield from _find_gpus(child, [*above, bus], node, memory_bytes)


def _gpu(
    pci: ElementTree.Element,
    gpu: ElementTree.Element,
    above: list[str],
    node: int,
    memory_bytes: int,
) -> Gpu:
    bus, index, sm = bus_key(pci.get("busid", "")), _whole(gpu, "dev", -1), _whole(gpu, "sm", 0)
    speed = re.match(r"\s*([0-9.]+)\s*GT/s", pci.get("link_speed", ""))
    generation = GENERATIONS.get(_number(speed[1])) if speed else None
    width = _whole(pci, "link_width", 0) or None
    return Gpu(
        index=index,
        uuid=f"nccl-{bus}",
        name=f"GPU of compute capability {sm // 10}.{sm % 10}",
        bus_id=bus,
        compute_capability=(sm // 10, sm % 10) if sm else None,
        memory_bytes=memory_bytes,
        mig=None,
        numa_node=None if node < 0 else node,
        numa_conflict=None,
        pci_bridges=list(above),
        cpus=None,
        pcie_generation=generation,
        pcie_width=width,
        pcie_max_generation=generation,
        pcie_max_width=width,
        nvlinks=_links(gpu, sm),
        compute_processes=None,
    )


def _links(gpu: ElementTree.Element, sm: int) -> list[NvLink]:
    rate = LINK_BYTES_PER_SECOND.get(sm // 10, 25e9)
    found: list[NvLink] = []
    for link in gpu.findall("nvlink"):
        switch = link.get("tclass", "").startswith(SWITCH_CLASS)
        count = _whole(link, "count", 1)
        if count < 0 or len(found) + count > MOST_LINKS:
            raise ValueError(f"expected at most {MOST_LINKS} NVLinks of a GPU, found more")
        for _ in range(count):
            found.append(
                NvLink(
                    index=len(found),
                    up=True,
                    peer_access=None,
                    remote_kind="switch" if switch else "gpu",
                    remote_bus_id=bus_key(link.get("target", "")),
                    bytes_per_second=rate,
                )
            )
    return found


def _pair(a: Gpu, b: Gpu) -> GpuPair:
    """Join two GPUs; NCCL lists links that are up, and a switch joins all who have links to one."""
    count, switch = pair_links(a.nvlinks, a.bus_id, b.nvlinks, b.bus_id, nvlink_peer=True)
    return GpuPair(
        first=a.index,
        second=b.index,
        common_ancestor=None,
        p2p={},
        num_nvlinks=count,
        via_switch=switch,
    )


def _whole(element: ElementTree.Element, name: str, missing: int) -> int:
    text = element.get(name)
    if text is None:
        return missing
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise ValueError(f"<{element.tag} {name}>: expected a number, found {text[:40]!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


GB = 1e9
MOST_JSON_BYTES = 64 << 20
Rows = list[list[float | None]]
Rates = dict[str, tuple[float | None, float | None]]
"""Bytes per second of copies and of kernels' reads, by link; None where not measured."""
SLOTS = {
    "host_to_device_memcpy_ce": ("h2d", 0),
    "device_to_host_memcpy_ce": ("d2h", 0),
    "host_to_device_memcpy_sm": ("h2d", 1),
    "device_to_host_memcpy_sm": ("d2h", 1),
}
PEERS = {"device_to_device_memcpy_read_ce": 0, "device_to_device_memcpy_read_sm": 1}
TOGETHER = "host_to_all_memcpy_ce"


def read_nvbandwidth(path: Path) -> tuple[dict[str, Rows], list[str]]:
    """Read passed tests by name, bytes per second by row and column, and notes."""
    if path.stat().st_size > MOST_JSON_BYTES:
        raise MachineError(
            f"{path}: expected nvbandwidth's JSON, found {path.stat().st_size} bytes"
        )
    try:
        document: Any = codec.parse(path.read_bytes())
        cases: Any = document["nvbandwidth"]["testcases"]
        found: dict[str, Rows] = {}
        notes: list[str] = []
        for case in cases:
            name, status = _word(case["name"]), _word(case.get("status", "Passed"))
            if status != "Passed":
                notes.append(f"nvbandwidth: {name} was {status.lower()[:40]}, left out")
                continue
            found[name] = _rows(path, name, case["bandwidth_matrix"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise MachineError(
            f"{path}: expected nvbandwidth's JSON (nvbandwidth -j), found {type(error).__name__}: "
            f"{reason}"
        ) from None
    if not found:
        raise MachineError(f"{path}: expected a passed test of nvbandwidth, found none")
    return found, notes


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a name, found {type(value).__name__}")
    return " ".join(value.split())[:80]


def _rows(path: Path, name: str, matrix: Any) -> Rows:
    rows = [[_rate(path, name, cell) for cell in row] for row in cast("list[list[Any]]", matrix)]
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise MachineError(f"{path}: {name}: expected a matrix of bandwidths")
    return rows


def _rate(path: Path, name: str, cell: Any) -> float | None:
    if cell is None or cell == "N/A":
        return None
    value = float(cell)
    if not (math.isfinite(value) and 0 <= value < 1e6):
        raise MachineError(f"{path}: {name}: expected GB/s, found {value!r}")
    return value * GB or None


def with_nvbandwidth(
    machine: MachineModel, tests: dict[str, Rows], notes: list[str]
) -> MachineModel:
    """Put measured rates onto the links that the tests, of as many GPUs, crossed."""
    gpus = len([g for g in machine.gpus if g.host == 0])
    for name, rows in tests.items():
        if name in {*SLOTS, *PEERS, TOGETHER} and len(rows[0]) != gpus:
            raise MachineError(
                f"nvbandwidth: {name}: expected {gpus} GPUs (those of {machine.name}), found "
                f"{len(rows[0])}"
            )
    known = {link.name: link for link in machine.links}
    rates: Rates = {}
    for name, (way, kind) in SLOTS.items():
        for g, value in enumerate(tests.get(name, [[]])[0]):
            _note_rate(rates, f"pcie{g}.{way}", kind, value)
    for name, kind in PEERS.items():
        for reader, row in enumerate(tests.get(name, [])):
            for owner, value in enumerate(row):
                _note_rate(rates, f"nvlink.gpu{owner}.gpu{reader}", kind, value)
            ports = [v for v in row if v is not None]
            for port in (f"nvlink.nvswitch0.gpu{reader}", f"nvlink.gpu{reader}.nvswitch0"):
                _note_rate(rates, port, kind, median(ports) if ports else None)
    for name, rate in _port_rates(machine, tests.get(TOGETHER)).items():
        _note_rate(rates, name, 0, rate)
    links = [
        _measured_link(link, rates[n]) if (n := link.name) in rates else link
        for link in known.values()
    ]
    used = sorted(set(rates) & set(known))
    words = f"nvbandwidth: measured {', '.join(used) if used else 'no link of this machine'}"
    return replace(
        machine,
        links=links,
        sources={**machine.sources, **dict.fromkeys(used, "nvbandwidth on the machine")},
        notes=[*machine.notes, *notes, words],
    )


def _note_rate(rates: Rates, link: str, kind: int, value: float | None) -> None:
    if value is None:
        return
    copies, reads = rates.get(link, (None, None))
    rates[link] = (value, reads) if kind == 0 else (copies, value)


def _port_rates(machine: MachineModel, rows: Rows | None) -> dict[str, float]:
    """Return what each switch's port carried while all its GPUs copied, if that was the limit."""
    if rows is None:
        return {}
    found: dict[str, float] = {}
    for switch in [s for s in machine.switches if s.kind == "pcie"]:
        below = [x.name for x in machine.links if x.source == switch.name and "pcie" in x.name]
        values = [
            rows[0][int(name.removeprefix("pcie").split(".")[0])]
            for name in below
            if name.startswith("pcie")
        ]
        if values and None not in values:
            found[f"{switch.name}.h2d"] = sum(v for v in values if v is not None)
    return found


def _measured_link(link: Link, rates: tuple[float | None, float | None]) -> Link:
    copies, reads = rates
    share = link.gather_bytes_per_second / link.bandwidth_bytes_per_second
    bandwidth = link.bandwidth_bytes_per_second if copies is None else copies
    return replace(
        link,
        bandwidth_bytes_per_second=bandwidth,
        # Where kernels' reads were not measured they keep their share of the copies.
        gather_bytes_per_second=bandwidth * share if reads is None else reads,
        provenance="measured" if copies is not None else link.provenance,
    )
