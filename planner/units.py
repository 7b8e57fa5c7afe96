"""Sizes as people write them."""

import re

from planner.errors import SettingsError

DECIMAL_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
UNITS = {**DECIMAL_UNITS, **BINARY_UNITS}


def parse_bytes(text: str | None, option: str) -> int | None:
    """Bytes from 1500000, 512MiB, 8GB, 1.5g.

    Raises:
        SettingsError: not a size, or negative.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS:
        raise SettingsError(f"{option}: expected a size such as 512MiB or 8GB, found {text!r}")
    return int(float(match[1]) * UNITS[match[2]])
