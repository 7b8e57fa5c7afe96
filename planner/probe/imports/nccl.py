"""NCCL's topology file (NCCL_TOPO_DUMP_FILE) -> the inventory it describes.

    <cpu numaid> -> <pci busid link_speed link_width> (bridges, nested) -> <gpu dev sm>
                                                              <nvlink target count tclass> inside

It has no sizes of memories and no measured rate; both are taken from another machine.

A small XML tree without documents' own definitions: no DOCTYPE, no entities, bounded size.

The standard tree builders expand entities that a file defines, which lets a few bytes become
gigabytes; a topology needs none of that.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from planner.errors import MachineError
from planner.probe.gpu.nvlinks import NvLink, bus_key, pair_links
from planner.probe.gpu.nvml import Gpu, GpuPair, Inventory

MOST_BYTES = 16 << 20
MOST_DEPTH = 64


@dataclass(slots=True)
class Element:
    """A tag, its attributes and what is inside."""

    tag: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list["Element"])

    def all(self, tag: str) -> list["Element"]:
        """Elements of that tag anywhere inside, in order."""
        found: list[Element] = []
        for child in self.children:
            found += [child] if child.tag == tag else []
            found += child.all(tag)
        return found


def read_xml(path: Path) -> Element:
    """The root element of a file.

    Raises:
        MachineError: not well-formed, with a DOCTYPE, too large or too deep.
    """
    data = path.read_bytes()
    if len(data) > MOST_BYTES:
        raise MachineError(f"{path}: expected at most {MOST_BYTES} bytes of XML, found {len(data)}")
    growing = _Growing(path)
    parser = expat.ParserCreate()
    parser.StartElementHandler = growing.start
    parser.EndElementHandler = growing.end
    parser.StartDoctypeDeclHandler = growing.refuse
    parser.EntityDeclHandler = growing.refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # LookupError: its encoding
        raise MachineError(f"{path}: not XML ({' '.join(str(error).split())[:120]})") from None
    return growing.top.children[0]


class _Growing:
    """The tree while it is read; its methods are the parser's handlers."""

    def __init__(self, path: Path) -> None:
        self.top = Element(tag="", attributes={})
        self._path = path
        self._stack = [self.top]

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        if len(self._stack) > MOST_DEPTH:
            raise MachineError(f"{self._path}: expected XML of at most {MOST_DEPTH} levels")
        element = Element(tag=tag, attributes=attributes)
        self._stack[-1].children.append(element)
        self._stack.append(element)

    def end(self, _tag: str) -> None:
        """The innermost element ends."""
        self._stack.pop()

    def refuse(self, *_: object) -> None:
        """The file defines something of its own."""
        raise MachineError(f"{self._path}: expected XML without DOCTYPE and entities, found one")


GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""GT/s per lane -> PCI Express generation."""
SWITCH_CLASS = "0x0680"
"""PCI class of an NVSwitch begins so."""
LINK_BYTES_PER_SECOND = {6: 20e9}
"""NVLink, one direction, by compute capability; 25 GB/s from 7.0 on (NVIDIA's white papers)."""
MOST_GPUS, MOST_LINKS = 64, 36


def read_nccl(path: Path, memory_bytes: int) -> Inventory:
    """The GPUs of a topology file.

    Args:
        path: the XML file.
        memory_bytes: of each GPU; the file does not say.

    Raises:
        MachineError: not such a file.
    """
    root = read_xml(path)
    if root.tag != "system":
        raise MachineError(f"{path}: expected NCCL's <system>, found <{root.tag[:40]}>")
    gpus: list[Gpu] = []
    for cpu in [c for c in root.children if c.tag == "cpu"]:
        node = _whole(path, cpu, "numaid", -1)
        for pci in cpu.children:
            _walk(path, pci, [], None if node < 0 else node, gpus, memory_bytes)
    if not 0 < len(gpus) <= MOST_GPUS:
        raise MachineError(f"{path}: expected 1 to {MOST_GPUS} GPUs, found {len(gpus)}")
    gpus.sort(key=lambda gpu: gpu.index)
    if [gpu.index for gpu in gpus] != list(range(len(gpus))):
        raise MachineError(f"{path}: expected GPUs numbered from 0 (dev), each once")
    pairs = [_pair(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
    return Inventory(driver_version="", cuda_driver_version=None, gpus=gpus, pairs=pairs)


def _walk(
    path: Path,
    pci: Element,
    above: list[str],
    node: int | None,
    gpus: list[Gpu],
    memory_bytes: int,
) -> None:
    """Collect GPUs under a PCI device; `above` are the bridges over it."""
    if pci.tag != "pci" or len(above) > MOST_GPUS:
        return
    bus = bus_key(pci.attributes.get("busid", ""))
    for child in pci.children:
        if len(gpus) > MOST_GPUS:
            return
        if child.tag == "gpu":
            gpus.append(_gpu(path, pci, child, bus, above, node, memory_bytes))
        else:
            _walk(path, child, [*above, bus], node, gpus, memory_bytes)


def _gpu(
    path: Path,
    pci: Element,
    gpu: Element,
    bus: str,
    above: list[str],
    node: int | None,
    memory_bytes: int,
) -> Gpu:
    index, sm = _whole(path, gpu, "dev", -1), _whole(path, gpu, "sm", 0)
    speed = re.match(r"\s*([0-9.]+)\s*GT/s", pci.attributes.get("link_speed", ""))
    generation = GENERATIONS.get(_number(speed[1])) if speed else None
    width = _whole(path, pci, "link_width", 0) or None
    return Gpu(
        index=index,
        uuid=f"nccl-{bus}",
        name=f"GPU of compute capability {sm // 10}.{sm % 10}",
        bus_id=bus,
        compute_capability=(sm // 10, sm % 10) if sm else None,
        memory_bytes=memory_bytes,
        mig=None,
        numa_node=node,
        numa_conflict=None,
        pci_bridges=list(above),
        cpus=None,
        pcie_generation=generation,
        pcie_width=width,
        pcie_max_generation=generation,
        pcie_max_width=width,
        nvlinks=_links(path, gpu, sm),
        compute_processes=None,
    )


def _links(path: Path, gpu: Element, sm: int) -> list[NvLink]:
    rate = LINK_BYTES_PER_SECOND.get(sm // 10, 25e9)
    found: list[NvLink] = []
    for link in [c for c in gpu.children if c.tag == "nvlink"]:
        switch = link.attributes.get("tclass", "").startswith(SWITCH_CLASS)
        count = _whole(path, link, "count", 1)
        if count < 0 or len(found) + count > MOST_LINKS:
            raise MachineError(
                f"{path}: expected at most {MOST_LINKS} NVLinks of a GPU, found more"
            )
        for _ in range(count):
            found.append(
                NvLink(
                    index=len(found),
                    up=True,
                    peer_access=None,
                    remote_kind="switch" if switch else "gpu",
                    remote_bus_id=bus_key(link.attributes.get("target", "")),
                    bytes_per_second=rate,
                )
            )
    return found


def _pair(a: Gpu, b: Gpu) -> GpuPair:
    """NCCL lists links that are up; a switch joins all who have links to one."""
    count, switch = pair_links(a.nvlinks, a.bus_id, b.nvlinks, b.bus_id, nvlink_peer=True)
    return GpuPair(
        first=a.index,
        second=b.index,
        common_ancestor=None,
        p2p={},
        num_nvlinks=count,
        via_switch=switch,
    )


def _whole(path: Path, element: Element, name: str, missing: int) -> int:
    text = element.attributes.get(name)
    if text is None:
        return missing
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise MachineError(
            f"{path}: <{element.tag} {name}>: expected a number, found {text[:40]!r}"
        )
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
