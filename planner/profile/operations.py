"""Arithmetic and memory traffic of the kernels of a model's layers, forward and backward.

Cores run more than the sums and products of layers (`CoreWork`). Attention
(`runtime.models.kernels`) sums rows on vectors, of which those count that come from outside the
caches, as in sums without it; its coefficients go number by number, and each load and store of
theirs counts. An operation of torch on whole rows counts the rows that it writes, and those that
it reads unless the operation before it wrote them, which leaves them in a cache. A call of torch
is a part of a start.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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


CALLS_PER_START = 1.7
"""Torch's calls in the probe's small step, views left out, over the operations counted in it."""
ATTENTION_CALLS = 30
"""Torch's calls of a layer of attention, forward and back."""
ATTENTION_NUMBERS, GRADIENT_NUMBERS = 9, 14
"""How many numbers attention loads and stores per edge and head: forward, and in its gradient."""
EXPONENTIAL = 14
"""Steps of an exponential of one number, each of which takes as long as a load."""
ATTENTION_ROWS, GRADIENT_ROWS = 1, 3
"""How many rows per edge come from outside the caches: forward the source's; in the gradient also
that of the source's gradient, which is read and written."""
RELATION_CALLS, ROOT_CALLS = 13, 11
"""Torch's calls of a relation that has edges, and of the rest of such a layer."""
ENCODING_CALLS, TYPE_CALLS, ONE_TYPE_CALLS = 8, 6, 5
"""Torch's calls that map inputs by node type: for all types together, and for each of them; and
the calls in place of both where a graph has one type."""
LOSS_CALLS = {"multiclass": 8, "multilabel": 19, "binary": 14, "link": 26}
"""Torch's calls of a task's loss, forward and back."""
PICKING_CALLS = 3
"""Torch's calls of picking rows by index, and of adding their gradients."""
STEP_CALLS = 2
"""Torch's calls of a step that clear the gradients and keep the loss."""
TENSORS = {"sage": 3, "gcn": 2, "gat": 4, "rgcn": 3}
"""Tensors of parameters of a layer, to each of which its gradient is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreWork:
    """Operations one after the other, and how often torch starts one."""

    operations: list[Operation] = field(default_factory=list[Operation])
    starts: float = 0.0

    def __add__(self, other: "CoreWork") -> "CoreWork":
        """Return the work of both."""
        return CoreWork(
            operations=[*self.operations, *other.operations], starts=self.starts + other.starts
        )


def work_of(calls: float, operations: Iterable[Operation]) -> CoreWork:
    """Return the work of operations that torch runs in so many calls."""
    return CoreWork(operations=list(operations), starts=calls / CALLS_PER_START)


def passes(rows: float, columns: float, times: float = 1.0) -> Operation:
    """Return the work of reading or writing an array [rows, columns] so many times."""
    size = times * rows * columns
    return Operation(flops=size, moved_bytes=FLOAT_BYTES * size)


def by_number(count: float, flops: float = 1.0) -> Operation:
    """Return the work of a loop that loads or stores `count` numbers, one at a time."""
    return Operation(flops=flops * count, moved_bytes=FLOAT_BYTES * count)


def layer_work(model: str, shape: LayerShape, *, product_first: bool) -> CoreWork:
    """Return the work of a layer, forward and back; `shape` has only relations with edges."""
    if model == "gat":
        return attention_work(shape)
    operations = list(layer_operations(model, shape, product_first=product_first))
    if model == "rgcn":
        return relations_work(shape, operations)
    return CoreWork(operations=operations, starts=len(operations))


def attention_work(shape: LayerShape) -> CoreWork:
    """Return the work of a GAT layer; its edges have a self-loop for each destination."""
    sources, targets, b = shape.num_src, shape.num_dst, shape.out_dim
    pairs = shape.num_edges * shape.heads
    operations = [product(sources, shape.in_dim, b), product(sources, shape.in_dim, b)]
    if not shape.inputs:
        operations.append(product(sources, b, shape.in_dim))
    return work_of(
        ATTENTION_CALLS,
        [
            *operations,
            by_number((ATTENTION_NUMBERS + EXPONENTIAL + GRADIENT_NUMBERS) * pairs),
            passes(shape.num_edges, b, ATTENTION_ROWS + GRADIENT_ROWS),
            # Scores of sources: h times a, and back the gradients of both, for which h is read. The
            # gradient of h is cleared twice, added to twice and padded.
            passes(sources, b, 4 + 2 + 2 * 2 + 1),
            # Scores of destinations likewise, whose gradient is copied among the sources'.
            passes(targets, b, 2 + 3 + 1),
            # Mean of heads or rectifier, bias, and their gradients.
            passes(targets, b, 4),
        ],
    )


def relations_work(shape: LayerShape, operations: Iterable[Operation]) -> CoreWork:
    """Return the work of an R-GCN layer: its `operations` and rows handed between relations."""
    count, a, b = shape.relations, shape.in_dim, shape.out_dim
    return work_of(
        ROOT_CALLS + RELATION_CALLS * count,
        [
            *operations,
            # Each relation sums for all destinations, and its gradient has a row of every source.
            passes(shape.num_dst, a, count - 1),
            passes(shape.num_src, a, count),
            # Gradients of relations and of the root, which is put among zeros, are added up.
            passes(shape.num_src, a, 2 * count + 1),
            passes(shape.num_dst, a),
            # Results are added up, and the gradients of relations and of the root are padded.
            passes(shape.num_dst, b, 2 * count + count + 1),
            # Every relation's matrix is turned, and its gradient stacked.
            passes(count * a, b, 2),
            # Edges are sorted by relation and, for the way back, by source.
            by_number(4 * shape.num_edges + count * (shape.num_dst + shape.num_src)),
        ],
    )


def encoding_work(rows: float, in_dim: int, hidden: int, types: int) -> CoreWork:
    """Return the work of R-GCN's maps of its inputs by node type."""
    mapped = [product(rows, in_dim, hidden), product(rows, in_dim, hidden)]
    # The rectifier, and back by its result.
    mapped.append(passes(rows, hidden, 1 + 2))
    if types == 1:
        return work_of(ONE_TYPE_CALLS, mapped)
    return work_of(
        ENCODING_CALLS + TYPE_CALLS * types,
        [
            *mapped,
            # Rows of a type are picked; results are joined, and put back where they were.
            by_number(2 * rows * in_dim),
            passes(rows, hidden, 2),
            by_number(2 * rows * hidden),
            # Back: zeros, to which gradients are added by index.
            passes(rows, hidden),
            by_number(3 * rows * hidden),
        ],
    )


