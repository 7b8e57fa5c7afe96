"""Known machines as files: plan for one without owning it, or before probing.

A preset is a machine model in YAML (`presets/NAME.yaml`), each number measured on such a machine
once and marked `preset`; its notes say where from. `dump_preset` writes one from a probed machine.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from planner.errors import MachineError
from planner.machine import MachineModel
from runtime import codec

FOLDER = Path(__file__).with_name("presets")


def list_presets() -> list[str]:
    """Names that `load_preset` knows, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_preset(name: str) -> MachineModel:
    """A machine known by name.

    Raises:
        MachineError: there is no such preset, or its file is damaged.
    """
    if name not in list_presets():
        raise MachineError(
            f"expected a preset among {', '.join(list_presets())}, found {name!r}; "
            "or give a machine file written by `gnnplan probe`"
        )
    return parse_preset((FOLDER / f"{name}.yaml").read_text(), name)


def parse_preset(text: str, name: str) -> MachineModel:
    """A preset from its YAML text.

    Raises:
        MachineError: not YAML, or not a machine model.
    """
    try:
        plain: Any = yaml.safe_load(text)
        machine = codec.decode(MachineModel, plain)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise MachineError(f"preset {name}: not a machine model ({reason})") from None
    if machine.provenance != "preset":
        raise MachineError(f"preset {name}: expected provenance preset, found {machine.provenance}")
    return machine


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
