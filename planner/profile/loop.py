"""The runtime's own training loop on synthetic or drawn batches, with which the model is timed.

A sampler numbers vertices in the order in which it first meets them, so neighbouring edges of a
real block often name neighbouring rows. Synthetic blocks are made likewise: of a hop's edges, some
are first meetings and get the next free number, the others name an earlier vertex at random.

`handing` measures a step without its stages' work: a ready batch passes the stages as a drawn one
does, is handed to the training thread, and a step is taken on it (DEC-35).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.planner.profile.draw import epoch_and_step, seed_schedule, whole_steps
from gnnplan.planner.profile.protocol import BatchShape, TimingRequest
from gnnplan.planner.workload import LoopOverhead
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.device import set_threads
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.stages import AbstractStage, BatchStage, SeedsStage, seed_batch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.weights import fill_weights
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.process import batch_threads
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import STEP, TrainLoop, make_optimizer
from gnnplan.runtime.train.overlap import Prefetcher, Turns, pass_through
from gnnplan.runtime.train.precision import Precision
from gnnplan.runtime.train.streams import streams_of

BATCHES = 3
"""Synthetic batches taken in turn, so that none stays in the cache."""


def make_loop(model: torch.nn.Module, workload: Workload, task: str) -> TrainLoop:
    """Make the runtime's training loop of a model, on all ranks of this process's group."""
    precision = Precision(workload.precision)
    precision.set_up(next(model.parameters()).device)
    return TrainLoop(
        model=model,
        optimizer=make_optimizer(
            model, learning_rate=workload.learning_rate, weight_decay=workload.weight_decay
        ),
        gradients=GradientBuffer(model),
        comm=Communicator(),
        meter=StageMeter(),
        task=task,
        seed=workload.seed,
        precision=precision,
    )


class Bench:
    """The runtime's own training loop on the batches of one request."""

    def __init__(self, request: TimingRequest) -> None:
        from gnnplan.runtime.models.build import build_model

        set_threads(request.threads)
        _join_ranks(request)
        work = request.workload
        model = build_model(
            work, request.in_dim, request.num_classes, request.task, types=request.types
        )
        model.train()
        self.request = request
        self.loop = make_loop(model, work, request.task)
        self.meter, self.comm = self.loop.meter, self.loop.comm
        self.batches = [
            [timed_batch(request, scale, seed) for seed in range(BATCHES)]
            for scale in request.scales
        ]
        self.steady = min(range(len(request.scales)), key=lambda s: abs(request.scales[s] - 1.0))
        """Position of the mean batch among the scales."""
        self.steps = 0

    def step(self, batch: MiniBatch) -> tuple[float, float, float]:
        """Return seconds of forward and backward, of the optimizer, and of adding gradients."""
        self.steps += 1
        self.loop.step(batch, self.steps)
        compute, update, added = (
            sum(self.meter.seconds(stage, skip_steps=self.steps))
            for stage in (Stage.FORWARD_BACKWARD, Stage.OPTIMIZER, Stage.ALL_REDUCE)
        )
        return compute, update, added

    def turn(self, scale: int, i: int) -> tuple[float, float, float]:
        """Take a step on the i-th batch in turn of a scale."""
        return self.step(self.batches[scale][i % len(self.batches[scale])])

    def agree(self, mine: bool) -> bool:
        """Return rank 0's answer, so that all ranks take the same steps."""
        return bool(self.comm.broadcast(torch.tensor([mine])).item())

    def read_from(self, out: NDArray[np.float32]) -> None:
        """Put the batches' rows into `out` [rows, feature_dim], which a loader writes."""
        self.batches = [on_rows(of_scale, out) for of_scale in self.batches]

    def part(self) -> None:
        """Leave the other ranks: the next request may have others."""
        if self.request.ranks > 1:
            import torch.distributed as dist

            dist.destroy_process_group()


def _join_ranks(request: TimingRequest) -> None:
    """Join the other ranks, where there are some."""
    if request.ranks > 1:
        import torch.distributed as dist

        with batch_threads():  # as the runtime makes its groups
            dist.init_process_group(
                "gloo",
                init_method=f"file://{request.meeting}",
                rank=request.rank,
                world_size=request.ranks,
            )


