"""Known machines as files, to plan for one without owning it or before probing.

A preset (`presets/NAME.yaml`) is either a machine model whose numbers were measured on such a
machine once (`dump_preset` writes one), or a box of GPUs: parts by name and how they are joined,
from which the machine is built (box.py). Each number says where it is from. NAME:N asks for N boxes
joined by their network, where the preset allows several. Instances of clouds, such as g5.8xlarge,
are boxes that `parts/instances.yaml` lists by family.
"""

import functools
import math
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import (
    MachineModel,
    Provenance,
    Table,
    load_machine,
    make_table,
    num_hosts,
)
from gnnplan.planner.units import Progress
from gnnplan.runtime import codec
from gnnplan.runtime.errors import did_you_mean

PRESETS_FOLDER = Path(__file__).with_name("presets")


def list_presets() -> list[str]:
    """List the names that `load_preset` knows, sorted."""
    return sorted(_names())


@functools.cache
def _names() -> frozenset[str]:
    files = [path.stem for path in PRESETS_FOLDER.glob("*.yaml")]
    return frozenset(files).union(*(family["sizes"] for family in _families().values()))


def is_preset(name: str) -> bool:
    """Tell whether a name, with a number of boxes or without, is a preset's."""
    return name.partition(":")[0] in _names()


def find_machine(name: str) -> MachineModel:
    """Return a preset by name, or read a machine file; MachineError where neither is whole."""
    if is_preset(name):
        return load_preset(name)
    if not Path(name).exists():
        raise unknown_machine(name)
    return load_machine(Path(name))


def choose_machine(
    name: str | None,
    graph: Path | None = None,
    *,
    progress: Progress | None = None,
    seconds: float | None = None,
) -> MachineModel:
    """Find the named machine, or this one: probed once and cached by its fingerprint.

    Args:
        name: preset or machine file; None: this machine.
        graph: dataset whose every value is checked before this machine is probed.
        progress: called with what is measured and the share done, 0 to 1.
        seconds: seconds of a quick probe, which then suffices; None for a full one.

    Raises:
        MachineError: it was probed here and its GPUs are no longer joined as they were.
        InputError: GNNPLAN_CACHE names a folder that cannot be written.
    """
    from gnnplan.planner.array_cache import cache_folder  # on use, as numpy: names need neither

    cache_folder()
    if name is not None:
        return _as_it_is_now(find_machine(name))
    from gnnplan.planner.probe.probe import cached_machine, load_or_probe
    from gnnplan.runtime.graph.dataset import open_graph

    quick = seconds is not None
    if graph is not None and cached_machine(quick=quick) is None:
        open_graph(graph)
    return _as_it_is_now(load_or_probe(quick=quick, progress=progress, seconds=seconds))


def _as_it_is_now(machine: MachineModel) -> MachineModel:
    """Return a probed machine with the GPUs that CUDA shows now, and their free memory."""
    if not machine.gpus or machine.provenance != "measured":
        return machine
    from gnnplan.planner.probe.gpu.machine import with_visible_gpus
    from gnnplan.planner.probe.gpu.nvml import inventory
    from gnnplan.planner.probe.topology import refuse_changed, with_free_memory, with_gpus_of_here
    from gnnplan.runtime.device import VARIABLE, machine_fingerprint

    found = inventory()
    machine = with_gpus_of_here(machine, found, machine_fingerprint())
    shown, probed = machine, found
    if VARIABLE in os.environ and num_hosts(machine) == 1:
        uuids = [gpu.uuid for gpu in machine.gpus]
        probed = inventory(environment={VARIABLE: ",".join(uuids)}) or found
        if found is not None and probed is not None and len(probed.gpus) == len(uuids):
            shown = with_visible_gpus(machine, found)
    # The whole box is as it was probed, of which CUDA may show less now.
    refuse_changed(machine, found if shown == machine else probed)
    return with_free_memory(shown, found)


def known_machine(name: str | None, *, quick: bool = True) -> MachineModel | None:
    """Find the named machine, or this one as it was probed; None where it never was.

    `quick` says whether a quick probe will do.

    Raises:
        MachineError, InputError: as `choose_machine`.
    """
    from gnnplan.planner.array_cache import cache_folder
    from gnnplan.planner.probe.probe import cached_machine

    cache_folder()
    found = cached_machine(quick=quick) if name is None else find_machine(name)
    return None if found is None else _as_it_is_now(found)


LIKE = "cpu-2core"
"""Preset whose rates stand for cores that were not measured."""


