"""Batches drawn by the real sampler, and counts of what they read.

Batches are drawn until the expected number of input vertices is known to 2%, or one epoch has
passed; of small batches more, which cost little and rank the colder vertices. Two halves are
counted apart, so that a placement chosen on one can be scored on the other (formulas 1.4 (c) and
8.9 [A9]). They are whole epochs where those are cheap to draw, since half an epoch does not meet
what the other half's seeds read; else even and odd steps (DEC-36). Vertices that no batch met are
ordered by their analytic hotness.

Ranks that sample one batch together deal its vertices by a hash, and each asks the owners for what
its own vertices drew. How much that is follows, for every number P of ranks at once, from the rows
m_t of the batch that draw each vertex t:

    requests of a rank = (1 - 1/P) sum_t 1 - (1 - 1/P)^(m_t)

On a 1.5D grid a process row fetches every adjacency row that a stack of batches expands once.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.request import interpolate_inclusion, row_bytes, seeds_per_rank
from gnnplan.planner.cost.stages.gather import counted_runs, expected_runs
from gnnplan.planner.profile.analytic import neighbor_hotness, seed_probability, smooth
from gnnplan.planner.profile.draw import (
    Draw,
    drawer,
    last_batch,
    sampler_of,
    shared_batch,
    whole_steps,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, counted
from gnnplan.planner.workload import (
    BatchProfile,
    Combination,
    Hotness,
    SharedBatch,
    Spread,
    StackProfile,
)
from gnnplan.runtime.features.direct import read_header
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch

TARGET_ERROR = 0.02
"""Relative standard error of the expected input vertices at which drawing stops."""
MIN_BATCHES = 32
"""Batches drawn before that error is believed."""
MOST_BATCHES = 256
"""Batches from which hotness needs no more."""
MOST_IN_EPOCHS = 4 * MOST_BATCHES
"""Most batches of two whole epochs; of longer epochs the halves are even and odd steps."""
DRAWN_VERTICES = 4_000_000
"""Vertices that are drawn in about a second."""

MOST_SMOOTHED_EDGES = 1 << 26
"""Edges up to which vertices that no batch met are ordered, by one pass per hop."""


@dataclass(slots=True)
class _Counts:
    num_nodes: int
    vertices: list[list[int]] = field(default_factory=list[list[int]])
    edges: list[list[int]] = field(default_factory=list[list[int]])
    block_edges: list[list[int]] = field(default_factory=list[list[int]])
    halves: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    half_batches: list[int] = field(default_factory=lambda: [0, 0])
    topology: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Reads of each vertex's neighbours, shape [N]: whole numbers, exact below 2^24."""
    edge_types: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    node_types: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    runs: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Requests and bytes that would read each of the first batches' rows from a file."""
    row_bytes: int = 0
    """Bytes of a feature row; 0: the graph has none."""
    data_offset: int = 0
    indptr: NDArray[np.int64] | None = None
    """Begins of the graph's lists; None: their lengths are not counted."""
    entries: int = 0
    """Neighbours in the lists of expanded vertices."""

    def __post_init__(self) -> None:
        self.halves = [np.zeros(self.num_nodes, np.float32) for _ in range(2)]
        self.topology = np.zeros(self.num_nodes, np.float32)

    def add(self, batch: MiniBatch, half: int) -> None:
        self.vertices.append(np.cumsum(batch.num_sampled_nodes).tolist())
        self.edges.append(list(batch.num_sampled_edges))
        self.block_edges.append([b.num_edges for b in batch.blocks])
        # Ids are distinct within a batch, so fancy addition counts each once.
        self.halves[half][batch.n_id] += 1
        self.half_batches[half] += 1
        read = batch.blocks[:1] if batch.dialect is Dialect.FIRST_SEEN else batch.blocks
        for block in read:
            lengths = np.diff(block.indptr[: block.num_dst + 1])
            expanded = batch.n_id[: block.num_dst]
            self.topology[expanded] += lengths
            if self.indptr is not None:
                self.entries += int((self.indptr[expanded + 1] - self.indptr[expanded]).sum())
        if self.row_bytes and len(self.runs) < MIN_BATCHES:
            self.runs.append(counted_runs(np.sort(batch.n_id), self.row_bytes, self.data_offset))
        self._add_types(batch)

    def runs_over(self, p: NDArray[np.float32]) -> tuple[float, float]:
        """Return requests and bytes over those of rows met independently with chances p [N]."""
        if not self.runs:
            return 1.0, 1.0
        requests, moved = expected_runs(p, self.row_bytes, self.data_offset)
        counted = np.mean(self.runs, axis=0)
        return float(counted[0] / requests), float(counted[1] / moved)

    def _add_types(self, batch: MiniBatch) -> None:
        outer = batch.blocks[0]
        if outer.relation_ptr is not None and outer.num_dst:
            self.edge_types.append(np.diff(outer.relation_ptr).reshape(outer.num_dst, -1).sum(0))
        if outer.src_type is not None:
            self.node_types.append(np.bincount(outer.src_type))

    def share(self) -> float:
        """Return the share drawn of the batches that hotness needs; 1 or more: all."""
        drawn = len(self.vertices)
        vertices = sum(sizes[-1] for sizes in self.vertices)
        return max(drawn / MOST_BATCHES, min(drawn / MIN_BATCHES, vertices / DRAWN_VERTICES))

    def input_error(self) -> float:
        sizes = np.array([v[-1] for v in self.vertices], dtype=np.float64)
        if sizes.size < 2 or sizes.mean() == 0:
            return 1.0 if sizes.size < 2 else 0.0
        return float(sizes.std(ddof=1) / np.sqrt(sizes.size) / sizes.mean())


