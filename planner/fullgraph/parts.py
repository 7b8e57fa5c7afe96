"""Cut a graph into parts, and say what is timed of a rank's epoch on one, or derived.

Seconds of GPUs, and of cores for a first answer, are derived from the parts' sizes (DEC-122,
DEC-185): the roofline of each layer, or what the host starts.

Source: docs/formulas.md 3.1 and 3.5.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.rates import ranks_here
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte, memory_seconds_per_byte
from gnnplan.planner.cost.stages.host import UPDATE_STARTS, pass_starts, start_seconds
from gnnplan.planner.fullgraph.candidate import Cut, first_layers, settings_of
from gnnplan.planner.fullgraph.formulas import PartSizes
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.partition.partition import partition
from gnnplan.planner.profile.operations import (
    FLOAT_BYTES,
    TENSORS,
    CoreWork,
    LayerShape,
    Operation,
    aggregation,
    attention_work,
    elementwise,
    gradient_work,
    layer_operations,
    loss_work,
    picking_work,
    product,
)
from gnnplan.planner.profile.roofline import (
    UPDATE_OPERATIONS,
    layer_widths,
    num_parameters,
    rate_of_cores,
    update_operation,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.fullgraph.part import Part, build_part, connect_parts
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import FullGraph, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """All parts of a graph, connected."""

    partition: NDArray[np.int32]
    parts: list[Part]
    seeds: list[int]
    """Training nodes of each part."""

    @property
    def sizes(self) -> list[PartSizes]:
        """Sizes that the formulas take of each part."""
        return [sizes_of(part) for part in self.parts]


def sizes_of(part: Part) -> PartSizes:
    """Count what the formulas take of a connected part."""
    return PartSizes(
        inner=part.num_inner,
        halo=part.num_halo,
        sent=part.send.shape[0],
        inner_edges=part.inner_edges[1].shape[0],
        halo_edges=part.halo_edges[1].shape[0],
        received=tuple(part.halo_counts.tolist()),
    )


def cut_graph(graph: Graph, cut: Cut) -> NDArray[np.int32]:
    """Partition for the volume objective, or at random to compare with; int32 [N]."""
    if cut.ranks == 1:
        return np.zeros(graph.num_nodes, np.int32)
    return partition(
        graph.indptr,
        graph.indices,
        parts=cut.ranks,
        name=cut.partitioner,
        training=graph.train_idx,
        objective="cut" if cut.partitioner == "random" else "volume",
    )


def connect_cut(graph: Graph, found: NDArray[np.int32], ranks: int, model: str) -> Parts:
    """Build every part with its send lists, as the ranks will."""
    parts = connect_parts([
        build_part(graph.indptr, graph.indices, found, r, ranks, loops=model != "sage")
        for r in range(ranks)
    ])  # fmt: skip
    training = np.zeros(graph.num_nodes, np.bool_)
    training[graph.train_idx] = True
    seeds = [int(training[part.inner].sum()) for part in parts]
    return Parts(partition=found, parts=parts, seeds=seeds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Settings to time."""

    settings: FullGraph
    draws_only: bool = False
    """Whether the epoch's draws alone are timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRequest:
    """One part of a graph under one model."""

    workload: Workload
    graph_path: str
    fingerprint: str = ""
    """Fingerprint of the graph that must lie there; empty: any."""
    partition_path: str
    """File of the part of each node, int32 .npy."""
    wanted_path: str
    """File of the nodes that other parts need of this one, by receiver, int64 .npy."""
    wanted_counts: list[int]
    rank: int
    size: int
    in_dim: int
    num_classes: int
    task: str
    threads: int
    cases: list[Case]
    asked_counts: list[int] = field(default_factory=list[int])
    """Rows that each other part asks for where edges are dropped; empty where nodes are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseSeconds:
    """One rank's seconds per epoch under one case; nothing is waited for."""

    sample: float
    """Seconds of drawing boundary nodes and cutting the blocks to them."""
    forward_backward: float
    packing: float
    """Seconds of copying the rows to send, on the training thread."""
    windows: list[float]
    """Seconds between the start of each exchange and the need for its rows, in order."""
    spread: float
    """Relative half-width of the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartAnswer:
    """What one process measured on its part."""

    cases: list[CaseSeconds]
    optimizer_seconds: float
    num_parameters: int
    widths: list[int] = field(default_factory=list[int])
    """d_0 .. d_L: columns of what each layer exchanges, then of the outputs."""


ANCHORS = (0.1, 0.5)
"""Probabilities at which sampled epochs are timed; their seconds are linear in p."""


def cases_of(cut: Cut, draws: Sequence[str], asked: PlanSettings | None = None) -> list[Case]:
    """List what is timed of a cut: p = 1 with and without the first layer, and anchors of p < 1.

    `draws` are `layer`, `shared`, both, or nothing where only p = 1 is allowed. Where edges are
    dropped or slices sent, what is asked for is timed itself.
    """
    if asked is not None and asked.exchange == "broadcast":
        return [
            Case(settings=FullGraph(exchange="broadcast", precompute_first_layer=known))
            for known in first_layers(asked)
        ]
    if asked is not None and asked.drop != "nodes" and (cut.ranks > 1 or asked.drop == "edges"):
        return [Case(settings=each) for each in settings_of(asked) if each.draws in draws]
    found = [Case(settings=FullGraph(precompute_first_layer=known)) for known in (False, True)]
    for each in draws if cut.ranks > 1 else ():
        for keep in ANCHORS:
            settings = FullGraph(keep=keep, draws="shared" if each == "shared" else "layer")
            rounded = replace(settings, rounding="stochastic")
            found += [Case(settings=settings), Case(settings=rounded, draws_only=True)]
    return found


def crossing_of(parts: Parts, keep: float) -> list[PartSizes]:
    """Return the parts with the rows that have a kept edge into each, on average over draws.

    Source: docs/formulas.md 3.5 [B4].
    """
    received = [_rows_by_owner(part, keep) for part in parts.parts]
    return [
        replace(sizes, halo=sum(mine), sent=sum(each[rank] for each in received), received=mine)
        for rank, (sizes, mine) in enumerate(zip(parts.sizes, received, strict=True))
    ]


def _rows_by_owner(part: Part, keep: float) -> tuple[int, ...]:
    edges = np.bincount(part.halo_edges[1], minlength=part.num_halo)
    crossing = 1.0 - (1.0 - keep) ** edges
    owners = np.repeat(np.arange(part.size), part.halo_counts)
    return tuple(round(x) for x in np.bincount(owners, weights=crossing, minlength=part.size))


EXCHANGE_STARTS = 4
"""Starts of an exchange: picking rows, the collective, its wait, adding what crossed back."""
CUT_STARTS = 14
"""Copies and kernels that cut a layer's block to the kept rows."""
DRAW_SECONDS = {"bernoulli": 1.5e-8, "stochastic": 4.5e-8}
"""Host's seconds of drawing one boundary node and placing it (DEC-119)."""
CUT_BYTES = 60
"""GPU memory's traffic of cutting a block, per halo edge."""