def machine_at_once() -> MachineModel:
    """Return this machine without measuring it: as it was probed, else at rates of such hardware.

    Its parts are those that the system and NVML name (DEC-145).

    Raises:
        MachineError, InputError: as `choose_machine`.
    """
    from gnnplan.planner.array_cache import cache_folder
    from gnnplan.planner.probe.gpu.nvml import inventory
    from gnnplan.planner.probe.links import host_memories, host_processor, with_rates_of_parts
    from gnnplan.runtime.device import machine_facts, machine_fingerprint

    scratch, known = cache_folder(), known_machine(None)
    if known is not None:
        return with_rates(known)
    facts, like, found = machine_facts(), load_preset(LIKE), inventory()
    cores = replace(
        like,
        name=platform.node() or "this-machine",
        fingerprint=machine_fingerprint(facts),
        provenance="derived",
        processors=[host_processor(facts)],
        memories=host_memories(facts, scratch),
        tables={name: on_cores(table, facts["cores"]) for name, table in like.tables.items()},
        versions=facts["versions"],
        notes=[f"Nothing was measured here: rates of preset {LIKE} for {facts['cpu_model']}"],
    )
    cores = with_rates(cores)
    if found is None or not found.gpus:
        return cores
    return with_rates_of_parts(cores, found)


def with_rates(machine: MachineModel) -> MachineModel:
    """Add the rates of this machine's cores that a training has learnt, where no probe has them.

    A machine file of another machine stays as it is.
    """
    from gnnplan.planner.array_cache import cache_folder
    from gnnplan.planner.probe.computing import known_rates
    from gnnplan.runtime.device import machine_fingerprint

    if "core_flops" in machine.tables or machine.fingerprint != machine_fingerprint():
        return machine
    return machine.with_tables(known_rates(cache_folder()))


MORE_RANKS = 0.25
"""Share by which each doubling of the ranks lengthens an exchange of equal shares (assumed)."""


def on_cores(table: Table, cores: int) -> Table:
    """Return a table of two cores for a machine of more: its two ranks, and as many as cores.

    What more ranks than cores take is left out; exchanges of more ranks pass more bytes and meet
    more often.

    >>> from gnnplan.planner.machine.model import make_table
    >>> found = on_cores(make_table("seconds", {"ranks": [2, 4]}, [1.0, 9.0], 0.1), 8)
    >>> found.points, found.values
    ([[2.0, 8.0]], [1.0, 2.625])
    """
    import numpy as np

    points = [list(axis) for axis in table.points]
    at = table.axes.index("ranks") if "ranks" in table.axes else None
    if cores <= 2 or at is None or 2.0 not in points[at]:
        return table
    kept = [place for place, ranks in enumerate(points[at]) if ranks <= 2]
    values = np.asarray(table.values).reshape([len(axis) for axis in points]).take(kept, at)
    bytes_passed, meetings = 2 * (cores - 1) / cores, 1 + MORE_RANKS * math.log2(cores / 2)
    longer = bytes_passed * meetings if table.unit.endswith("seconds") else 1.0
    points[at] = [*(points[at][place] for place in kept), float(cores)]
    every = np.concatenate([values, values.take([-1], at) * longer], axis=at)
    return replace(table, points=points, values=every.ravel().tolist())


def unknown_machine(name: str) -> MachineError:
    """Return the error for a name that is neither a preset's nor a file's."""
    _, colon, count = name.partition(":")
    guess = did_you_mean(name, [known + colon + count for known in list_presets()])
    guess = guess or f" among {', '.join(list_presets())}"
    return MachineError(
        f"{name}: expected a preset's name or a machine file, found neither{guess} (`gnnplan "
        "machine list` names the presets, `gnnplan probe -o FILE` writes a file)"
    )


def load_preset(name: str) -> MachineModel:
    """Return a machine known by name, such as siton or perlmutter:8, or raise MachineError."""
    base, colon, count = name.partition(":")
    if base not in _names():
        raise unknown_machine(name)
    if colon and (not count.isdecimal() or int(count) < 1):
        raise MachineError(f"expected {base}:N with a number N of hosts, found {name!r}")
    hosts, path = int(count) if colon else 1, PRESETS_FOLDER / f"{base}.yaml"
    if not path.exists():
        return _from_box(instance_box(base), base, hosts)
    return parse_preset(path.read_text(), base, num_hosts=hosts)


def on_hosts(machine: MachineModel, hosts: int | None) -> MachineModel:
    """Return a preset of one host on as many as are asked for, any other machine as it is.

    Raises:
        MachineError: the preset names no network between hosts, or there are too many.
    """
    if (hosts or 1) <= 1 or machine.name not in _names():
        return machine
    if machine != load_preset(machine.name):
        return machine  # a file that was made of a preset is a machine of its own
    return load_preset(f"{machine.name}:{hosts}")