def picking_work(picked: float, rows: float, columns: float) -> CoreWork:
    """Return the work of picking rows by index: back, each is added to its row of zeros."""
    return work_of(
        PICKING_CALLS,
        [by_number(2 * picked * columns), passes(rows, columns), by_number(3 * picked * columns)],
    )


def loss_work(task: str, rows: float, columns: float) -> CoreWork:
    """Return the work of a loss of nodes' outputs."""
    return work_of(LOSS_CALLS[task], [passes(rows, columns, 3)])


def link_loss_work(links: float, negatives: int, nodes: float, columns: float) -> CoreWork:
    """Return the work of scoring links: both ends' rows are picked, multiplied, and so back."""
    ends = links * (2 + negatives)
    return work_of(
        LOSS_CALLS["link"],
        [
            by_number(2 * ends * columns),
            Operation(
                flops=6 * links * (1 + negatives) * columns,
                moved_bytes=FLOAT_BYTES * 3 * ends * columns,
            ),
            passes(nodes, columns, 3),
            by_number(3 * ends * columns),
        ],
    )


def gradient_work(tensors: int, parameters: int) -> CoreWork:
    """Return the work of clearing the parameters' gradients, and of adding each tensor's."""
    return work_of(STEP_CALLS + tensors, [passes(parameters, 1, 2)])
