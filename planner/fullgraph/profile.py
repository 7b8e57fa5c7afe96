"""Profile full-graph training, cached: parts, and a rank's own seconds on them.

Every cut (ranks, threads, partitioner) is partitioned once, and its parts are timed at once, one
process each, as the ranks of a run would compute; those of several hosts, host after host. Seconds
of GPUs are derived from the parts' sizes (`derive_part`, DEC-122). What dropping boundary nodes
adds to the variance is estimated on the input features, since hidden layers are not known before
training:

    V = mean_u sum_{v in N(u) outside} a_uv^2 |x_v|^2,   eps^2 = 0.1 mean_u |sum_v a_uv x_v|^2

Source: docs/formulas.md 3.3 and 3.6.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse  # pyright: ignore[reportMissingTypeStubs]

from gnnplan.planner.cache_folder import cache_folder as root_folder
from gnnplan.planner.candidate import Candidate, make_candidate
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte, memory_seconds_per_byte
from gnnplan.planner.cost.stages.host import UPDATE_STARTS, pass_starts, start_seconds
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.fullgraph.candidate import Cut
from gnnplan.planner.fullgraph.formulas import PartSizes, p_variance
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.partition.partition import partition
from gnnplan.planner.probe.quiet import disturbance
from gnnplan.planner.probe.timing import WAITED, Patience
from gnnplan.planner.profile.cache import cache_folder
from gnnplan.planner.profile.roofline import (
    FLOAT_BYTES,
    OPTIMIZER_PASSES,
    LayerShape,
    Operation,
    aggregation,
    elementwise,
    layer_operations,
    layer_widths,
    num_parameters,
    product,
)
from gnnplan.planner.profile.team import Team, launcher_bytes
from gnnplan.planner.progress import Progress, silent
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import ProcessCost
from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.folders import take_name
from gnnplan.runtime.fullgraph.part import Part, build_part, connect_parts
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.npy import map_npy
from gnnplan.runtime.plan.schema import FullGraph, Workload
from gnnplan.runtime.train.evaluate import reader_of


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


SAMPLED_NODES = 2000
MOST_EDGES = 200_000
"""Most edges of sampled nodes that are looked at: their rows are read."""
TOLERATED = 0.1
"""Added variance that is tolerated, eps^2 over |z|^2."""
DEFAULT_KEEP = 0.1
"""p that is published as safe (docs/formulas.md 3.6), for graphs without features."""
LEAST_KEEP = 0.01
"""p that is published as safe with a good partition; nothing is estimated to allow less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variance:
    """The estimated variance."""

    boundary: float
    """V."""
    signal: float
    """Mean of |z|^2."""
    nodes: int
    """Sampled nodes; 0 without features."""

    @property
    def least_keep(self) -> float:
        """p_var: the smallest p whose added variance is tolerated."""
        if self.nodes == 0 or self.signal == 0:
            return DEFAULT_KEEP
        return max(LEAST_KEEP, float(p_variance(self.boundary, TOLERATED * self.signal)))


def measure_variance(graph: Graph, found: NDArray[np.int32], model: str) -> Variance:
    """Estimate V and |z|^2 over a sample of nodes, always the same.

    Without features nothing is estimated. gcn weighs by both degrees, the other models by 1 / d.
    """
    try:
        read = reader_of(graph, None)
    except DatasetError:
        return Variance(boundary=0.0, signal=0.0, nodes=0)
    rng = np.random.default_rng(0)
    nodes = rng.permutation(graph.num_nodes)[:SAMPLED_NODES]
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes]
    nodes = nodes[: max(1, int(np.searchsorted(np.cumsum(degree), MOST_EDGES)))]
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes]
    row = np.repeat(np.arange(len(nodes)), degree)
    inside = np.arange(len(row)) - np.repeat(np.cumsum(degree) - degree, degree)
    sources = np.asarray(graph.indices[graph.indptr[nodes][row] + inside], np.int64)
    unique, where = np.unique(sources, return_inverse=True)
    x = np.empty((len(unique), graph.feature_dim), np.float32)
    read(unique, x)
    if model == "gcn":
        theirs = graph.indptr[unique + 1] - graph.indptr[unique]
        weight = 1 / np.sqrt((degree[row] + 1.0) * (theirs[where] + 1.0))
    else:
        weight = 1 / np.maximum(degree[row], 1.0)
    squares = (x.astype(np.float64) ** 2).sum(1)
    outside = found[sources] != found[nodes[row]]
    boundary = float((weight**2 * squares[where] * outside).sum()) / len(nodes)
    shape = (len(nodes), len(unique))
    entries = (weight.astype(np.float32), (row, where))
    weights: Any = sparse.csr_array(entries, shape=shape)
    z: NDArray[np.float32] = np.asarray(weights @ x)
    return Variance(boundary=boundary, signal=float((z**2).sum() / len(nodes)), nodes=len(nodes))


