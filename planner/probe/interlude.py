"""What lies between two batches: a stretch of the model's own work.

Measured in a tight loop, a gather or a sampler finds its buffers, tables and page tables still in
the processor's caches and looks twice as fast as it is between two steps of a model. Sweeping the
caches is not enough: on a shared host a gather after 15 ms of other work took 1.4 ms, after a sweep
of twice the last-level cache 0.7 ms, and 1.4 ms between real steps (24,800 rows of 400 bytes).
"""

import torch

ROWS = 8192
COLUMNS = 256
"""One product of a hidden layer: about 10 ms on one core."""


class Interlude:
    """Calling it does about what a layer does, and leaves the caches as a layer leaves them."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(rows, columns, generator=generator)
        self._weight = torch.randn(columns, columns, generator=generator)

    def __call__(self) -> None:
        """A product and a rectifier into fresh memory, as in a training step."""
        torch.mm(self._x, self._weight).relu_()
