"""Faults of how GPUs are joined, from what the driver says; and changes since a machine file.

`faults` looks at one inventory: links that are down, slots at part of their width, sources that
contradict each other. `changes` compares an inventory with a machine file made earlier: its plans
rest on those links. Capability bits are facts here, never rates.
"""

from collections import Counter
from dataclasses import dataclass, replace

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import Link, MachineModel, Memory
from gnnplan.planner.probe.gpu.inventory import (
    CUDA_DENIES,
    Gpu,
    Inventory,
    busy_text,
    unknown_slice_text,
)
from gnnplan.planner.probe.links import (
    gpu_links,
    gpu_parts,
    nvlink_cliques,
    pcie_groups,
    pcie_width,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it should be."""

    check: str
    """mig | pcie | nvlink | numa | gpu."""
    found: str
    advice: str


def faults(inventory: Inventory) -> list[Fault]:
    """List an inventory's faults, GPUs in order."""
    found: list[Fault] = []
    for gpu in inventory.gpus:
        found += _mig_faults(gpu) + _slot_faults(gpu) + _link_faults(gpu)
    return found + _fewer_link_faults(inventory) + _numa_faults(inventory)


def _mig_faults(gpu: Gpu) -> list[Fault]:
    if not gpu.mig or gpu.slice_of:
        return []
    advice = (
        "turn MIG off (nvidia-smi -mig 0), or let the driver name the slices: a newer "
        "driver and nvidia-ml-py, and permission to see them"
    )
    return [Fault("mig", unknown_slice_text(gpu), advice)]


def _slot_faults(gpu: Gpu) -> list[Fault]:
    width, full = pcie_width(gpu), gpu.pcie_max_width or 0
    if not width or width >= full:
        return []
    advice = "seat the card again, or give its slot all lanes in the firmware's settings"
    return [Fault("pcie", f"gpu{gpu.index}: {width} of {full} PCIe lanes in use", advice)]


def _link_faults(gpu: Gpu) -> list[Fault]:
    down = [link.index for link in gpu.nvlinks or [] if link.up is False]
    if not down:
        return []
    found = f"gpu{gpu.index}: NVLinks {', '.join(map(str, down))} are down"
    advice = "seat the bridge or board again; see nvidia-smi nvlink --status"
    return [Fault("nvlink", found, advice)]


def _fewer_link_faults(inventory: Inventory) -> list[Fault]:
    """Return GPUs with fewer links up than most of their model."""
    by_model: dict[str, list[Gpu]] = {}
    for gpu in inventory.gpus:
        by_model.setdefault(gpu.name, []).append(gpu)
    found: list[Fault] = []
    for model, alike in by_model.items():
        counts = {g.index: _links_up(g) for g in alike if g.nvlinks is not None}
        if not counts:
            continue
        usual = max(Counter(counts.values()).items(), key=lambda item: (item[1], item[0]))[0]
        advice = "a link or bridge is missing; see nvidia-smi nvlink --status"
        found += [
            Fault("nvlink", f"gpu{index}: {count} NVLinks up, {usual} on other {model}", advice)
            for index, count in counts.items()
            if count < usual
        ]
    return found


def _links_up(gpu: Gpu) -> int:
    return sum(bool(link.up) for link in gpu.nvlinks or [])


def _numa_faults(inventory: Inventory) -> list[Fault]:
    advice = "firmware and driver disagree; left unknown, measure which is nearer"
    found: list[Fault] = []
    for g in inventory.gpus:
        if g.numa_conflict is not None:
            nvml, system = g.numa_conflict
            words = f"gpu{g.index}: NVML says NUMA node {nvml}, the system {system}"
            found.append(Fault("numa", words, advice))
    advice = "the firmware's NUMA table is wrong; measure which node is nearer"
    node = {g.index: g.numa_node for g in inventory.gpus}
    for group in pcie_groups(inventory):
        if len({node[g] for g in group} - {None}) > 1:
            words = ", ".join(f"gpu{g} on {node[g]}" for g in group)
            found.append(Fault("numa", f"one PCIe switch, several NUMA nodes: {words}", advice))
    return found


def changes(machine: MachineModel, inventory: Inventory) -> list[Fault]:
    """List differences from a machine file, by UUID: GPUs, NUMA nodes, lanes, links, cliques."""
    now, _, _ = gpu_parts(inventory)
    before = {p.uuid: p for p in machine.gpus}
    after = {p.uuid: p for p in now}
    advice = "probe the machine again, or mend it; plans made for the file do not hold"
    found = [
        Fault("gpu", f"{p.name} ({p.uuid}) is gone", advice)
        for uuid, p in before.items()
        if uuid not in after
    ]
    found += [
        Fault("gpu", f"{p.name} ({p.uuid}) is new", advice)
        for uuid, p in after.items()
        if uuid not in before
    ]
    if found:
        return found
    called = {p.name: before[uuid].name for uuid, p in after.items()}
    for uuid, p in after.items():
        old = before[uuid]
        if old.numa_node != p.numa_node:
            words = f"{old.name}: NUMA node {old.numa_node} before, {p.numa_node} now"
            found.append(Fault("numa", words, advice))
    found += _changed_links(machine, gpu_links(inventory), called, advice)
    groups = sorted(sorted(called[g] for g in clique) for clique in nvlink_cliques(inventory))
    if groups != sorted(sorted(clique) for clique in machine.cliques):
        words = f"cliques {_clique_text(machine.cliques)} before, {_clique_text(groups)} now"
        found.append(Fault("nvlink", words, advice))
    if any(CUDA_DENIES in note for note in machine.notes):  # what the driver sees stands for less
        found = [each for each in found if each.check != "nvlink"]
    return found


def _changed_links(
    machine: MachineModel, now: list[Link], called: dict[str, str], advice: str
) -> list[Fault]:
    """Compare links of GPUs by their ends, as the file names the GPUs."""

    def end(name: str) -> str:
        gpu, dot, rest = name.partition(".")
        return called.get(gpu, gpu) + dot + rest

    def of_gpus(links: list[Link], rename: bool) -> dict[tuple[str, str], Link]:
        ends = {
            (end(x.source), end(x.target)) if rename else (x.source, x.target): x for x in links
        }
        return {k: x for k, x in ends.items() if any(e.startswith(("gpu", "plx")) for e in k)}

    def fault(link: Link, words: str) -> Fault:
        check = "nvlink" if link.name.startswith("nvlink") else "pcie"
        return Fault(check, f"{link.name}: {words}", advice)

    before = of_gpus([x for x in machine.links if x.lanes], rename=False)
    after = of_gpus(now, rename=True)
    found: list[Fault] = []
    for ends, link in sorted(before.items()):
        lanes = after[ends].lanes if ends in after else 0
        if lanes != link.lanes:
            found.append(fault(link, f"{link.lanes} lanes or links before, {lanes} now"))
    return found + [
        fault(after[ends], "was not there before") for ends in sorted(after.keys() - before.keys())
    ]


def _clique_text(cliques: list[list[str]]) -> str:
    return " ".join("+".join(sorted(clique)) for clique in sorted(cliques))


OTHERS_NOTE = (
    "GPUs of this machine are others than those that were probed, on an equal machine: planned "
    "with by number"
)


def with_gpus_of_here(
    machine: MachineModel, inventory: Inventory | None, fingerprint: str
) -> MachineModel:
    """Give a machine that was probed on an equal host this host's GPUs; else leave it as it is.

    `fingerprint` is this host's.
    """
    now = [] if inventory is None else inventory.gpus
    before = [gpu for gpu in machine.gpus if gpu.host == 0]
    if machine.fingerprint != fingerprint or {g.uuid for g in now} & {g.uuid for g in before}:
        return machine
    if not now or [gpu.name for gpu in now] != [gpu.model for gpu in before]:
        return machine
    uuids = {old.name: new.uuid for old, new in zip(before, now, strict=True)}
    processors = [replace(p, uuid=uuids.get(p.name, p.uuid)) for p in machine.processors]
    return replace(machine, processors=processors, notes=[*machine.notes, OTHERS_NOTE])


def refuse_changed(machine: MachineModel, inventory: Inventory | None) -> None:
    """Refuse to plan for a probed machine that is no longer as it was probed.

    Presets, machines without GPUs and machines that are not this one are let through.

    Raises:
        MachineError: names the first difference and how many there are.
    """
    if machine.provenance != "measured" or not machine.gpus or inventory is None:
        return
    here = {gpu.uuid for gpu in inventory.gpus}
    if not here & {gpu.uuid for gpu in machine.gpus}:
        return
    found = changes(machine, inventory)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise MachineError(
            f"machine {machine.name}: expected it as it was probed, found {found[0].found}{more}; "
            "run `gnnplan doctor --machine FILE` and probe again"
        )


def with_free_memory(machine: MachineModel, inventory: Inventory | None) -> MachineModel:
    """Limit each GPU's memory to what is free of it now, noted where that is less."""
    free = {gpu.uuid: gpu for gpu in ([] if inventory is None else inventory.gpus)}
    now: dict[str, Gpu] = {p.memory: free[p.uuid] for p in machine.gpus if p.uuid in free}
    memories, notes = list[Memory](), list(machine.notes)
    for memory in machine.memories:
        gpu = now.get(memory.name)
        left = memory.capacity_bytes if gpu is None else gpu.capacity_bytes
        if gpu is not None and left is not None and left < memory.capacity_bytes:
            memory = replace(memory, capacity_bytes=max(1, left))
            notes.append(busy_text(gpu))
        memories.append(memory)
    return replace(machine, memories=memories, notes=list(dict.fromkeys(notes)))
