"""Compute before, between and beside what is measured. For worker processes only."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

WIDTH = 256
CLASSES = 32
INTERLUDE_ROWS = 8192


def make_burst(rows: int) -> Any:
    """Make a function that runs one burst of compute on `rows` rows.

    A burst is a forward and backward of a two-layer perceptron of width 256 under torch: matrix
    products, element-wise work, Python dispatch and the interpreter lock, in about a training
    step's
    proportions.
    """
    import torch as torch_module

    torch: Any = torch_module  # its stubs are partial
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES)
    )
    x = torch.randn(rows, WIDTH)
    y = torch.randint(0, CLASSES, (rows,))

    def burst() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()

    return burst


@contextmanager
def background_load() -> Generator[None]:
    """Let a thread of this process multiply matrices for as long as the block runs."""
    stop = threading.Event()

    def work() -> None:
        a = np.full((512, 512), 0.5, dtype=np.float32)
        out = np.empty_like(a)
        while not stop.is_set():
            np.matmul(a, a, out=out)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Interlude:
    """About a layer's work, called between two timed gathers or samplings.

    In a tight loop both find their buffers and page tables in the processor's caches and look about
    twice as fast as between two steps of a model (DEC-25).
    """

    def __init__(self, rows: int = INTERLUDE_ROWS, columns: int = WIDTH) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(rows, columns, generator=generator)
        self._weight = torch.randn(columns, columns, generator=generator)

    def __call__(self) -> None:
        """Multiply and rectify into fresh memory, as in a training step."""
        import torch

        torch.mm(self._x, self._weight).relu_()