WARM = 4
"""First steps, which are not counted."""
LEAST_STEPS, MOST_STEPS = 10, 24
_OF_TRAINING = (Stage.FORWARD_BACKWARD, Stage.ALL_REDUCE, Stage.OPTIMIZER)


def handing(
    loop: TrainLoop,
    graph: Graph,
    workload: Workload,
    num_ranks: int,
    batches: Sequence[MiniBatch],
    first: int,
    steps: int = MOST_STEPS,
) -> LoopOverhead:
    """Take steps, and return medians of what is not drawing, gathering or computing.

    Args:
        loop: training loop of the model on one rank.
        graph: dataset whose seeds and labels are taken.
        workload: workload of the plan.
        num_ranks: ranks among which seeds are divided.
        batches: batches with rows and labels, taken in turn.
        first: number of the first step, higher than any that the meter knows.
        steps: steps to take, `WARM` of which are not counted.
    """
    stages = _stages(graph, workload, num_ranks, batches)
    loop.run(_make_batches(loop, stages, workload, graph, first, steps), first, lambda _: None)
    seconds = {
        name: np.asarray(loop.meter.seconds(name, skip_steps=first + WARM))
        for name in (STEP, *(stage.name for stage in stages), *_OF_TRAINING)
    }
    counted = steps - WARM
    between = seconds[STEP][-counted:].copy()
    for name, each in seconds.items():
        if name != STEP and each.size == counted:
            between -= each
    return LoopOverhead(
        seeds=float(np.median(seconds[Stage.SEEDS])),
        labels=float(np.median(seconds[Stage.BATCH])),
        between=max(0.0, float(np.median(between))),
    )


class _Nothing(AbstractStage):
    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        del index
        return batch


class _Ready(AbstractStage):
    """A stage that replaces chosen seeds by the next ready batch."""

    name = Stage.SAMPLE

    def __init__(self, batches: Sequence[MiniBatch]) -> None:
        self._turns = itertools.cycle(batches)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        del index
        ready = next(self._turns)
        if batch.seeds.size:
            ready.seeds = batch.seeds
        return ready


class _Labels(BatchStage):
    """A stage that takes the seeds' labels, and leaves those that fit the model's output."""

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        fitting = batch.y
        batch = super().submit(batch, index)
        batch.y = fitting
        return batch


def _stages(
    graph: Graph, workload: Workload, num_ranks: int, batches: Sequence[MiniBatch]
) -> list[AbstractStage]:
    sample, gather = _Ready(batches), _Nothing(Stage.GATHER)
    if str(graph.task) == "link" or graph.y is None:  # their seeds are drawn with the batch
        return [_Nothing(Stage.SEEDS), sample, gather, _Nothing(Stage.BATCH)]
    schedule = seed_schedule(graph, workload, num_ranks)
    labels = _Labels(graph, workload, torch.device("cpu"), lambda batch: batch)
    return [SeedsStage(schedule, Dialect.FIRST_SEEN), sample, gather, labels]


def _make_batches(
    loop: TrainLoop,
    stages: Sequence[AbstractStage],
    workload: Workload,
    graph: Graph,
    first: int,
    steps: int,
) -> Iterator[MiniBatch]:
    """Make each step's batch when it is asked for, as without loader threads."""
    streams = streams_of(torch.device("cpu"))
    whole = whole_steps(graph.num_train, workload.batch_size)

    def produce(index: int, turns: Turns) -> MiniBatch:
        batch = seed_batch(*epoch_and_step(index, whole), Dialect.FIRST_SEEN)
        return pass_through(batch, stages, loop.meter, streams, first + index, index, turns).batch

    with Prefetcher(produce, steps, workers=None, depth=1) as ready:
        for batch in ready:
            yield batch
            del batch