def load_yaml(text: str) -> Any:
    """Read YAML without types of its own, by the parser in C where there is one."""
    import yaml  # on use: the command line starts without it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(text, Loader=loader)


def parse_preset(text: str, name: str, *, num_hosts: int = 1) -> MachineModel:
    """Return a preset from its YAML text, or raise MachineError."""
    import yaml  # on use: the command line starts without it

    try:
        plain: Any = load_yaml(text)
    except yaml.YAMLError as error:
        raise MachineError(f"preset {name}: not YAML ({' '.join(str(error).split())})") from None
    if isinstance(plain, dict) and "kind" in plain:
        return _from_box(cast("dict[str, Any]", plain), name, num_hosts)
    _refuse_hosts(name, num_hosts, 1)
    try:
        machine = codec.decode(MachineModel, plain)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise MachineError(f"preset {name}: not a machine model ({reason})") from None
    if machine.provenance != "preset":
        raise MachineError(f"preset {name}: expected provenance preset, found {machine.provenance}")
    return machine


def _from_box(plain: dict[str, Any], name: str, num_hosts: int) -> MachineModel:
    from gnnplan.planner.probe.box import box_machine, read_box  # on use: names need none of it

    box = read_box(plain, name)
    _refuse_hosts(name, num_hosts, box.most_hosts)
    return box_machine(box, name if num_hosts == 1 else f"{name}:{num_hosts}", num_hosts)


def _refuse_hosts(name: str, num_hosts: int, most: int) -> None:
    if num_hosts <= most:
        return
    alone = "one host, since it names no network between hosts"
    wanted = f"at most {most} hosts" if most > 1 else alone
    raise MachineError(
        f"preset {name}: expected {wanted}, found {num_hosts}; ask for fewer --hosts"
    )


def dump_preset(machine: MachineModel, *, name: str, notes: list[str]) -> str:
    """Return the YAML text of a machine's numbers as a preset, at three significant digits.

    Its name is also its fingerprint, so that it never equals a real machine's. `notes` are its
    sources.
    """
    import yaml  # on use: the command line starts without it

    tables = {
        key: replace(table, provenance="preset", values=[_rounded(v) for v in table.values])
        for key, table in machine.tables.items()
    }
    tables = {k: replace(t, spread=_rounded(t.spread)) for k, t in tables.items()}
    links = [
        replace(
            link,
            provenance="preset",
            latency_seconds=_rounded(link.latency_seconds),
            bandwidth_bytes_per_second=_rounded(link.bandwidth_bytes_per_second),
        )
        for link in machine.links
    ]
    preset = replace(
        machine,
        name=name,
        fingerprint=f"preset:{name}",
        provenance="preset",
        memories=[replace(memory, provenance="preset") for memory in machine.memories],
        links=links,
        tables=tables,
        noise=_rounded(machine.noise),
        extent="",
        notes=notes,
    )
    return yaml.safe_dump(codec.to_plain(preset), sort_keys=True, default_flow_style=None)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