def derive_part(
    machine: MachineModel,
    candidate: Candidate,
    work: Workload,
    sizes: PartSizes,
    cases: Sequence[Case],
    ends: tuple[int, int],
    crossing: PartSizes | None = None,
    *,
    task: str = "multiclass",
    seeds: float = 0.0,
) -> PartAnswer:
    """Derive a part's seconds: the roofline of its layers, or on a GPU the host's launches.

    `ends` are the widths of inputs and outputs, `crossing` as of `crossing_of`; of `seeds` the loss
    of a `task` is taken.

    Source: profile.roofline; docs/modelling.md 5.
    """
    widths = layer_widths(work, *ends)
    rate = _rate_of(machine, candidate)
    parameters = num_parameters(work.model, widths)
    after = CoreWork()
    if not candidate.gpus:
        picked = picking_work(seeds, sizes.inner, ends[1]) + loss_work(task, seeds, ends[1])
        after = picked + gradient_work(TENSORS[work.model] * len(widths), parameters)
    update = UPDATE_STARTS if candidate.gpus else UPDATE_OPERATIONS
    return PartAnswer(
        cases=[
            _derive_case(
                rate, work, sizes, case, widths, crossing or sizes, candidate.num_ranks - 1, after
            )
            for case in cases
        ],
        optimizer_seconds=rate.of([update_operation(parameters)], update),
        num_parameters=parameters,
        widths=[a for a, _, _ in widths] + [ends[1]],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartRate:
    """Rates of the slowest GPU and its host, or of a rank's cores."""

    flops: float
    byte_seconds: float
    copy_seconds: float
    start_seconds: float
    spread: float
    starts_alongside: bool
    """Whether the host starts operations while others are worked on, as of a GPU."""

    def of(self, operations: Iterable[Operation], started: float = 0.0) -> float:
        """Add up the seconds of operations one after the other, and of what is `started`."""
        worked = sum(
            max(each.flops / self.flops, each.moved_bytes * self.byte_seconds)
            for each in operations
        )
        starting = started * self.start_seconds
        return max(worked, starting) if self.starts_alongside else worked + starting


def _rate_of(machine: MachineModel, candidate: Candidate) -> _PartRate:
    if not candidate.gpus:
        # No training of a whole graph was held against measured rates of cores.
        threads = candidate.threads.compute
        cores = rate_of_cores(machine, ranks=ranks_here(candidate), threads=threads, held=False)
        return _PartRate(
            flops=cores.flops,
            byte_seconds=1 / cores.bytes,
            copy_seconds=0.0,
            start_seconds=cores.start_seconds,
            spread=cores.spread,
            starts_alongside=False,
        )
    return _PartRate(
        flops=machine.table("gpu_flops").at(ranks=1.0),
        byte_seconds=memory_seconds_per_byte(machine, candidate),
        copy_seconds=max(copy_seconds_per_byte(machine, candidate)),
        start_seconds=start_seconds(machine),
        spread=max(machine.table(name).spread for name in ("gpu_flops", "gpu_kernel")),
        starts_alongside=True,
    )


def _derive_case(
    rate: _PartRate,
    work: Workload,
    sizes: PartSizes,
    case: Case,
    widths: Sequence[tuple[int, int, int]],
    crossing: PartSizes,
    others: int,
    after: CoreWork,
) -> CaseSeconds:
    """Derive one case: p of the halo is received, and p of its edges are left.

    With edges dropped the rows of `crossing` are. Whole slices come in as many turns as there are
    `others`, and are added one by one. Cores do the work `after` the layers too.
    """
    settings, layers = case.settings, len(widths)
    keep, known = settings.keep, settings.precompute_first_layer
    by_edge, slices = settings.drop != "nodes" and keep < 1, settings.exchange == "broadcast"
    received = crossing.halo if by_edge else keep * sizes.halo
    sent = 0.0 if slices else crossing.sent if by_edge else keep * sizes.sent
    sample = _draw_seconds(rate, sizes, settings, layers, sent)
    if case.draws_only:
        return CaseSeconds(
            sample=sample, forward_backward=0.0, packing=0.0, windows=[], spread=rate.spread
        )
    kept_inner = keep if settings.drop == "edges" else 1.0
    shapes = [
        LayerShape(
            num_src=sizes.inner + received,
            num_dst=sizes.inner,
            num_edges=kept_inner * sizes.inner_edges + keep * sizes.halo_edges,
            in_dim=a,
            out_dim=b * heads,
            inputs=layer == 0,
            heads=heads,
        )
        for layer, (a, b, heads) in enumerate(widths)
    ]
    layered = [
        part_work(work.model, shape, known=known and layer == 0, gpu=rate.starts_alongside)
        for layer, shape in enumerate(shapes)
    ]
    whole = sum(layered, after)
    inner = [replace(shape, num_edges=kept_inner * sizes.inner_edges) for shape in shapes]
    exchanged = [*inner[int(known) :], *inner[:0:-1]]
    turns = max(1, others) if slices else 1
    started = whole.starts
    if rate.starts_alongside:
        started = pass_starts(work.model, layers) + EXCHANGE_STARTS * turns * len(exchanged)
    moved = 2 * FLOAT_BYTES * sent * sum(shape.in_dim for shape in exchanged)
    return CaseSeconds(
        sample=sample,
        forward_backward=rate.of(whole.operations, started),
        packing=moved * rate.byte_seconds,
        windows=[
            rate.of([aggregation(beside, shape.in_dim)], 0.0 if rate.starts_alongside else 1.0)
            for shape in exchanged
            for beside in _beside(shape, sizes, turns)
        ],
        spread=rate.spread,
    )


def _beside(shape: LayerShape, sizes: PartSizes, turns: int) -> list[LayerShape]:
    """Return what is summed beside each turn: inner rows at first, then a slice's."""
    return [shape, *[replace(shape, num_edges=sizes.halo_edges / turns)] * (turns - 1)]


def _draw_seconds(
    rate: _PartRate, sizes: PartSizes, settings: FullGraph, layers: int, sent: float
) -> float:
    """Derive the seconds of an epoch's draws: on the host, and of cutting blocks on the GPU."""
    by_edge, inner = settings.drop != "nodes", settings.drop == "edges"
    drawn = 0
    if settings.keep < 1:
        drawn = 1 if settings.draws == "shared" else layers - int(settings.precompute_first_layer)
    edges = sizes.halo_edges + (sizes.inner_edges if inner else 0)
    numbers = edges if by_edge else sizes.halo + sizes.sent
    copied = 5 * sizes.halo + 8 * sent + (edges if by_edge else 0) + (4 * sizes.inner * inner)
    return drawn * (
        DRAW_SECONDS[settings.rounding] * numbers
        + rate.copy_seconds * copied
        + rate.byte_seconds * CUT_BYTES * edges
        + rate.start_seconds * CUT_STARTS * (2 if inner else 1)
    )


def part_work(model: str, shape: LayerShape, *, known: bool, gpu: bool) -> CoreWork:
    """Return the work of a layer over a part, which sums before the product but in attention.

    `known` sums are not taken again.
    """
    if model == "gat":
        return (
            CoreWork(operations=list(layer_operations(model, shape)))
            if gpu
            else attention_work(shape)
        )
    found = list(_summed_first(model, shape, known=known))
    return CoreWork(operations=found, starts=len(found))


def _summed_first(model: str, shape: LayerShape, *, known: bool) -> Iterator[Operation]:
    n, a, b = shape.num_dst, shape.in_dim, shape.out_dim
    wide = 2 * a if model == "sage" else a
    if not known:
        yield aggregation(shape, a)
    yield product(n, wide, b)
    yield product(n, wide, b)  # gradient of the weights
    if not shape.inputs:
        yield product(n, b, wide)  # gradient of the rows
        yield aggregation(shape, a)
    yield elementwise(n, b)  # bias and activation
    yield elementwise(n, b, passes=3)  # their backward