def synthetic_batch(shape: BatchShape, seed: int) -> MiniBatch:
    """Make a batch of that shape, whose ids count from 0, as a sampler would leave it."""
    rng = np.random.default_rng(seed)
    first_seen = Dialect(shape.dialect) is Dialect.FIRST_SEEN
    hops = len(shape.edges)
    pieces: list[NDArray[np.int32]] = []
    lengths: list[NDArray[np.int64]] = []
    blocks: list[Block] = []
    for hop in range(hops):
        before, after = shape.vertices[hop], max(shape.vertices[hop : hop + 2])
        expanded = before
        if first_seen:
            expanded -= shape.vertices[hop - 1] if hop else 0
        indices = _draw_sources(rng, before, after, shape.edges[hop])
        spread = _spread(shape.edges[hop], expanded)
        if first_seen:
            pieces.append(indices)
            lengths.append(spread)
            blocks.append(_block(after, before, np.concatenate(lengths), np.concatenate(pieces)))
        else:
            blocks.append(_block(after, before, spread, indices))
    blocks.reverse()
    _give_types(rng, shape, blocks)
    for block in blocks if shape.weighted else []:
        block.weight = rng.random(block.num_edges, dtype=np.float32)
    seeds = np.arange(shape.vertices[0], dtype=np.int64)
    return MiniBatch(
        blocks=blocks,
        n_id=np.arange(shape.vertices[-1], dtype=np.int64),
        seeds=seeds,
        input_id=seeds,
        dialect=Dialect(shape.dialect),
        num_sampled_nodes=np.diff(shape.vertices, prepend=0).tolist(),
        num_sampled_edges=list(shape.edges),
        global_num_seeds=shape.num_links or shape.vertices[0],
    )


def synthetic_links(shape: BatchShape, num_negatives: int, seed: int) -> NDArray[np.int64]:
    """Draw links between the seeds of a batch: int64 [num_links, 2 + num_negatives]."""
    rng = np.random.default_rng([seed, 1])
    return rng.integers(0, shape.vertices[0], (shape.num_links, 2 + num_negatives))


def _draw_sources(
    rng: np.random.Generator, before: int, after: int, num_edges: int
) -> NDArray[np.int32]:
    """Return the sources of a hop's edges: new vertices in order of meeting, others at random."""
    new = min(after - before, num_edges)
    at = np.sort(rng.choice(num_edges, size=new, replace=False)) if new else np.zeros(0, np.int64)
    met = np.zeros(num_edges, np.int64)
    met[at] = 1
    known = before + np.cumsum(met) - met
    sources = (rng.random(num_edges) * np.maximum(known, 1)).astype(np.int64)
    sources[at] = before + np.arange(new)
    return sources.astype(np.int32)


def _spread(num_edges: int, destinations: int) -> NDArray[np.int64]:
    if destinations <= 0:
        return np.zeros(0, np.int64)
    ends = np.linspace(0, num_edges, destinations + 1).round().astype(np.int64)
    return np.diff(ends)


def _give_types(rng: np.random.Generator, shape: BatchShape, blocks: list[Block]) -> None:
    """Deal types to edges, and to the outermost block's sources, in their profiled shares."""
    types = len(shape.edge_types)
    for block in blocks if types else []:
        rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
        drawn = rng.choice(types, size=block.num_edges, p=_to_one(shape.edge_types))
        # Sources are random, so only how many of a row's edges have each type matters.
        counts = np.bincount(rows * types + drawn, minlength=block.num_dst * types)
        block.relation_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    if shape.node_types:
        of_source = rng.choice(
            len(shape.node_types), size=blocks[0].num_src, p=_to_one(shape.node_types)
        )
        blocks[0].src_type = of_source.astype(np.int32)


def _to_one(shares: list[float]) -> NDArray[np.float64]:
    """Return shares that add up to 1, despite rounding; equal ones where all are 0."""
    given = np.asarray(shares, dtype=np.float64)
    return given / given.sum() if given.sum() > 0 else np.full(len(given), 1 / len(given))