VERSION = 3
"""Number that rises when a profile means something else than before."""
ANCHORS = (0.1, 0.5)
"""Probabilities at which sampled epochs are timed; their seconds are linear in p."""
MODULE = "gnnplan.planner.fullgraph.timing"
PROFILE_FILE = "profile.json"
PARTITION_FILE = "partition.npy"


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProfile:
    """One cut: its parts and what their ranks take."""

    cut: Cut
    sizes: list[PartSizes]
    """Sizes by rank."""
    seeds: list[int]
    """Training nodes by rank."""
    variance: Variance
    cases: list[Case]
    ranks: list[PartAnswer]
    process: ProcessCost

    @property
    def volume(self) -> int:
        """Boundary rows of all parts, per exchange."""
        return sum(part.halo for part in self.sizes)

    @property
    def widths(self) -> list[int]:
        """d_0 .. d_L."""
        return self.ranks[0].widths

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return self.ranks[0].num_parameters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullProfile:
    """A cut's numbers, and its partition."""

    numbers: CutProfile
    partition: NDArray[np.int32]


def cases_of(cut: Cut, draws: Sequence[str]) -> list[Case]:
    """List what is timed of a cut: p = 1 with and without the first layer, and anchors of p < 1.

    `draws` are `layer`, `shared`, both, or nothing where only p = 1 is allowed.
    """
    found = [Case(settings=FullGraph(precompute_first_layer=known)) for known in (False, True)]
    for each in draws if cut.ranks > 1 else ():
        for keep in ANCHORS:
            settings = FullGraph(keep=keep, draws="shared" if each == "shared" else "layer")
            rounded = replace(settings, rounding="stochastic")
            found += [Case(settings=settings), Case(settings=rounded, draws_only=True)]
    return found


