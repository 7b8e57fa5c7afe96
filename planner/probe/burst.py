"""What a computing rank does while other work is measured: a step-like burst, a background load.

The burst is a forward and backward of a two-layer perceptron of width 256 under torch: matrix
products, element-wise work, Python dispatch and the interpreter lock, in about a training step's
proportions. Imported in worker processes only.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

WIDTH = 256
CLASSES = 32


def make_burst(rows: int) -> Any:
    """A function of no arguments that runs one burst on `rows` rows of width 256."""
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
    """One thread of this process multiplies matrices for as long as the block runs."""
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