def _block(
    num_src: int, num_dst: int, lengths: NDArray[np.int64], indices: NDArray[np.int32]
) -> Block:
    indptr = np.zeros(num_dst + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return Block(
        num_src=num_src,
        num_dst=num_dst,
        indptr=indptr,
        indices=np.ascontiguousarray(indices[: indptr[-1]]),
    )


def timed_batch(request: TimingRequest, scale: float, seed: int) -> MiniBatch:
    """Make a synthetic batch with features, labels and the model's edge weights."""
    batch = synthetic_batch(request.shape.scaled(scale), seed)
    fill_weights(batch, request.workload, some_degrees(batch))  # in place
    generator = torch.Generator().manual_seed(seed)
    batch.x = torch.randn(batch.n_id.shape[0], request.in_dim, generator=generator)
    if request.task == "link":
        shape, negatives = request.shape.scaled(scale), request.workload.links.num_negatives
        batch.y = torch.as_tensor(synthetic_links(shape, negatives, seed))
    else:
        batch.y = _some_labels(request, batch, generator)
    return batch


def drawn_batch(
    request: TimingRequest, batch: MiniBatch, out: NDArray[np.float32] | None, seed: int
) -> MiniBatch:
    """Make a drawn batch of nodes ready for a step; `out` are rows [rows, feature_dim], if any."""
    fill_weights(batch, request.workload, some_degrees(batch))  # in place
    generator = torch.Generator().manual_seed(seed)
    size = batch.n_id.size
    rows = torch.randn(size, request.in_dim) if out is None else torch.as_tensor(out)
    if size > len(rows):
        rows = rows.repeat(-(-size // len(rows)), 1)
    return replace(batch, x=rows[:size], y=_some_labels(request, batch, generator))


def _some_labels(request: TimingRequest, batch: MiniBatch, generator: Any) -> Any:
    if request.task == "multilabel":
        shape = (batch.num_seeds, request.num_classes)
        return torch.randint(0, 2, shape, generator=generator)
    classes = 2 if request.task == "binary" else request.num_classes
    return torch.randint(0, classes, (batch.num_seeds,), generator=generator)


def on_rows(batches: Sequence[MiniBatch], out: NDArray[np.float32]) -> list[MiniBatch]:
    """Put batches on rows `out` that a loader reads anew before each step (DEC-28)."""
    rows = torch.as_tensor(out)
    return [replace(batch, x=rows[: batch.n_id.size]) for batch in batches]


def some_degrees(batch: MiniBatch) -> NDArray[np.int64]:
    """Return one degree for every vertex up to the batch's last id, all of them one number.

    Its value does not change the work. A drawn batch names vertices of a whole graph, for each of
    which room is not taken.
    """
    return np.broadcast_to(np.int64(16), (int(batch.n_id.max(initial=-1)) + 1,))


def rehearse() -> bool:
    """Take a rank's step on a ring of a few nodes; return whether a kernel was compiled."""
    from numba.core import event

    compiling: Any = event  # numba has no types
    with compiling.install_recorder("numba:compile") as compiled:
        _train_a_step()
    return len(compiled.buffer) > 0


def _train_a_step() -> None:
    from gnnplan.runtime.features.gather import gather_rows
    from gnnplan.runtime.models.adjacency import torch_blocks
    from gnnplan.runtime.models.build import build_model
    from gnnplan.runtime.plan.schema import Workload
    from gnnplan.runtime.sampling.neighbor import NeighborSampler

    nodes, degree, width = 256, 4, 16
    work = Workload(num_layers=2, hidden=16, fanouts=[2, 2])
    neighbours = np.arange(nodes)[:, None] + np.arange(1, degree + 1)
    indptr = np.arange(0, nodes * degree + 1, degree, dtype=np.int64)
    indices = (neighbours % nodes).astype(np.int32).ravel()
    sampler = NeighborSampler(indptr, indices, work.fanouts)
    batch = fill_weights(sampler.sample(np.arange(32), epoch=0, step=0), work)
    x = np.empty((batch.n_id.shape[0], width), np.float32)
    gather_rows(np.zeros((nodes, width), np.float32), batch.n_id, x)
    model = build_model(work, width, 4, "multiclass")
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.0)
    model(torch.as_tensor(x), torch_blocks(batch)).sum().backward()
    optimizer.step()
