"""Parts that presets are built of: numbers with where they are from, in `parts/*.yaml`."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.errors import MachineError
from planner.machine import Provenance

FOLDER = Path(__file__).with_name("parts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number of a data sheet, a paper or an assumption."""

    value: float
    provenance: Provenance
    source: str

    def times(self, other: "Number") -> "Number":
        """Their product; preset only where both are."""
        both = self.provenance == other.provenance == "preset"
        return Number(
            value=self.value * other.value,
            provenance="preset" if both else "derived",
            source=f"{self.source}; {other.source}",
        )

    def scaled(self, factor: float | int) -> "Number":
        """The same number so many times over (links side by side)."""
        return Number(value=self.value * factor, provenance=self.provenance, source=self.source)


Part = dict[str, Number]
"""Numbers of one part by name."""


def read_number(value: Any, where: str) -> Number:
    """A number from its YAML form, [value, provenance, source].

    Raises:
        MachineError: something else stands there.
    """
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
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def load_part(kind: str, name: str) -> tuple[str, Part]:
    """Model name and numbers of a part.

    Args:
        kind: gpus or hosts.
        name: of the part in that file.

    Raises:
        MachineError: there is none of that name, or it is damaged.
    """
    parts = _file(kind)
    if name not in parts:
        known = ", ".join(sorted(parts))
        raise MachineError(f"expected a part among {known} in {kind}.yaml, found {name!r}")
    numbers = {key: value for key, value in parts[name].items() if key != "model"}
    return str(parts[name]["model"]), {
        key: read_number(value, f"{kind}.yaml: {name}: {key}") for key, value in numbers.items()
    }


def load_effects() -> Part:
    """What is left of data sheets' bandwidths, and costs that they do not state."""
    return {k: read_number(v, f"effects.yaml: {k}") for k, v in _file("effects").items()}
