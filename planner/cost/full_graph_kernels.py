"""Memory that oneDNN keeps for the dense products of whole-graph training: code made per shape.

A product of a new shape leaves about half a megabyte behind for as long as the process lives, its
gradients too. Of three layers on 20,000 rows that is 4 MB, of attention, which has a product for
received rows as well, twice as much (measured: torch 2.13, AMD EPYC with AVX-512, one thread).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.full_graph import Real
from planner.cost.full_graph_attention import ROW_MULTIPLE, SLAB_ROWS, padded

KERNEL_BYTES = 530_000
"""Of one shape: .53 MB, of 20 shapes all but three."""
LEAST_MULTIPLY_ADDS = 1 << 24
"""Smaller products are not oneDNN's, as in `runtime.models.dense`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Rows [rows, inputs] by a weight [inputs, outputs], and back."""

    rows: Real
    inputs: int
    outputs: int
    passes_back: bool
    """Rows have gradients, too: not those of the dataset."""


def kernel_bytes(products: Sequence[Product]) -> int:
    """Bytes of all different shapes.

    >>> layer = Product(rows=20_000, inputs=128, outputs=128, passes_back=True)
    >>> kernel_bytes([layer]) // KERNEL_BYTES, kernel_bytes([layer, layer]) // KERNEL_BYTES
    (3, 3)
    """
    shapes = {shape for each in products for shape in _shapes(each)}
    return KERNEL_BYTES * len(shapes)


def _shapes(p: Product) -> set[tuple[str, int, int, int]]:
    """Of the product, of the gradient of its rows, and of slabs of the weight's gradient."""
    if p.rows * p.inputs * p.outputs < LEAST_MULTIPLY_ADDS:
        return set()
    rows, whole = padded(p.rows), int(p.rows) // ROW_MULTIPLE * ROW_MULTIPLE
    # Where the result is narrower than the rows, full multiples and the rest go apart.
    apart = p.inputs > p.outputs and whole < p.rows
    found = {
        ("rows", each, p.inputs, p.outputs)
        for each in ((whole, ROW_MULTIPLE) if apart else (rows,))
    }
    if p.passes_back:
        found.add(("back", rows, p.outputs, p.inputs))
    rest = padded(p.rows % SLAB_ROWS)
    slabs = ([SLAB_ROWS] if p.rows >= SLAB_ROWS else []) + ([rest] if rest else [])
    return found | {("weight", slab, p.inputs, p.outputs) for slab in slabs}
