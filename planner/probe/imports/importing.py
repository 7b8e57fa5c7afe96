"""`gnnplan machine import`: what other tools know of a machine, put onto a machine model.

Neither NCCL's topology nor nvbandwidth's rates say all that a plan needs, so a machine file or
preset supplies the rest; whatever stays of it is noted.
"""

from dataclasses import replace
from pathlib import Path

from planner.errors import MachineError
from planner.machine.model import Link, MachineModel
from planner.probe.imports.nccl import read_nccl
from planner.probe.imports.nvbandwidth import read_nvbandwidth, with_nvbandwidth
from planner.probe.links import gpu_links, gpu_parts, gpu_switches, nvlink_covers


def import_machine(path: Path, onto: MachineModel) -> MachineModel:
    """A machine from another tool's file.

    Args:
        path: NCCL topology (XML) or nvbandwidth output (JSON); told apart by the first character.
        onto: supplies what the file does not say.

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
        return _with_topology(path, onto)
    if first == b"{":
        tests, notes = read_nvbandwidth(path)
        return _named(with_nvbandwidth(onto, tests, notes), path, onto)
    raise MachineError(f"{path}: expected NCCL's topology XML or nvbandwidth's JSON, found neither")


def _named(machine: MachineModel, path: Path, onto: MachineModel) -> MachineModel:
    name = f"{onto.name} with {path.name}"
    return replace(machine, name=name, fingerprint=f"imported:{name}")


def _with_topology(path: Path, onto: MachineModel) -> MachineModel:
    """The file's GPUs, links and cliques; memory sizes, rates of cores and kernels from `onto`."""
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
    machine = replace(
        onto,
        processors=[p for p in onto.processors if p.kind == "cpu"]
        + [replace(p, model=first.model) for p in processors],
        memories=[m for m in onto.memories if m.kind != "device"]
        + [replace(m, provenance="derived") for m in memories],
        switches=gpu_switches(inventory),
        links=kept + own + [_like(link, old) for link in gpu_links(inventory)],
        cliques=covers[0],
        other_covers=covers[1:],
        notes=[
            *onto.notes,
            *notes,
            f"GPUs, links and cliques from {path.name}; memory of a GPU, rates of kernels and the "
            f"host from {onto.name}; host memory is taken as one, without its NUMA nodes' bridges",
        ],
    )
    return _named(machine, path, onto)


def _like(link: Link, old: dict[str, Link]) -> Link:
    """A link with the shares and latency that its kind has in the other machine."""
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
