"""Arithmetic and memory traffic of the kernels of a model's layers, forward and backward."""

from collections.abc import Iterator
from dataclasses import dataclass

from gnnplan.runtime.models import product_comes_first
from gnnplan.runtime.plan.schema import Workload

HALVES = ("bfloat16", "float16")
FLOAT_BYTES = 4
HALF_BYTES = 2
INDEX_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Arithmetic and memory traffic of one kernel."""

    flops: float
    moved_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one layer on one batch."""

    num_src: float
    num_dst: float
    num_edges: float
    in_dim: int
    out_dim: int
    """Columns it computes: heads times the columns of one."""
    inputs: bool
    """Whether it reads the batch's features, which have no gradient."""
    heads: int
    relations: int = 1
    """Edge types, each with a product of its own (rgcn)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineRate:
    """Operations and bytes of memory per second."""

    flops: float
    bytes: float

    def seconds(self, operation: Operation) -> float:
        """Return the longer of the two that an operation takes."""
        return max(operation.flops / self.flops, operation.moved_bytes / self.bytes)


def product(rows: float, a: int, b: int, *, item_bytes: int = FLOAT_BYTES) -> Operation:
    """Return the product of `rows` rows of a columns and an a x b matrix.

    >>> product(10.0, 2, 3)
    Operation(flops=120.0, moved_bytes=224.0)
    """
    moved = rows * a + a * b + rows * b
    return Operation(flops=2 * rows * a * b, moved_bytes=item_bytes * moved)


def rounding(rows: float, columns: int) -> Operation:
    """Return the copy of rows of float32 in half the bytes."""
    size = rows * columns
    return Operation(flops=size, moved_bytes=(FLOAT_BYTES + HALF_BYTES) * size)


def aggregation(shape: LayerShape, columns: int) -> Operation:
    """Return the sum of `columns` wide source rows over the edges, each edge reading a row."""
    read = shape.num_edges * (columns * FLOAT_BYTES + INDEX_BYTES + FLOAT_BYTES)
    return Operation(
        flops=2 * shape.num_edges * columns,
        moved_bytes=read + shape.num_dst * columns * FLOAT_BYTES,
    )


def elementwise(rows: float, columns: int, passes: int = 2) -> Operation:
    """Return some passes over rows; an activation has two, a read and a write."""
    size = rows * columns
    return Operation(flops=size, moved_bytes=passes * size * FLOAT_BYTES)


def multiplies_first(workload: Workload, shape: LayerShape, device: str) -> bool:
    """Return whether the layer multiplies before it sums, as the runtime decides on a `device`."""
    if workload.model == "gat" or workload.precision in HALVES:
        return True
    return product_comes_first(
        shape.num_src,
        shape.num_dst,
        shape.num_edges / (shape.relations if workload.model == "rgcn" else 1),
        shape.in_dim,
        shape.out_dim,
        device=device,
        trains=True,
        inner=not shape.inputs,
    )


def layer_operations(
    model: str,
    shape: LayerShape,
    *,
    product_first: bool | None = None,
    item_bytes: int = FLOAT_BYTES,
    rounds: bool = False,
) -> Iterator[Operation]:
    """Yield the kernels of one layer, forward and backward.

    sage and rgcn also multiply their own rows, rgcn once for each relation; gat scores each edge
    for every head. Sums are taken before the product or, with `product_first`, after it; None: as
    the model is written, sage and rgcn before, gcn and gat after. Products take factors of
    `item_bytes`; with `rounds` the batch's features come in float32 and are rounded before each.
    """
    a, b = shape.in_dim, shape.out_dim
    own = model in ("sage", "rgcn")
    if product_first is None:
        product_first = not own
    rows, summed = (shape.num_src, b) if product_first else (shape.num_dst, a)
    multiplied = [rows] * (shape.relations if own else 1) + [shape.num_dst] * own
    for size in multiplied:
        if rounds and shape.inputs:
            yield rounding(size, a)
        yield product(size, a, b, item_bytes=item_bytes)
        yield product(size, a, b, item_bytes=item_bytes)  # gradient of the weights
        if not shape.inputs:
            yield product(size, b, a, item_bytes=item_bytes)  # gradient of the rows
    yield aggregation(shape, summed)
    if product_first or not shape.inputs:
        yield aggregation(shape, summed)
    if model == "gat":
        for _ in ("scores", "softmax", "softmax backward", "scores backward"):
            yield elementwise(shape.num_edges, shape.heads, passes=4)
        yield elementwise(shape.num_src, b)
    yield elementwise(shape.num_dst, b)  # bias and activation
    yield elementwise(shape.num_dst, b, passes=3)  # their backward
