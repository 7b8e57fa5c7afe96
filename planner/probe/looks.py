"""What looks at something have found so far, kept between runs: to know what is usual.

A machine that is as it is cannot be told from one that is disturbed all along, unless it has been
seen otherwise. What a quarter of all looks found is as good as it gets for a time worth waiting
for: one glimpse of something better does not make every other moment a bad one (DEC-20).
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from runtime.codec import write_text_atomically
from runtime.device import machine_fingerprint

GOOD_SHARE = 0.25
"""Of looks that find things good, where they are so for a time worth waiting for."""
MOST_LOOKS = 4_000
APART_SECONDS = 1.0
"""Looks that follow each other faster are written down once: who waits looks often, and would hold
what it waits for to end for the rule."""


class Looks:
    """Looks at things with names, each beside earlier looks at the same thing."""

    def __init__(
        self,
        seen: Mapping[str, Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Looks so far.

        Args:
            seen: of earlier `Looks`; what is not in it is new.
            clock: seconds.
        """
        self.seen = {name: dict(looks) for name, looks in (seen or {}).items()}
        """How often a look found so many nanoseconds, to three digits, by name."""
        self._clock, self._written = clock, dict[str, float]()

    def slowdown(self, name: str, seconds: float) -> float:
        """Write a look down; its seconds over those of good moments; inf: there were none yet.

        Args:
            name: of what was looked at.
            seconds: found; inf: somebody else had the core.
        """
        if math.isfinite(seconds):
            self._write(name, seconds)
        if name not in self.seen:
            return math.inf
        return seconds / good_seconds(self.seen[name])

    def _write(self, name: str, seconds: float) -> None:
        if self._clock() < self._written.get(name, -math.inf) + APART_SECONDS:
            return
        self._written[name] = self._clock()
        looks = self.seen.setdefault(name, {})
        nanoseconds = f"{float(f'{seconds * 1e9:.3g}'):g}"
        looks[nanoseconds] = looks.get(nanoseconds, 0) + 1
        if sum(looks.values()) > MOST_LOOKS:  # what is long ago counts for less
            self.seen[name] = {each: -(-times // 2) for each, times in looks.items()}


def good_seconds(looks: Mapping[str, int]) -> float:
    """Seconds that a quarter of all looks found, or less.

    >>> good_seconds({"82": 60, "35": 2, "160": 38})
    8.2e-08
    """
    counted = sorted((float(nanoseconds), times) for nanoseconds, times in looks.items())
    wanted = GOOD_SHARE * sum(times for _, times in counted)
    below = 0
    for nanoseconds, times in counted:
        below += times
        if below >= wanted:
            return nanoseconds * 1e-9
    return math.inf


@contextlib.contextmanager
def remembering(folder: Path) -> Generator[Looks]:
    """Looks that remember in a folder what they have found.

    Args:
        folder: of what is kept between runs; a file there that is damaged is begun anew.
    """
    before = remembered(folder)
    looks = Looks(before)
    yield looks
    if looks.seen != before:
        write_text_atomically(_file(folder), json.dumps(looks.seen))


def remembered(folder: Path) -> dict[str, dict[str, int]]:
    """What was found, by name; nothing where nobody has looked.

    Args:
        folder: of `remembering`.
    """
    try:
        kept = json.loads(_file(folder).read_text())
        found = {
            str(name): {f"{float(each):g}": int(times) for each, times in looks.items()}
            for name, looks in kept.items()
            if looks
        }
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return {}
    numbers = [number for looks in found.values() for each in looks.items() for number in each]
    return found if all(0.0 < float(number) < math.inf for number in numbers) else {}


def _file(folder: Path) -> Path:
    return folder / f"cores-{machine_fingerprint()}.json"
