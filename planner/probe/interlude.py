"""Do what a layer does between two timed batches.

In a tight loop a gather or a sampler finds its buffers and page tables still in the processor's
caches and looks about twice as fast as between two steps of a model. A sweep through the caches
does not leave them as a layer does (DEC-25).
"""

import torch

ROWS = 8192
COLUMNS = 256
"""Shape of the product of a hidden layer."""


class Interlude:
    """Calling it does about what a layer does, and leaves the caches as a layer leaves them."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(rows, columns, generator=generator)
        self._weight = torch.randn(columns, columns, generator=generator)

    def __call__(self) -> None:
        """A product and a rectifier into fresh memory, as in a training step."""
        torch.mm(self._x, self._weight).relu_()
