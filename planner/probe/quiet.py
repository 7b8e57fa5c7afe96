"""Whether the machine is quiet: a small training step beside its good moments, and its load.

Other processes, other machines on the same chip and a throttled clock all make a small model's step
longer (DEC-19), and shorter steps than usual do not occur. Looks of earlier runs are kept, because
a machine that is busy all along looks like a slower one. Good is what a quarter of all looks found
(DEC-20). `timing.Patience` times what was disturbed once more, within a bound (DEC-101).
"""

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gnnplan.planner.probe.team import State
from gnnplan.runtime.codec import write_text_atomically
from gnnplan.runtime.device import machine_fingerprint

ROWS, WIDTH, CLASSES = 2_000, 128, 32
"""Rows, width and classes of the small model: its step fills a core's cache many times."""
STEPS = 3
"""Steps of a look, of which the median counts."""
SLOW = 1.08
"""Ratio to the seconds of good moments from which a machine is disturbed (DEC-19)."""
GOOD_SHARE = 0.25
"""Share of the looks that find a machine good, at least."""
MOST_LOOKS = 2_000
FRESH_SECONDS = 0.2
"""Age up to which a look counts as one of this moment."""
APART_SECONDS = 1.0
"""Least seconds between two kept looks, so that a long disturbance does not become the rule."""
PROC = Path("/proc")


class Disturbance:
    """Slowdown of the machine against its good moments."""

    def __init__(
        self,
        seen: Sequence[float] = (),
        look: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the seconds `seen` by earlier looks; `look` times a small step now."""
        self.seen = list(seen)
        self._look, self._clock = look or step_seconds, clock
        self._found, self._looked_at, self._kept_at = 1.0, -math.inf, -math.inf

    def slowdown(self) -> float:
        """Return seconds of a small step over those of good moments."""
        if self._clock() >= self._looked_at + FRESH_SECONDS:
            self._found = self._look()
            self._looked_at = self._clock()
            if self._looked_at >= self._kept_at + APART_SECONDS:
                self._kept_at = self._looked_at
                self.seen = [*self.seen, self._found][-MOST_LOOKS:]
        return self._found / good_seconds(self.seen)

    def level(self) -> float:
        """Return the slowdown over the least one that counts: disturbed from 1 on."""
        return self.slowdown() / SLOW


def good_seconds(seen: Sequence[float]) -> float:
    """Return the seconds that a quarter of all looks found, or less.

    >>> good_seconds([0.4, 0.2, 0.1, 0.3])
    0.1
    """
    return sorted(seen)[math.ceil(GOOD_SHARE * len(seen)) - 1]


@functools.cache
def _step() -> Callable[[], object]:
    import torch as torch_module

    torch: Any = torch_module  # its stubs are partial
    made = torch.Generator().manual_seed(0)  # the caller's own numbers stay as they are
    x = torch.randn(ROWS, WIDTH, generator=made)
    y = torch.randint(0, CLASSES, (ROWS,), generator=made)
    first, last = (
        torch.randn(size, WIDTH, generator=made).div(WIDTH).requires_grad_()
        for size in (WIDTH, CLASSES)
    )

    def step() -> None:
        out = torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, first)), last)
        torch.autograd.grad(torch.nn.functional.cross_entropy(out, y), (first, last))

    return step


def step_seconds() -> float:
    """Time the small step on one thread."""
    import torch

    step, threads = _step(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step()
        took = list[float]()
        for _ in range(STEPS):
            begun = time.perf_counter()
            step()
            took.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    return median(took)


def look_task(state: State) -> float:
    """Task: seconds of the small step."""
    del state
    return step_seconds()


@contextlib.contextmanager
def disturbance(folder: Path, look: Callable[[], float] | None = None) -> Generator[Disturbance]:
    """Watch this machine by `look`, and keep in a folder what looks have found."""
    found = Disturbance(seen_before(folder), look)
    yield found
    write_text_atomically(_file(folder), json.dumps([float(f"{each:.3g}") for each in found.seen]))


def seen_before(folder: Path) -> list[float]:
    """Read the seconds that earlier looks found; none where nobody has looked."""
    try:
        seen = [float(each) for each in json.loads(_file(folder).read_text())]
    except (OSError, ValueError, TypeError):
        return []
    return seen[-MOST_LOOKS:] if all(0.0 < each < math.inf for each in seen) else []


def _file(folder: Path) -> Path:
    return folder / f"cores-{machine_fingerprint()}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """Busy, stolen and all processor ticks since boot, and the load average of the last minute."""

    busy_ticks: int
    steal_ticks: int
    all_ticks: int
    load: float


def read_load() -> LoadSample:
    """Read the load from /proc; where that is missing all ticks are zero."""
    try:
        words = (PROC / "stat").read_text().splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        words = []
    ticks = [int(w) for w in words] + [0] * (8 - len(words))
    idle, steal = ticks[3] + ticks[4], ticks[7]
    return LoadSample(
        busy_ticks=sum(ticks) - idle - steal,
        steal_ticks=steal,
        all_ticks=sum(ticks),
        load=os.getloadavg()[0],
    )


def load_notes(before: LoadSample, after: LoadSample, cores: int) -> list[str]:
    """Note a load average above a quarter of the cores, or over 1% of processor time stolen."""
    notes: list[str] = []
    if before.load > max(0.25 * cores, 0.5):
        notes.append(
            f"load: {before.load:.1f} before the probe on {cores} cores: other work was running; "
            "probe an idle machine"
        )
    ticks = after.all_ticks - before.all_ticks
    stolen = (after.steal_ticks - before.steal_ticks) / ticks if ticks > 0 else 0.0
    if stolen > 0.01:
        notes.append(f"load: {stolen:.1%} of processor time was stolen by the hypervisor")
    return notes


def disturbance_notes(num_disturbed: int) -> list[str]:
    """Say how many points were measured while the machine was slower than in its good moments."""
    if not num_disturbed:
        return []
    return [
        f"disturbed: {num_disturbed} points were measured while a small training step took longer "
        "than in this machine's good moments: other work, or neighbours outside this machine that "
        "share its cores, slow it down; probe and profile in a quieter hour"
    ]
