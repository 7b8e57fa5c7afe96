"""Measure whether all of a core is slower now: how long a small model's training step takes.

Virtual cores share a chip with other machines' cores: its last cache, its way to memory, its heat.
Training steps then take longer for minutes while copies within a core's own cache hardly change. A
small model's step follows them best of all that was tried (DEC-19).
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from planner.probe.looks import Looks

ROWS, WIDTH, CLASSES = 2_000, 128, 32
"""Rows, width and classes of the small model: its step fills a core's cache many times."""
TRIES = 3
"""The quickest counts, after one that fetches what it needs."""
SLOW = 1.08
"""Ratio to the time in good moments from which a core counts as slow (DEC-19)."""
NAME = "step"
"""Of these looks."""


@functools.cache
def _step() -> Callable[[], object]:
    """Forward and backward of the model, made once in a process."""
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
        loss = torch.nn.functional.cross_entropy(out, y)
        torch.autograd.grad(loss, (first, last))

    return step


def step_seconds() -> float:
    """Seconds of the step on one thread, wherever this one runs."""
    import torch

    step, threads = _step(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step()
        took = list[float]()
        for _ in range(TRIES):
            begun = time.perf_counter()
            step()
            took.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    return min(took)


class SmallStep:
    """How much slower the step is than in good moments (`Looks`)."""

    def __init__(self, looks: Looks | None = None) -> None:
        """Looks before this; None: there were none."""
        self._looks = looks or Looks()

    def slowdown(self) -> float:
        """Seconds of the step over those of good moments."""
        return self._looks.slowdown(NAME, step_seconds())
