"""Read list prices of machines by the hour, from gnnplan's dated file or a user's."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnplan.planner.probe.presets import is_preset, list_presets, load_yaml
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError, did_you_mean

PRICES = Path(__file__).with_name("prices.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListPrice:
    """List price of one host of a machine."""

    dollars_per_hour: float
    date: str
    """Day on which the price was listed, such as 2026-01-31."""
    source: str

    def __post_init__(self) -> None:
        if not (self.dollars_per_hour > 0 and math.isfinite(self.dollars_per_hour)):
            raise ValueError(f"expected dollars_per_hour above 0, found {self.dollars_per_hour}")

    @property
    def words(self) -> str:
        """Say where the price is from."""
        return f"{self.source}, {self.date}"


def read_prices(path: Path | None = None) -> dict[str, ListPrice]:
    """Read prices by preset; None for those that come with gnnplan.

    Raises:
        InputError: the file is missing or damaged, or names a machine that is no preset.
    """
    import yaml  # on use: the command line starts without it

    place = path or PRICES
    try:
        plain: Any = load_yaml(place.read_text())
        found = {
            str(name): codec.decode(ListPrice, {**each, "date": str(each["date"])})
            for name, each in dict(plain).items()
        }
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"--prices {place}: expected a YAML file, found {why}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"--prices {place}: expected lines like `hgx-h100: {{dollars_per_hour: 55, date: "
            f"2026-01-31, source: a page}}`, found otherwise ({' '.join(str(error).split())})"
        ) from None
    unknown = [name for name in found if path is not None and not is_preset(name)]
    if unknown:
        raise InputError(
            f"--prices {place}: expected names of presets, found {unknown[0]!r}"
            f"{did_you_mean(unknown[0], list_presets())}"
        )
    return found
