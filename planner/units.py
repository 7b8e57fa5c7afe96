"""Read and write sizes, counts and orders as people do."""

import re
from collections.abc import Mapping
from typing import TypeVar

from gnnplan.planner.errors import SettingsError

T = TypeVar("T")
DECIMAL_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
UNITS = {**DECIMAL_UNITS, **BINARY_UNITS}


def parse_bytes(text: str | None, option: str) -> int | None:
    """Parse a number of bytes such as 1500000, 512MiB, 8GB or 1.5g.

    Raises:
        SettingsError: not a size, or negative.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS:
        raise SettingsError(f"{option}: expected a size such as 512MiB or 8GB, found {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def counted(number: int, word: str) -> str:
    """Return a number with its noun, in the plural where it is not one.

    >>> counted(1, "host"), counted(2, "host")
    ('1 host', '2 hosts')
    """
    return f"{number} {word}{'' if number == 1 else 's'}"


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them: rank2 before rank10.

    >>> sorted(["rank10", "rank2", "host0"], key=by_number)
    ['host0', 'rank2', 'rank10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def in_order(values: Mapping[str, T]) -> list[tuple[str, T]]:
    """Return items sorted by their names, as `by_number` sorts."""
    return sorted(values.items(), key=lambda item: by_number(item[0]))
