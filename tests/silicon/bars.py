"""Bars of an experiment: what was asked for, what was measured, and whether it was met.

Every line says all three. An experiment goes on where one of its cases fails, and ends with an
error that names all that was missed.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.common import record
from tests.silicon.setting import Setting


class Bars:
    """The bars of one run; on cores numbers mean nothing, and none is judged."""

    def __init__(self, setting: Setting) -> None:
        self._judges = not setting.emulated
        self.missed: list[str] = []

    def judge(self) -> None:
        """Raise AssertionError with all that was missed."""
        if self.missed:
            raise AssertionError("; ".join(self.missed))

    def hold(
        self,
        name: str,
        value: float | None,
        unit: str,
        *,
        ratio: float | None = None,
        most: float | None = None,
        least: float | None = None,
        most_ratio: float | None = None,
        least_ratio: float | None = None,
        **extra: Any,
    ) -> None:
        """Record a line with its bars, and note what it misses; no value or ratio misses too."""
        asked = [
            ("value", "at most", value, most),
            ("value", "at least", value, least),
            ("ratio", "at most", ratio, most_ratio),
            ("ratio", "at least", ratio, least_ratio),
        ]
        bars = {f"{of} {how}": bar for of, how, _, bar in asked if bar is not None}
        misses = [
            f"{name}: {of} {'none' if found is None else f'{found:.4g}'}, asked {how} {bar:g}"
            for of, how, found, bar in asked
            if bar is not None and not _reaches(found, how, bar)
        ]
        met = not misses if self._judges and bars else None
        record(name, value, unit, ratio=ratio, bar=bars, met=met, **extra)
        self.missed += misses if self._judges else []

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Let a case fail alone: its error is recorded, and missed; on cores it is raised."""
        try:
            yield
        except Exception as error:
            if not self._judges:
                raise
            words = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            record(f"{name} failed", None, "none", why=words, met=False)
            self.missed.append(words)


@contextmanager
def open_bars(setting: Setting) -> Iterator[tuple[Bars, Path]]:
    """Give a run its bars and a folder for its files, and judge it at its end."""
    bars = Bars(setting)
    with tempfile.TemporaryDirectory() as folder:
        yield bars, Path(folder)
    bars.judge()


def _reaches(found: float | None, how: str, bar: float) -> bool:
    if found is None:
        return False
    return found <= bar if how == "at most" else found >= bar
