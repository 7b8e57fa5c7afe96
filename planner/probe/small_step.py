"""Whether all of a core is slower at this moment: how long a small model's training step takes.

Virtual cores share a chip with other machines' cores: its last cache, its way to memory, its heat.
Within minutes the same training steps went from 2.4 to 4.4 ms on two threads and from 3.0 to 4.8
beside a loader, while a core copied within its own cache 1.04 times, and the interpreter worked
1.06 times as long. A small model's step was slower, too: of 726 looks the quickest of three goes
with the steps that follow by a correlation of .6 to .75, medians over four seconds by .8 to .9, and
alike in every process. Chains of reads, streams through the caches and copies of rows from beyond
a core's own went with them by 0 to .6, and as long as they took depended on the process, too. What
is fastest depends on it: two threads took .82 of one thread and a loader in good moments, .88 to
.93 in slow ones.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from planner.probe.looks import Looks

ROWS, WIDTH, CLASSES = 2_000, 128, 32
"""Of the small model: some 2 ms on one thread, 5 MB that go through it."""
TRIES = 3
"""The quickest counts, after one that fetches what it needs."""
SLOW = 1.08
"""Times what it takes in good moments from which a core is held to be slow: steps of a graph then
take about 1.2 times theirs, since more of them waits for memory."""
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
