"""The model's time where it is not measured: operations and bytes of the profiled shapes.

    T = max( sum over operations of max(flops / F, bytes / B), K t_s )

F is the rate of products in the precision that is asked for, or float32's where that is not known,
B the bandwidth of the GPU's memory, K what the host starts for a step and t_s its seconds of one
start (cost.stages.host): it starts kernels while the GPU works. In 16 bits products move half the
bytes; all else is priced as in float32 (DEC-188).
On p cores of a rank, at the rates of such hardware (probe/parts/effects.yaml, DEC-145):

    T = starts t_o + sum over operations of max(flops / F, bytes / B)

t_o is the time that torch takes to start an operation; F and B grow as p^e. Operations and starts
are the runtime's on cores (`operations.CoreWork`). Where a probe or a training has measured this
machine's cores, all three rates are the machine's own at p threads (probe/computing.py, DEC-190).
Nothing is run; the provenance of every number made here is `derived`.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.cost.backends.cooperative import part_of, part_profile
from gnnplan.planner.cost.request import seeds_per_rank
from gnnplan.planner.cost.stages.host import (
    UPDATE_STARTS,
    block_starts,
    pass_starts,
    start_seconds,
)
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel, Table, make_table
from gnnplan.planner.probe.presets import load_effects
from gnnplan.planner.profile.operations import (
    FLOAT_BYTES,
    HALF_BYTES,
    HALVES,
    TENSORS,
    CoreWork,
    LayerShape,
    Operation,
    RooflineRate,
    elementwise,
    encoding_work,
    gradient_work,
    layer_operations,
    layer_work,
    link_loss_work,
    loss_work,
    multiplies_first,
    product,
    rounding,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import (
    SCALES,
    BatchProfile,
    Combination,
    LoopOverhead,
    ModelTiming,
    WorkloadProfile,
)
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import GraphRef, Workload
from gnnplan.runtime.sampling.registry import SAMPLERS

KNOWN_MODELS = ("sage", "gcn", "gat", "rgcn")
OPTIMIZER_PASSES = 7
"""Reads of parameter, gradient and two moments; writes of all but the gradient."""


def num_parameters(model: str, widths: Sequence[tuple[int, int, int]], relations: int = 1) -> int:
    """Count parameters of a model whose layers have (a inputs, b columns a head, h heads).

    sage: 2 a b + b;  rgcn: (1 + R) a b + b;  gcn: a b + b;
    gat: a h b + 2 h b, and a bias of h b (the last layer: b)

    >>> num_parameters("sage", [(100, 16, 1), (16, 7, 1)])
    3447
    """
    total = 0
    for i, (a, b, heads) in enumerate(widths):
        if model in ("sage", "rgcn"):
            total += (1 + relations) * a * b + b
        elif model == "gcn":
            total += a * b + b
        else:
            last = i == len(widths) - 1
            total += a * heads * b + 2 * heads * b + (b if last else heads * b)
    return total


def _count_parameters(
    workload: Workload, batch: BatchProfile, widths: Sequence[tuple[int, int, int]], in_dim: int
) -> int:
    """Count a model's parameters; rgcn also has a map for each node type."""
    found = num_parameters(workload.model, widths, max(1, len(batch.edge_types)))
    if workload.model == "rgcn":
        found += max(1, len(batch.node_types)) * (in_dim + 1) * workload.hidden
    return found