PARTS_FOLDER = Path(__file__).with_name("parts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number of a data sheet, a paper or an assumption."""

    value: float
    provenance: Provenance
    source: str

    def times(self, other: "Number") -> "Number":
        """Return the product of two numbers; preset only where both are."""
        both = self.provenance == other.provenance == "preset"
        return Number(
            value=self.value * other.value,
            provenance="preset" if both else "derived",
            source=f"{self.source}; {other.source}",
        )

    def scaled(self, factor: float | int) -> "Number":
        """Return the number times a factor (links side by side)."""
        return Number(value=self.value * factor, provenance=self.provenance, source=self.source)


Part = dict[str, Number]
"""Numbers of one part by name."""


def read_number(value: Any, where: str) -> Number:
    """Read a number from its YAML form, [value, provenance, source]; else MachineError."""
    match value:
        case [int() | float() as number, "preset" | "derived" as provenance, str() as source] if (
            number > 0 and source
        ):
            return Number(value=float(number), provenance=provenance, source=source)
        case _:
            raise MachineError(
                f"{where}: expected [a positive number, preset or derived, its source], "
                f"found {value!r}"
            )


@functools.cache
def _file(name: str) -> dict[str, Any]:
    return load_yaml((PARTS_FOLDER / f"{name}.yaml").read_text())


GIB = 1 << 30


def _families() -> dict[str, Any]:
    """Return the families of cloud instances."""
    return _file("instances")


def instance_box(name: str) -> dict[str, Any]:
    """Return a cloud instance as a preset's box: its share of a host, its GPUs and its network.

    Half of a host's cores or less lie on one socket; NVLinks to GPUs it lacks fall away.
    """
    family = next(found for found in _families().values() if name in found["sizes"])
    cores, gibibytes, gpus, gigabits = family["sizes"][name]
    whole, source = load_part("hosts", family["host"])[1], f"{family['source']}, {name}"
    sockets, share = (1 if 2 * cores <= whole["cores"].value else 2), cores / whole["cores"].value
    dram = whole["dram_bytes_per_second"].scaled(min(1.0, 2 * share))
    none = {"source": f"{family['source']}: no NVLink", "provenance": "preset"}
    links: dict[str, Any] = {"pairs": [], **family.get("nvlinks", none)}
    width, why = family["pcie_group"]
    latency, over = (1.5e-5, "EFA") if family.get("efa") else (5e-5, "TCP")
    said = f"{family['source']}, {name}: {gigabits} Gbit/s"
    return {
        "kind": "box",
        "gpu": family["gpu"],
        "host": family["host"],
        "num_gpus": gpus,
        "host_numbers": {
            "cores": [cores, "preset", f"{source}: {2 * cores} vCPUs, two of a core"],
            "memory_bytes": [gibibytes * GIB, "preset", f"{source}: {gibibytes} GiB"],
            "sockets": [sockets, "derived", "assumed: half of a host or less is on one socket"],
            "dram_bytes_per_second": [dram.value, "derived", f"{dram.source}; share of the cores"],
        },
        "nvlinks": {**links, "pairs": [pair for pair in links["pairs"] if max(pair[:2]) < gpus]},
        "pcie_switches": {
            "source": why,
            "provenance": "derived",
            "groups": [list(range(g, min(g + width, gpus))) for g in range(0, gpus, width)],
        },
        "numa": {
            "source": "assumed: as many GPUs on each socket",
            "provenance": "derived",
            "nodes": [g * sockets // gpus for g in range(gpus)],
        },
        "network": {
            "cards": 1,
            "bytes_per_second": [gigabits * 1.25e8, "preset", said],
            "share": [0.85, "derived", "assumed: packet headers and flow control"],
            "latency_seconds": [latency, "derived", f"assumed: a message over {over}"],
        },
        "notes": [f"{name}: a share of a host ({source}); small sizes get its network in bursts."],
    }


def load_part(kind: str, name: str) -> tuple[str, Part]:
    """Return model name and numbers of a part; `kind` is gpus or hosts."""
    parts = _file(kind)
    if name not in parts:
        known = ", ".join(sorted(parts))
        raise MachineError(f"expected a part among {known} in {kind}.yaml, found {name!r}")
    numbers = {key: value for key, value in parts[name].items() if key != "model"}
    return str(parts[name]["model"]), {
        key: read_number(value, f"{kind}.yaml: {name}: {key}") for key, value in numbers.items()
    }


def load_effects() -> Part:
    """Return the shares of data sheets' bandwidths that are reached, and costs that none states."""
    return {k: read_number(v, f"effects.yaml: {k}") for k, v in _file("effects").items()}


def find_gpu(model: str, memory_bytes: int) -> tuple[str, Part, bool]:
    """Return name and numbers of the part that a GPU is, and whether its model is known.

    Of a model that is not known, the slowest part with half of its memory or more stands for it.
    """
    for name, part in _file("gpus").items():
        if part["model"] == model:
            return name, load_part("gpus", name)[1], True
    every = {name: load_part("gpus", name)[1] for name in _file("gpus")}
    alike = {n: p for n, p in every.items() if 2 * p["memory_bytes"].value >= memory_bytes}
    found = min(alike or every, key=lambda name: every[name]["flops_per_second"].value)
    return found, every[found], False


def gpu_tables(
    gpu: Part, effects: Part, more: dict[str, tuple[str, Number]]
) -> tuple[dict[str, Table], dict[str, str]]:
    """Return the tables of a GPU's part and of its host, and the source of each by name."""
    found = {
        "gpu_flops": ("flops_per_second", gpu["flops_per_second"].times(effects["matmul_share"])),
        "gpu_kernel": ("seconds", effects["kernel_seconds"]),
        "gpu_start": ("seconds", effects["start_seconds"]),
        "gpu_message": ("seconds", effects["message_latency_seconds"]),
        "gpu_context": ("bytes", effects["context_bytes"]),
        "gpu_process": ("bytes", effects["process_bytes"]),
        "process_start": ("seconds", effects["process_seconds"]),
    }
    if "tf32_flops_per_second" in gpu:
        rate = gpu["tf32_flops_per_second"].times(effects["matmul_share"])
        found["gpu_flops_tf32"] = ("flops_per_second", rate)
    found |= more
    spread = effects["spread"].value
    tables = {
        name: make_table(unit, {"ranks": [1]}, [number.value], spread, provenance=number.provenance)
        for name, (unit, number) in found.items()
    }
    return tables, {name: number.source for name, (_, number) in found.items()}
