"""Known machines as files: plan for one without owning it, or before probing.

A preset (`presets/NAME.yaml`) is either a machine model whose numbers were measured on such a
machine once (`dump_preset` writes one), or a box of GPUs: parts by name and how they are joined,
from which the machine is built (box_machine.py). Each number says where it is from. NAME:N asks for
N boxes joined by their network, where the preset allows several.
"""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml

from planner.errors import MachineError
from planner.machine import MachineModel, load_machine
from runtime import codec

FOLDER = Path(__file__).with_name("presets")


def list_presets() -> list[str]:
    """Names that `load_preset` knows, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def is_preset(name: str) -> bool:
    """Whether a name, with a number of boxes or without, is a preset's."""
    return name.partition(":")[0] in list_presets()


def find_machine(name: str) -> MachineModel:
    """A machine file, or a preset by name.

    Raises:
        MachineError: neither exists, or it is damaged.
    """
    if is_preset(name):
        return load_preset(name)
    if not Path(name).exists():
        raise unknown_machine(name)
    return load_machine(Path(name))


def unknown_machine(name: str) -> MachineError:
    """The error for a name that is neither a preset's nor a file's."""
    base, colon, count = name.partition(":")
    alike = difflib.get_close_matches(base.lower(), list_presets(), n=2, cutoff=0.5)
    guess = f"; did you mean {' or '.join(a + colon + count for a in alike)}?"
    guess = guess if alike else f" among {', '.join(list_presets())}"
    return MachineError(
        f"{name}: expected a preset's name or a machine file, found neither{guess} (`gnnplan "
        "machine list` names the presets, `gnnplan probe -o FILE` writes a file)"
    )


def load_preset(name: str) -> MachineModel:
    """A machine known by name, such as siton or perlmutter:8.

    Raises:
        MachineError: there is no such preset, its file is damaged, or it has no N boxes.
    """
    base, colon, count = name.partition(":")
    if base not in list_presets():
        raise unknown_machine(name)
    if colon and (not count.isdecimal() or int(count) < 1):
        raise MachineError(f"expected {base}:N with a number N of hosts, found {name!r}")
    text = (FOLDER / f"{base}.yaml").read_text()
    return parse_preset(text, base, num_hosts=int(count) if colon else 1)


def parse_preset(text: str, name: str, *, num_hosts: int = 1) -> MachineModel:
    """A preset from its YAML text.

    Raises:
        MachineError: not YAML, neither a machine model nor a box, or not for so many hosts.
    """
    try:
        plain: Any = yaml.safe_load(text)
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
    from planner.probe.box import read_box  # imported here: what a name is needs none of it
    from planner.probe.box_machine import box_machine

    box = read_box(plain, name)
    _refuse_hosts(name, num_hosts, box.most_hosts)
    return box_machine(box, name if num_hosts == 1 else f"{name}:{num_hosts}", num_hosts)


def _refuse_hosts(name: str, num_hosts: int, most: int) -> None:
    if num_hosts > most:
        raise MachineError(
            f"preset {name}: expected at most {most} host{'s' if most > 1 else ''}, "
            f"found {num_hosts}"
        )


def dump_preset(machine: MachineModel, *, name: str, notes: list[str]) -> str:
    """YAML text of a preset made of a machine's numbers, at three significant digits.

    Args:
        machine: probed while idle.
        name: of the preset; also its fingerprint, so that it never equals a real machine's.
        notes: where the numbers are from.
    """
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
