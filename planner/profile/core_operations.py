"""Count what a step does on cores beside the sums and products of its layers.

Attention (`runtime.models.kernels`) sums rows on vectors, of which those count that come from
outside the caches, as in sums without it; its coefficients go number by number, and each load and
store of theirs counts. An operation of torch on whole rows counts the rows that it writes, and
those that it reads unless the operation before it wrote them, which leaves them in a cache. Starts
are those of `profile.operations`; a call of torch is a part of one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gnnplan.planner.profile.operations import (
    FLOAT_BYTES,
    LayerShape,
    Operation,
    layer_operations,
    product,
)

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