def layer_widths(workload: Workload, in_dim: int, num_outputs: int) -> list[tuple[int, int, int]]:
    """Return (inputs, columns of a head, heads) of every layer.

    >>> layer_widths(Workload(model="gat", hidden=8, heads=2), 5, 3)
    [(5, 4, 2), (8, 3, 2)]
    """
    inner = [workload.hidden] * (workload.num_layers - 1)
    if workload.model == "rgcn":  # a map per node type comes before the layers
        in_dim = workload.hidden
    heads = workload.heads if workload.model == "gat" else 1
    found: list[tuple[int, int, int]] = []
    for a, b in zip([in_dim, *inner], [*inner, num_outputs], strict=True):
        last = len(found) == workload.num_layers - 1
        found.append((a, b if last else b // heads, heads))
    return found


def check_model(workload: Workload, machine: MachineModel) -> None:
    """Refuse, by a SettingsError, a model whose work does not follow from its shapes."""
    if workload.model not in KNOWN_MODELS:
        raise SettingsError(
            f"machine {machine.name}: expected model {', '.join(KNOWN_MODELS)} (others cannot be "
            f"timed on its GPUs), found {workload.model}; plan with a machine that is here"
        )


def roofline_timing(
    workload: Workload,
    machine: MachineModel,
    batch: BatchProfile,
    *,
    ranks: int,
    in_dim: int,
    num_outputs: int,
    scales: Sequence[float],
    feature_dtype: str = "float32",
) -> ModelTiming:
    """Return the model's time on the machine's slowest GPU at the profiled shapes.

    The machine has tables gpu_flops and gpu_kernel, perhaps gpu_flops_tf32, and links gpu<g>.hbm.
    GPUs that compute at once share nothing. The table has points at `scales`, sizes over the mean
    batch. Rows of a batch come as `feature_dtype` where products take that, else in float32.
    """
    check_model(workload, machine)
    widths = layer_widths(workload, in_dim, num_outputs)
    flops, kernel = product_rate(machine, workload), machine.table("gpu_kernel")
    start, layers = start_seconds(machine), workload.num_layers
    relations = len(batch.edge_types)
    started = start * pass_starts(workload.model, layers, relations)
    blocks_started = start * block_starts(workload.model, layers)
    gpus = {gpu.name for gpu in machine.gpus}
    rate = RooflineRate(
        flops=flops.at(ranks=1.0),
        bytes=min(x.bandwidth_bytes_per_second for x in machine.links if x.target in gpus),
    )

    @functools.cache
    def worked(scale: float) -> float:
        operations = _operations(
            workload, batch, widths, in_dim, scale, "cuda", feature_dtype=feature_dtype
        )
        return sum(rate.seconds(each) for each in operations)

    seconds = [max(started, worked(scale)) for scale in scales]
    parameters = _count_parameters(workload, batch, widths, in_dim)
    update = update_operation(parameters)
    one = {"ranks": [ranks], "threads": [1]}
    weighted = batch.block_edges if blocks_started else []
    spread = max(flops.spread, kernel.spread)
    updates = [max(rate.seconds(update), UPDATE_STARTS * start)]
    return ModelTiming(
        forward_backward=make_table(
            "seconds", {"scale": scales} | one, seconds, spread, provenance="derived"
        ),
        optimizer=make_table("seconds", one, updates, spread, provenance="derived"),
        num_parameters=parameters,
        host_seconds=started + UPDATE_STARTS * start,
        device_seconds=worked(1.0) + rate.seconds(update),
        activation_bytes=_activation_bytes(
            workload, _shapes(workload.model, batch, widths, 1.0), "cuda"
        ),
        batch_seconds=blocks_started
        + sum(rate.seconds(elementwise(e.mean, 1, passes=3)) for e in weighted),
        batch_host_seconds=blocks_started,
    )


LOOP = LoopOverhead(seeds=3.3e-5, labels=3.5e-5, between=1.4e-4)
"""Seconds between the stages of a step, as cores of servers take (DEC-145)."""
HELD_MODELS = ("sage", "gcn")
"""Models of the steps that measured rates of cores were held against."""
UPDATE_OPERATIONS = 4
"""Operations of torch that an update by Adam takes on cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoresRate:
    """Rates at which a rank computes on so many threads while other ranks compute too."""

    flops: float
    bytes: float
    start_seconds: float
    """Seconds that torch takes to start an operation."""
    spread: float

    def seconds(self, work: CoreWork) -> float:
        """Return the seconds of operations one after the other."""
        rate = RooflineRate(flops=self.flops, bytes=self.bytes)
        return work.starts * self.start_seconds + sum(map(rate.seconds, work.operations))


def is_held(graph: Graph | GraphRef, settings: PlanSettings) -> bool:
    """Tell whether measured rates of cores were held against steps of such batches (DEC-190).

    Those were batches of nodes, each expanded once, and no links, layers or typed graphs.
    """
    spec = SAMPLERS.get(settings.sampler)
    return (
        settings.workload.model in HELD_MODELS
        and spec is not None
        and not (spec.layerwise or spec.takes_all or spec.unequal)
        and settings.dialect == "first_seen"
        and str(graph.task) != "link"
    )


def rate_of_cores(machine: MachineModel, *, ranks: int, threads: int, held: bool) -> CoresRate:
    """Return the rates of a rank's threads while so many ranks compute.

    They are the machine's own where a probe or a training has measured its cores, else those of
    such cores. Their spread is narrow where they were measured, are not uncertain, and price a step
    of a kind that was `held` against such rates (`is_held`).
    """
    effects, is_narrow = load_effects(), False
    if "core_flops" in machine.tables:
        names = ("core_start", "core_flops", "core_bytes")
        tables = [machine.table(name) for name in names]
        start, flops, rate = (each.at(threads=threads) for each in tables)
        is_narrow = held and not any(each.uncertain for each in tables)
    else:
        more = threads ** effects["core_threads_exponent"].value
        start = effects["core_start_seconds"].value
        flops = effects["core_flops_per_second"].value * more
        rate = effects["core_bytes_per_second"].value * more
    crowd = machine.tables.get("compute_slowdown")
    slowdown = 1.0 if crowd is None else max(1.0, crowd.at(ranks=ranks))
    return CoresRate(
        flops=flops / slowdown,
        bytes=rate / slowdown,
        start_seconds=start,
        spread=effects["core_rates_spread" if is_narrow else "core_spread"].value,
    )


def cores_timing(
    workload: Workload,
    machine: MachineModel,
    batch: BatchProfile,
    *,
    ranks: int,
    threads: Sequence[int],
    in_dim: int,
    num_outputs: int,
    scales: Sequence[float],
    held: bool,
    task: str = "multiclass",
) -> ModelTiming:
    """Return the model's time on cores while so many ranks compute, for each number of threads.

    `held` is as for `rate_of_cores`; `task` is the graph's, whose loss is taken.
    """
    rates = [rate_of_cores(machine, ranks=ranks, threads=each, held=held) for each in threads]
    alone = rate_of_cores(machine, ranks=1, threads=1, held=held)
    widths = layer_widths(workload, in_dim, num_outputs)
    worked = {scale: core_work(workload, batch, widths, in_dim, scale, task) for scale in scales}
    parameters = _count_parameters(workload, batch, widths, in_dim)
    shared = {"ranks": [ranks], "threads": threads}
    shapes = _shapes(workload.model, batch, widths, 1.0)
    return ModelTiming(
        forward_backward=make_table(
            "seconds",
            {"scale": scales} | shared,
            [rate.seconds(worked[scale]) for scale in scales for rate in rates],
            alone.spread,
            provenance="derived",
        ),
        optimizer=make_table(
            "seconds",
            shared,
            [update_seconds(alone, parameters)] * len(threads),
            alone.spread,
            provenance="derived",
        ),
        num_parameters=parameters,
        activation_bytes=_activation_bytes(workload, shapes, "cpu"),
        handing=LOOP,
    )


def update_seconds(rate: CoresRate, parameters: int) -> float:
    """Return the seconds of an update by Adam on cores."""
    alone = RooflineRate(flops=rate.flops, bytes=rate.bytes)
    return UPDATE_OPERATIONS * rate.start_seconds + alone.seconds(update_operation(parameters))


def update_operation(parameters: int) -> Operation:
    """Return the arithmetic and memory traffic of an update by Adam."""
    return Operation(flops=10.0 * parameters, moved_bytes=4.0 * OPTIMIZER_PASSES * parameters)


def core_work(
    workload: Workload,
    batch: BatchProfile,
    widths: Sequence[tuple[int, int, int]],
    in_dim: int,
    scale: float,
    task: str,
) -> CoreWork:
    """Count a step's work on cores, forward and back: layers, loss, and gradients that are added.

    Relations without edges are left out, as the runtime does on cores.
    """
    model, types = workload.model, max(1, len(batch.node_types))
    tensors, found = TENSORS[model] * len(widths), CoreWork()
    if model == "rgcn":
        tensors += 2 * types
        found = encoding_work(batch.vertices[-1].mean * scale, in_dim, workload.hidden, types)
    for shape in _shapes(model, batch, widths, scale):
        drawn = sum(share * shape.num_edges >= 1.0 for share in batch.edge_types)
        mine = replace(shape, relations=max(1, drawn))
        first = multiplies_first(workload, mine, "cpu")
        found += layer_work(model, mine, product_first=first)
    seeds, columns = batch.vertices[0].mean * scale, widths[-1][1]
    if task == "link":
        links = batch.seeds_per_rank * scale
        found += link_loss_work(links, workload.links.num_negatives, seeds, columns)
    else:
        found += loss_work(task, seeds, columns)
    return found + gradient_work(tensors, _count_parameters(workload, batch, widths, in_dim))


def product_rate(machine: MachineModel, workload: Workload) -> Table:
    """Return the table of matrix products; a GPU without TF32 has float32's rate.

    In half the bytes products take half of TF32's seconds, by the GPUs' data sheets.
    """
    rounded = machine.tables.get("gpu_flops_tf32")
    if rounded is None or workload.precision == "float32":
        return machine.table("gpu_flops")
    times = 2.0 if workload.precision in HALVES else 1.0
    return replace(rounded, values=[times * each for each in rounded.values])


def _operations(
    workload: Workload,
    batch: BatchProfile,
    widths: Sequence[tuple[int, int, int]],
    in_dim: int,
    scale: float,
    device: str,
    *,
    feature_dtype: str = "float32",
) -> Iterator[Operation]:
    """Yield the kernels of a step; rgcn's maps of its inputs come first, forward and backward."""
    half = device == "cuda" and workload.precision in HALVES
    size, rounds = HALF_BYTES if half else FLOAT_BYTES, half and feature_dtype != workload.precision
    if workload.model == "rgcn":
        rows = batch.vertices[-1].mean * scale
        if rounds:
            yield rounding(rows, in_dim)
        yield product(rows, in_dim, workload.hidden, item_bytes=size)
        yield product(rows, in_dim, workload.hidden, item_bytes=size)
        yield elementwise(rows, workload.hidden, passes=5)
    for shape in _shapes(workload.model, batch, widths, scale):
        first = multiplies_first(workload, shape, device)
        yield from layer_operations(
            workload.model, shape, product_first=first, item_bytes=size, rounds=rounds
        )


def _shapes(
    model: str, batch: BatchProfile, widths: Sequence[tuple[int, int, int]], scale: float
) -> list[LayerShape]:
    """Return layer sizes of the scaled mean batch; the first consumes the outermost block."""
    vertices = [v.mean * scale for v in reversed(batch.vertices)]
    return [
        LayerShape(
            num_src=vertices[layer],
            num_dst=vertices[layer + 1],
            # gcn and gat join every destination to itself.
            num_edges=batch.block_edges[layer].mean * scale
            + (vertices[layer + 1] if model in ("gcn", "gat") else 0.0),
            in_dim=a,
            out_dim=b * heads,
            inputs=layer == 0 and model != "rgcn",
            heads=heads,
            relations=max(1, len(batch.edge_types)),
        )
        for layer, (a, b, heads) in enumerate(widths)
    ]


def _activation_bytes(workload: Workload, shapes: Sequence[LayerShape], device: str) -> int:
    """Return bytes of rows kept for the backward pass, and of their gradients."""
    kept, model = 0.0, workload.model
    for s in shapes:
        kept += s.num_dst * s.out_dim
        if model == "rgcn":
            kept += s.num_src * s.in_dim  # what the layer before it, or the map, gave
        first = multiplies_first(workload, s, device)
        kept += s.relations * (s.num_src * s.out_dim if first else s.num_dst * s.in_dim)
        kept += 2 * s.num_edges * s.heads if model == "gat" else 0.0
    return round(2 * FLOAT_BYTES * kept)


def rooflines(
    graph: Graph | GraphRef,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    numbers: WorkloadProfile,
) -> dict[str, ModelTiming]:
    """Return the model's time on the machine's slowest GPU, by the keys of ways to use GPUs."""
    work, outputs = settings.workload, _outputs(graph, settings)
    every_hop = settings.dialect == "every_hop"

    def batch_of(combination: Combination) -> BatchProfile:
        shared = numbers.shared
        if not combination.shared or shared is None:
            return numbers.batch(seeds_per_rank(work.batch_size, combination.ranks))
        whole = numbers.batch(work.batch_size)
        return part_profile(whole, part_of(whole, shared, combination.ranks, every_hop=every_hop))

    return {
        combination.key(work.batch_size): roofline_timing(
            work,
            machine,
            batch_of(combination),
            ranks=combination.ranks,
            in_dim=graph.feature_dim,
            num_outputs=outputs,
            scales=SCALES,
            # Rows of batches that ranks share come in float32.
            feature_dtype="float32" if combination.shared else graph.feature_dtype,
        )
        for combination in combinations
    }


def _outputs(graph: Graph | GraphRef, settings: PlanSettings) -> int:
    special = {"binary": 1, "link": settings.workload.hidden}
    return special.get(str(graph.task), graph.num_classes)


def rates_of_cores(
    graph: Graph | GraphRef,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    numbers: WorkloadProfile,
) -> dict[str, ModelTiming]:
    """Return the model's time at the rates of such cores, by the keys of ways to use them."""
    work, by_key = settings.workload, dict[str, list[Combination]]()
    for each in combinations:
        by_key.setdefault(each.key(work.batch_size), []).append(each)
    return {
        key: cores_timing(
            work,
            machine,
            numbers.batch(seeds_per_rank(work.batch_size, mine[0].num_ranks)),
            ranks=mine[0].ranks,
            threads=sorted({each.threads for each in mine}),
            in_dim=graph.feature_dim,
            num_outputs=_outputs(graph, settings),
            scales=SCALES,
            held=is_held(graph, settings),
            task=str(graph.task),
        )
        for key, mine in by_key.items()
    }