def presample(
    graph: Graph,
    workload: Workload,
    sampler: Sampler,
    num_ranks: int,
    *,
    progress: Progress | None = None,
) -> tuple[BatchProfile, Hotness]:
    """Draw batches as `num_ranks` ranks would; return their sizes, and reads of each vertex."""
    draw = drawer(graph, workload, sampler, num_ranks)
    counts = _Counts(
        graph.num_nodes,
        row_bytes=row_bytes(graph),
        data_offset=_data_offset(graph),
        indptr=graph.indptr,
    )
    epoch = whole_steps(graph.num_train, workload.batch_size)
    # Steps that one half has before the other has as many.
    turn = epoch if _cheap(2 * epoch * num_ranks, draw(0, 0)) else 1
    for step in itertools.count():
        for rank in range(num_ranks):
            counts.add(draw(rank, step), step // turn % 2)
        error = counts.input_error()
        if progress is not None:
            done = (step + 1) * num_ranks
            words = f"drawing batches for {counted(num_ranks, 'rank')}: {done} so far"
            progress(words, min(1.0, counts.share(), TARGET_ERROR / max(error, 1e-9)))
        known = error < TARGET_ERROR or step + 1 >= epoch
        if (step + 1) % (2 * turn) == 0 and known and counts.share() >= 1.0:
            break
    batch, hotness = _summary(counts, seeds_per_rank(workload.batch_size, num_ranks))
    last = last_batch(graph, workload, sampler, num_ranks)
    if last is not None:
        batch = replace(
            batch,
            last_vertices=np.cumsum(last.num_sampled_nodes).tolist(),
            last_edges=list(last.num_sampled_edges),
        )
    chance = seed_probability(graph.num_train, workload.batch_size, num_ranks=num_ranks)
    return batch, _smoothed(hotness, graph, workload, sampler, graph.train_idx, chance)


def presample_cliques(
    graph: Graph,
    workload: Workload,
    sampler: Sampler,
    cliques: Sequence[Sequence[int]],
    parts: NDArray[np.int32],
) -> list[Hotness]:
    """Draw batches of ranks that each have the seeds of a part; return reads by clique.

    As many of each clique as the hotness of all would need (formulas 2.3).
    """
    num_ranks = sum(map(len, cliques))
    draw = drawer(graph, workload, sampler, num_ranks, parts)
    seeds, found = seeds_per_rank(workload.batch_size, num_ranks), list[Hotness]()
    for clique in cliques:
        counts = _Counts(graph.num_nodes)
        for step in itertools.count():
            for rank in clique:
                counts.add(draw(rank, step), step % 2)
            if step % 2 and counts.share() >= 1.0:
                break
        among = graph.train_idx[np.isin(parts[graph.train_idx], clique)]
        chance = workload.batch_size / max(1, graph.num_train) / len(clique)
        hotness = _summary(counts, seeds)[1]
        found.append(_smoothed(hotness, graph, workload, sampler, among, min(1.0, chance)))
    return found


def _cheap(num_batches: int, batch: MiniBatch) -> bool:
    """Tell whether so many batches like this one are drawn in a second or two."""
    return num_batches <= MOST_IN_EPOCHS and num_batches * batch.n_id.size <= DRAWN_VERTICES


def _data_offset(graph: Graph) -> int:
    return 0 if graph.x is None else read_header(graph.array_path("x")).data_offset


def _smoothed(
    hotness: Hotness,
    graph: Graph,
    workload: Workload,
    sampler: Sampler,
    among: NDArray[np.int64],
    chance: float,
) -> Hotness:
    """Order vertices that a half never met by neighbour sampling of independent seeds.

    Seeds are `among` some nodes, each with the same chance.
    """
    typed, links = is_typed(workload), str(graph.task) == "link"
    if typed or links or graph.indices.shape[0] > MOST_SMOOTHED_EDGES:
        return hotness
    seeds = np.zeros(graph.num_nodes, np.float32)
    seeds[among] = chance
    every_hop = Dialect(sampler.dialect) is Dialect.EVERY_HOP
    likely = neighbor_hotness(
        np.asarray(graph.indptr),
        np.asarray(graph.indices),
        seeds,
        workload.fanouts,
        dialect="every_hop" if every_hop else "first_seen",
    )
    half = max(1, hotness.num_batches // 2)
    for measured in (hotness.first_half, hotness.second_half):
        smooth(measured, likely, half)  # in place: the halves are nobody else's yet
    return hotness


def _summary(counts: _Counts, seeds_per_rank: int) -> tuple[BatchProfile, Hotness]:
    """Return means, spreads and frequencies; the counts' arrays are reused."""
    first, second = counts.halves
    # In place, with one array beside: the counts are as long as the graph.
    for half, batches in zip(counts.halves, counts.half_batches, strict=True):
        half /= np.float32(max(1, batches))
    if counts.half_batches[1] == 0:
        second = first
    beside = first + second
    beside *= np.float32(0.5)
    total = float(beside.sum(dtype=np.float64))
    requests, moved = counts.runs_over(beside)
    np.abs(np.subtract(first, second, out=beside), out=beside)
    error = float(beside.sum(dtype=np.float64)) / total if total > 0 else 0.0
    del beside
    counts.topology /= np.float32(max(1, len(counts.vertices)))
    profile = BatchProfile(
        seeds_per_rank=seeds_per_rank,
        num_batches=len(counts.vertices),
        vertices=_spreads(counts.vertices),
        edges=_spreads(counts.edges),
        block_edges=_spreads(counts.block_edges),
        input_standard_error=counts.input_error(),
        half_epoch_error=error,
        edge_types=_shares(counts.edge_types),
        node_types=_shares(counts.node_types),
        disk_requests=requests,
        disk_bytes=moved,
        list_entries=counts.entries / max(1, len(counts.vertices)),
    )
    hotness = Hotness(
        seeds_per_rank=seeds_per_rank,
        first_half=first,
        second_half=second,
        num_batches=len(counts.vertices),
        topology=counts.topology,
    )
    return profile, hotness


def _shares(counts: list[NDArray[np.int64]]) -> list[float]:
    width = max((len(each) for each in counts), default=0)
    total = np.zeros(width)
    for each in counts:
        total[: len(each)] += each
    return (total / max(1.0, float(total.sum()))).tolist()


def _spreads(rows: list[list[int]]) -> list[Spread]:
    table = np.asarray(rows, dtype=np.float64)
    return [
        Spread(
            mean=float(column.mean()),
            std=float(column.std(ddof=1)) if column.size > 1 else 0.0,
            p99=float(np.quantile(column, 0.99)),
            largest=float(column.max()),
        )
        for column in table.T
    ]


STACK_SIZES = (1, 2, 4, 8, 16, 32)
"""Numbers of batches whose union of expanded vertices is counted."""


def stack_profile(
    draw: Draw,
    degrees: NDArray[np.integer],
    *,
    seeds_per_rank: int,
    num_ranks: int,
    steps: int,
    sizes: Sequence[int] = STACK_SIZES,
) -> StackProfile:
    """Count vertices, and entries of their adjacency rows, that stacks of batches expand.

    Args:
        draw: batches by rank and step.
        degrees: entries of every adjacency row, shape (num_nodes,).
        seeds_per_rank: seeds of a batch.
        num_ranks: ranks that `draw` knows.
        steps: whole batches of an epoch; larger stacks are left out.
        sizes: numbers of batches, ascending.
    """
    most = max(1, min(max(sizes), steps * num_ranks))
    used = [size for size in sizes if size <= most] or [1]
    batches = [draw(i % num_ranks, i // num_ranks) for i in range(max(used))]
    lists = [expanded(batch) for batch in batches]
    hops = len(batches[0].blocks)
    rows: list[list[float]] = [[] for _ in range(hops)]
    entries: list[list[float]] = [[] for _ in range(hops)]
    for hop in range(hops):
        for size in used:
            ids = np.unique(np.concatenate([each[hop] for each in lists[:size]]))
            rows[hop].append(float(ids.size))
            entries[hop].append(float(degrees[ids].sum(dtype=np.int64)))
    return StackProfile(
        seeds_per_rank=seeds_per_rank, sizes=[float(s) for s in used], rows=rows, entries=entries
    )


def expanded(batch: MiniBatch) -> list[NDArray[np.int64]]:
    """Return the vertices whose lists each hop reads."""
    ends = np.cumsum(batch.num_sampled_nodes).tolist()
    first_seen = batch.dialect is Dialect.FIRST_SEEN
    found: list[NDArray[np.int64]] = []
    for hop in range(len(batch.blocks)):
        start = ends[hop - 1] if hop and first_seen else 0
        found.append(batch.n_id[start : ends[hop]])
    return found


MOST_SAMPLED = 3
"""Numbers of ranks that are pre-sampled; those between are interpolated [A5]."""


def draw_all(
    graph: Graph,
    settings: PlanSettings,
    combinations: Sequence[Combination],
    progress: Progress | None,
    *,
    keep: Callable[[Hotness], Hotness] = lambda hotness: hotness,
) -> tuple[dict[int, BatchProfile], dict[int, Hotness]]:
    """Return batch sizes and hotness, as replaced by `keep`, by seeds per rank."""
    ranks = sorted({c.num_ranks for c in combinations} | {1 for c in combinations if c.shared})
    sampler = sampler_of(settings)
    batches: dict[int, BatchProfile] = {}
    hotness: dict[int, Hotness] = {}

    def draw(count: int) -> None:
        batch, hot = presample(graph, settings.workload, sampler, count, progress=progress)
        batches[batch.seeds_per_rank], hotness[batch.seeds_per_rank] = batch, keep(hot)

    for count in {ranks[0], ranks[len(ranks) // 2], ranks[-1]}:
        draw(count)
    # The power forms bend noise too: from few batches they are off, and few are soon drawn.
    rough = min(b.num_batches for b in batches.values()) < MIN_BATCHES
    for count in ranks:
        seeds = seeds_per_rank(settings.workload.batch_size, count)
        if seeds in batches:
            continue
        if rough or len(ranks) <= MOST_SAMPLED:
            draw(count)
        else:
            batches[seeds], between_them = interpolated(seeds, batches, hotness)
            hotness[seeds] = keep(between_them)
    return batches, hotness


def interpolated(
    seeds: int, batches: dict[int, BatchProfile], hotness: dict[int, Hotness]
) -> tuple[BatchProfile, Hotness]:
    """Interpolate a batch size between two profiled ones, by both power forms [A5]."""
    low = max(s for s in hotness if s <= seeds)
    high = min(s for s in hotness if s >= seeds)
    weight = float(np.log(seeds / low) / np.log(high / low)) if high > low else 0.0
    near = batches[low] if weight < 0.5 else batches[high]
    a, b = hotness[low], hotness[high]
    halves = [
        interpolate_inclusion(seeds, (low, getattr(a, half)), (high, getattr(b, half)))
        for half in ("first_half", "second_half")
    ]
    vertices = float((halves[0] + halves[1]).sum(dtype=np.float64)) / 2
    factor = vertices / near.vertices[-1].mean if near.vertices[-1].mean > 0 else 1.0
    scaled = replace(
        near,
        seeds_per_rank=seeds,
        vertices=[s.scaled(factor) for s in near.vertices],
        edges=[s.scaled(factor) for s in near.edges],
        block_edges=[s.scaled(factor) for s in near.block_edges],
        last_vertices=[round(n * factor) for n in near.last_vertices],
        last_edges=[round(n * factor) for n in near.last_edges],
    )
    hot = Hotness(
        seeds_per_rank=seeds,
        first_half=halves[0],
        second_half=halves[1],
        num_batches=near.num_batches,
        topology=(a.topology * (1 - weight) + b.topology * weight).astype(np.float32),
    )
    return scaled, hot


def draw_sharing(
    graph: Graph, settings: PlanSettings, combinations: Sequence[Combination]
) -> tuple[SharedBatch | None, dict[str, StackProfile]]:
    """Count what ranks that share a batch, or the topology, ask each other for."""
    work, sampler = settings.workload, sampler_of(settings)
    steps = max(1, graph.num_train // work.batch_size)
    shared = None
    if any(c.shared for c in combinations):
        shared = shared_batch(drawer(graph, work, sampler, 1), steps=steps)
    stacks: dict[str, StackProfile] = {}
    degrees = np.diff(graph.indptr) if any(c.parts for c in combinations) else np.zeros(0, np.int64)
    for ranks in sorted({c.num_ranks for c in combinations if c.parts}):
        seeds = seeds_per_rank(work.batch_size, ranks)
        draw = drawer(graph, work, sampler, ranks)
        stacks[str(seeds)] = stack_profile(
            draw, degrees, seeds_per_rank=seeds, num_ranks=ranks, steps=steps
        )
    return shared, stacks