def profile_cuts(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    cuts: Sequence[Cut],
    draws: Sequence[str],
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> list[FullProfile]:
    """Profile every cut, from the cache where it was made before.

    The machine's fingerprint enters the key, since seconds are the machine's. `draws` are those of
    `cases_of`; without `measure` nothing is timed.

    Raises:
        SettingsError: nothing may be measured and a profile is not cached.
        WorkerFailed: a part could not be timed; the text is its own error.
    """
    say = progress or silent
    found: dict[Cut, FullProfile] = {}
    for cut in cuts:
        kept = _load(_key(graph, settings, machine, cut, draws))
        if kept is not None:
            found[cut] = kept
    for cut in cuts:
        if cut.on_gpus and cut not in found:
            made = _derive(graph, settings, machine, cut, cases_of(cut, draws))
            key = _key(graph, settings, machine, cut, draws)
            _save(key, made)
            found[cut] = _load(key) or made
    missing = [cut for cut in cuts if cut not in found]
    if missing and not measure:
        raise SettingsError(
            f"expected full-graph profiles of {graph.name} in {cache_folder().parent}, found none "
            "for these settings and this machine; plan again"
        )
    if missing:
        size = max(cut.ranks // cut.hosts for cut in missing)
        with disturbance(root_folder()) as disturbed, Team(size, MODULE) as team:
            patience = Patience(disturbed.level, share=WAITED)
            for i, cut in enumerate(missing):
                say(f"timing {cut.name}", i / len(missing))
                made = _make(graph, settings, cut, cases_of(cut, draws), team, patience)
                key = _key(graph, settings, machine, cut, draws)
                _save(key, made)
                # Read back: the first plan and a repeated one then see the very same numbers.
                found[cut] = _load(key) or made
    return [found[cut] for cut in cuts]


def _make(
    graph: Graph,
    settings: PlanSettings,
    cut: Cut,
    cases: list[Case],
    team: Team,
    patience: Patience,
) -> FullProfile:
    """Partition, count and time, without looking at the cache."""
    model = settings.workload.model
    parts = connect_cut(graph, cut_graph(graph, cut), cut.ranks, model)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        np.save(place / PARTITION_FILE, parts.partition)
        requests: list[str] = []
        for part in parts.parts:
            wanted = place / f"wanted-{part.rank}.npy"
            np.save(wanted, part.inner[part.send])
            request = PartRequest(
                workload=settings.workload,
                graph_path=str(graph.path.resolve()),
                fingerprint=graph.fingerprint,
                partition_path=str(place / PARTITION_FILE),
                wanted_path=str(wanted),
                wanted_counts=[int(n) for n in part.send_counts],
                rank=part.rank,
                size=cut.ranks,
                in_dim=graph.feature_dim,
                num_classes=graph.num_classes,
                task=str(graph.task),
                threads=cut.threads,
                cases=cases,
            )
            requests.append(json.dumps(codec.to_plain(request)))
        answers: list[str] = []
        here = cut.ranks // cut.hosts
        for first in range(0, cut.ranks, here):
            mine = requests[first : first + here]
            answers += patience.timed(lambda mine=mine: team.ask(mine, cut.threads))
    numbers = CutProfile(
        cut=cut,
        sizes=parts.sizes,
        seeds=parts.seeds,
        variance=measure_variance(graph, parts.partition, model),
        cases=cases,
        ranks=[codec.decode(PartAnswer, json.loads(answer)) for answer in answers],
        process=replace(team.process, launcher_bytes=launcher_bytes()),
    )
    return FullProfile(numbers=numbers, partition=parts.partition)


def _derive(
    graph: Graph, settings: PlanSettings, machine: MachineModel, cut: Cut, cases: list[Case]
) -> FullProfile:
    """Partition and count, and derive what GPUs take."""
    work = settings.workload
    parts = connect_cut(graph, cut_graph(graph, cut), cut.ranks, work.model)
    outputs = 1 if str(graph.task) == "binary" else graph.num_classes
    candidate = make_candidate(cut.devices)
    numbers = CutProfile(
        cut=cut,
        sizes=parts.sizes,
        seeds=parts.seeds,
        variance=measure_variance(graph, parts.partition, work.model),
        cases=cases,
        ranks=[
            derive_part(machine, candidate, work, sizes, cases, (graph.feature_dim, outputs))
            for sizes in parts.sizes
        ],
        process=ProcessCost(start_seconds=0.0, resident_bytes=0),
    )
    return FullProfile(numbers=numbers, partition=parts.partition)


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
) -> PartAnswer:
    """Derive a part's seconds on a GPU: the roofline of its layers, or the host's launches.

    `ends` are the widths of inputs and outputs. Source: profile.roofline; docs/modelling.md 5.
    """
    widths = layer_widths(work, *ends)
    rate = _GpuRate(
        flops=machine.table("gpu_flops").at(ranks=1.0),
        byte_seconds=memory_seconds_per_byte(machine, candidate),
        copy_seconds=max(copy_seconds_per_byte(machine, candidate)),
        start_seconds=start_seconds(machine),
    )
    parameters = num_parameters(work.model, widths)
    update = Operation(flops=10.0 * parameters, moved_bytes=4.0 * OPTIMIZER_PASSES * parameters)
    spread = max(machine.table(name).spread for name in ("gpu_flops", "gpu_kernel"))
    return PartAnswer(
        cases=[_derive_case(rate, work, sizes, case, widths, spread) for case in cases],
        optimizer_seconds=max(rate.of([update]), UPDATE_STARTS * rate.start_seconds),
        num_parameters=parameters,
        widths=[a for a, _, _ in widths] + [ends[1]],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _GpuRate:
    """Rates of the slowest GPU and its host."""

    flops: float
    byte_seconds: float
    copy_seconds: float
    start_seconds: float

    def of(self, operations: Iterable[Operation]) -> float:
        """Add up the seconds of operations one after the other."""
        return sum(
            max(each.flops / self.flops, each.moved_bytes * self.byte_seconds)
            for each in operations
        )


def _derive_case(
    rate: _GpuRate,
    work: Workload,
    sizes: PartSizes,
    case: Case,
    widths: Sequence[tuple[int, int, int]],
    spread: float,
) -> CaseSeconds:
    """Derive one case: p of the halo is received, and p of its edges are left."""
    settings, layers = case.settings, len(widths)
    keep, known = settings.keep, settings.precompute_first_layer
    drawn = 0 if keep >= 1 else 1 if settings.draws == "shared" else layers - int(known)
    ids = sizes.halo + sizes.sent
    sample = drawn * (
        DRAW_SECONDS[settings.rounding] * ids
        + rate.copy_seconds * (5 * sizes.halo + 8 * keep * sizes.sent)
        + rate.byte_seconds * CUT_BYTES * sizes.halo_edges
        + rate.start_seconds * CUT_STARTS
    )
    if case.draws_only:
        return CaseSeconds(
            sample=sample, forward_backward=0.0, packing=0.0, windows=[], spread=spread
        )
    shapes = [
        LayerShape(
            num_src=sizes.inner + keep * sizes.halo,
            num_dst=sizes.inner,
            num_edges=sizes.inner_edges + keep * sizes.halo_edges,
            in_dim=a,
            out_dim=b * heads,
            inputs=layer == 0,
            heads=heads,
        )
        for layer, (a, b, heads) in enumerate(widths)
    ]
    operations = [
        each
        for layer, shape in enumerate(shapes)
        for each in part_operations(work.model, shape, known=known and layer == 0)
    ]
    inner = [replace(shape, num_edges=sizes.inner_edges) for shape in shapes]
    crossing = [*inner[int(known) :], *inner[:0:-1]]
    started = pass_starts(work.model, layers) + EXCHANGE_STARTS * len(crossing)
    moved = 2 * FLOAT_BYTES * keep * sizes.sent * sum(shape.in_dim for shape in crossing)
    return CaseSeconds(
        sample=sample,
        forward_backward=max(rate.of(operations), started * rate.start_seconds),
        packing=moved * rate.byte_seconds,
        windows=[rate.of([aggregation(shape, shape.in_dim)]) for shape in crossing],
        spread=spread,
    )


def part_operations(model: str, shape: LayerShape, *, known: bool) -> Iterator[Operation]:
    """Yield the kernels of a layer over a part, which sums before the product but in attention.

    `known` sums are not taken again.
    """
    if model == "gat":
        yield from layer_operations(model, shape)
        return
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


def _key(
    graph: Graph, settings: PlanSettings, machine: MachineModel, cut: Cut, draws: Sequence[str]
) -> str:
    """Hash everything that decides a profile."""
    work = settings.workload
    model = [work.model, work.num_layers, work.hidden, work.heads, work.dropout, work.seed]
    decided = [VERSION, graph.fingerprint, machine.fingerprint, model, cut, cases_of(cut, draws)]
    decided += [machine.calibration] if cut.on_gpus else []
    return codec.content_hash(decided)[:32]


def _folder(key: str) -> Path:
    return cache_folder().parent / "fullgraph" / key


def _load(key: str) -> FullProfile | None:
    """Read the cached profile; a damaged one counts as absent."""
    place = _folder(key)
    try:
        numbers = codec.decode(CutProfile, codec.parse((place / PROFILE_FILE).read_bytes()))
        found = np.array(map_npy(place / PARTITION_FILE))
    except (OSError, ValueError):
        return None
    inner = [part.inner for part in numbers.sizes]
    if found.dtype != np.int32 or found.ndim != 1 or len(found) != sum(inner):
        return None
    if found.min(initial=0) < 0 or found.max(initial=0) >= len(inner):
        return None
    if np.bincount(found, minlength=len(inner)).tolist() != inner:
        return None
    return FullProfile(numbers=numbers, partition=found)


def _save(key: str, made: FullProfile) -> None:
    """Keep a profile, as a whole or not at all."""
    place = _folder(key)
    place.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{key}."))
    try:
        np.save(staging / PARTITION_FILE, made.partition)
        (staging / PROFILE_FILE).write_text(codec.dumps(made.numbers))
        # What was there is damaged, or another process's and as good.
        earlier = take_name(staging, place)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
