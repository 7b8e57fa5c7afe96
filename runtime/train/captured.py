"""The training step as one graph over padded shapes, replayed for every batch.

  batch -> inputs of fixed shapes -> forward, backward, all-reduce, update -> results on the device

Where the device can draw and gather a batch without the host (`gpu.padded`), nothing is copied
(DEC-166). Two sets of buffers then take turns: while a step trains on one, the next batch is drawn
into the other on a lane of its own, forked and joined inside the graph (DEC-171).

  training lane   step t          step t + 1
  draw lane       batch t + 1     batch t + 2

Gradients are summed inside the graph where its library can be captured and nothing else of this
rank is sent meanwhile; else between two graphs, in the order that all ranks keep (DEC-172).

Numbers of true rows lie on the device, where kernels read them. Padding adds zeros alone to loss
and gradients. A batch that does not fit is taken as an empty one and flagged: its update, and every
later one, is left out on the device until the host looks, every `LOOK_EVERY` steps. The host then
takes that batch kernel by kernel and goes on behind it, so updates keep their order (DEC-168).
Batches that several ranks copy in are kept till then, for another rank's may not fit: the host
looks as soon as the plan has room for no more of them.

A GPU replays a CUDA graph; where none is captured the same calls are made one by one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnplan.runtime.device import has_triton
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.loader.device_place import PaddedStep
from gnnplan.runtime.meter import STEP
from gnnplan.runtime.models.adjacency import (
    TorchBlock,
    drawn_blocks,
    fill_padded,
    fits_padded,
    make_padded,
    torch_blocks,
)
from gnnplan.runtime.models.functions import drawing_by
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.plan.schema import Plan, StepShapes
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.rng import Purpose, stream
from gnnplan.runtime.stages import LOOK_EVERY, Stage, refuse_captured
from gnnplan.runtime.train.minibatch import TrainLoop, finite_loss
from gnnplan.runtime.train.precision import widen
from gnnplan.runtime.train.streams import streams_of

_WARM_RUNS = 3
"""Runs before the capture, in which kernels are compiled and libraries make their workspaces."""
DRAW_LANE = "draw"
"""Lane on which the next batch is drawn."""


@dataclass(kw_only=True, slots=True)
class StepInputs:
    """What a captured step reads: buffers that never move, and counts on the device."""

    blocks: list[TorchBlock]
    x: Tensor
    y: Tensor
    num_labels: Tensor
    """True rows of `y`, int64 (1,)."""
    global_num_seeds: Tensor
    """Seeds of the step over all ranks, float32 (1,)."""
    overflow: Tensor
    """1 where this rank's batch did not fit, else 0; float32 (1,)."""
    key: Tensor
    """Stream of the step's dropout, int64 (1,)."""
    draws: Any = None
    """`PaddedDraws` that fill the buffers of `padded`; None: batches are copied in."""
    padded: Any = None
    replay: Callable[[], None] | None = None
    """Function that trains on these buffers; None before the capture."""

    @staticmethod
    def over(draws: Any) -> "StepInputs":
        """Return buffers that the device draws every batch into."""
        padded = draws.new_batch()
        device = padded.x.device
        return StepInputs(
            blocks=drawn_blocks(padded),
            x=padded.x,
            y=padded.y,
            num_labels=padded.labels_now,
            global_num_seeds=torch.ones(1, device=device),
            overflow=torch.zeros(1, device=device),
            key=torch.zeros(1, dtype=torch.int64, device=device),
            draws=draws,
            padded=padded,
        )

    def draw(self) -> None:
        """Draw the next batch on the device, where batches are not copied in; waits for nothing.

        It reads nothing that a step writes, and writes nothing that a step reads but these buffers.
        """
        if self.draws is not None:
            self.draws.fill(self.padded)
            self.global_num_seeds.copy_(self.padded.now[3:].clamp(min=1))
            self.overflow.copy_(self.padded.overflow)

    @staticmethod
    def like(
        batch: MiniBatch,
        blocks: list[TorchBlock],
        shapes: StepShapes,
        *,
        labels: int,
        loops: bool,
        relations: int,
    ) -> "StepInputs":
        """Make buffers for batches such as this one; with `loops` blocks hold self-loops too."""
        device = batch.x.device
        rows, edges = list(reversed(shapes.rows)), list(reversed(shapes.edges))
        made = [
            make_padded(block, rows[i], rows[i + 1], edges[i] + loops * rows[i + 1], relations)
            for i, block in enumerate(blocks)
        ]
        return StepInputs(
            blocks=made,
            x=batch.x.new_zeros((rows[0], batch.x.shape[1])),
            y=batch.y.new_zeros((labels, *batch.y.shape[1:])),
            num_labels=torch.zeros(1, dtype=torch.int64, device=device),
            global_num_seeds=torch.ones(1, device=device),
            overflow=torch.zeros(1, device=device),
            key=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def fill(self, batch: MiniBatch, blocks: list[TorchBlock]) -> bool:
        """Copy a batch in; return whether it fits. One that does not leaves an empty batch."""
        pairs = list(zip(self.blocks, blocks, strict=True))
        fits = self.y.shape[0] >= batch.y.shape[0]
        fits = fits and all(fits_padded(own, block) for own, block in pairs)
        self.overflow.fill_(float(not fits))
        self.num_labels.fill_(batch.y.shape[0] if fits else 0)
        self.global_num_seeds.fill_(float(batch.global_num_seeds))
        for own, block in pairs:
            fill_padded(own, block if fits else block.without_rows())
        if fits:
            self.x[: batch.x.shape[0]].copy_(batch.x)
            self.y[: batch.y.shape[0]].copy_(batch.y)
        return fits


@dataclass(slots=True)
class _Taken:
    """A step that was submitted and not looked at; its batch where it may be taken again."""

    epoch: int
    step: int
    batch: MiniBatch | None
    waited_seconds: float = 0.0


@dataclass(kw_only=True)
class CapturedLoop(TrainLoop):
    """Loop whose steps are replayed over padded shapes."""

    shapes: StepShapes
    most_labels: int
    """Rows of labels: of the seeds and their padding, or the most links of one rank's batch."""
    loops: bool = False
    """Whether blocks come with self-loops."""
    relations: int = 1
    """Edge types of typed blocks."""
    every: int = LOOK_EVERY
    """Steps between two looks of the host."""
    most_copied: int = LOOK_EVERY
    """Batches that several ranks may copy in between two looks."""
    _inputs: StepInputs | None = field(init=False, default=None)
    """Buffers that the next step trains on."""
    _ahead: StepInputs | None = field(init=False, default=None)
    """Buffers that the next batch is drawn into meanwhile; None: nothing is drawn ahead."""
    _ready: tuple[int, int] | None = field(init=False, default=None)
    """Epoch and step of the batch that was drawn ahead into `_inputs`."""
    _drawn: PaddedStep | None = field(init=False, default=None)
    _pool: Any = field(init=False, default=None)
    """Memory that all graphs share, of which one runs at a time."""
    _graphs: list[Any] = field(init=False, default_factory=list[Any])

    def __post_init__(self) -> None:
        device = self.gradients.flat.device
        self._streams = streams_of(device)
        self._skip = torch.zeros((), device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._results = torch.zeros((self.every, 2), device=device)
        # Adam's fused kernel leaves parameters, moments and its count alone where this is 1.
        setattr(self.optimizer, "found_inf", self._skip)  # noqa: B010 - torch declares it nowhere

    @staticmethod
    def of(loop: TrainLoop, plan: Plan) -> "CapturedLoop":
        """Make the loop of a plan whose step is captured; raises PlanError where it cannot be."""
        strategy, work, shapes = plan.strategy, plan.workload, plan.strategy.shapes
        why = refuse_captured(strategy, work)
        if shapes is None and not why:
            why = "the plan has no shapes for it"
        if not why and not has_triton():
            why = "Triton, whose kernels leave padding out, is not installed"
        if not why and torch.are_deterministic_algorithms_enabled():
            why = "deterministic algorithms are asked for, which its kernels are not"
        if why:
            raise PlanError(f"step captured: {why}; plan again with --step eager")
        assert shapes is not None
        links = -(-work.batch_size // strategy.num_ranks)
        known = {each.name: getattr(loop, each.name) for each in fields(loop) if each.init}
        return CapturedLoop(
            **known,
            shapes=shapes,
            most_labels=links if loop.task == "link" else shapes.rows[0],
            loops=work.model == "gcn",
            relations=getattr(getattr(loop.model, "convs")[0], "num_relations", 1),  # noqa: B009
            most_copied=most_batches(plan, shapes),
        )

    def close(self) -> None:
        """Give back graphs and buffers; NCCL's group does not end while a graph holds its calls."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._inputs = self._ahead = self._ready = self._drawn = self._pool = None

    def run(
        self, batches: Iterator[MiniBatch], first_index: int, on_step: Callable[[float], None]
    ) -> list[float]:
        """Take one step per batch, as `TrainLoop.run`; losses come several at a time."""
        self.model.train()
        losses: list[float] = []
        coming: deque[tuple[MiniBatch | None, float]] = deque()
        window: list[_Taken] = []
        start = time.perf_counter()
        while True:
            index = first_index + len(losses) + len(window)
            batch, waited = coming.popleft() if coming else self._wait(batches, index)
            if isinstance(batch, PaddedStep) and not coming:
                coming.append(self._wait(batches, index + 1))  # a step to draw, not a batch yet
            fits = True
            if batch is not None:
                self.meter.enter(Stage.FORWARD_BACKWARD, index)
                fits = self._submit(batch, coming[0][0] if coming else None)
                late = self.comm.size > 1 or isinstance(batch, PaddedStep)
                keeps = late or not fits
                window.append(_Taken(batch.epoch, batch.step, batch if keeps else None, waited))
            alone = self.comm.size == 1 and not fits  # what the host knows need not wait
            if batch is None or alone or len(window) >= self._steps_to_look(batch):
                found = self._look(window, first_index + len(losses), start)
                again = [each.batch for each in window[len(found) :] if each.batch is not None]
                coming.extendleft((each, 0.0) for each in reversed(again))
                for loss in found:
                    losses.append(loss)
                    on_step(loss)
                window, start = [], time.perf_counter()
                if batch is None and not coming:
                    return losses
            del batch

    def _steps_to_look(self, batch: MiniBatch) -> int:
        """Return the steps between two looks with batches such as this; the same on all ranks."""
        copied = self.comm.size > 1 and not isinstance(batch, PaddedStep)
        return min(self.every, self.most_copied) if copied else self.every

    def _meter_rows(self) -> None:
        """Meter the rows that the device read for the batches that it drew."""
        if self._drawn is not None:
            self._drawn.meter_rows()
            self._drawn = None

    def _wait(self, batches: Iterator[MiniBatch], index: int) -> tuple[MiniBatch | None, float]:
        self.meter.enter(Stage.WAIT, index)
        core, start = time.thread_time(), time.perf_counter()
        batch = next(batches, None)
        waited = time.perf_counter() - start
        if batch is not None:
            self.meter.add(Stage.WAIT, index, waited, time.thread_time() - core)
        return batch, waited

    def _submit(self, batch: MiniBatch, following: MiniBatch | None) -> bool:
        """Start a step on a batch without waiting for it; return whether the batch fits.

        Of a batch that the device draws that shows at the next look alone.
        """
        if isinstance(batch, PaddedStep):
            self._draw(batch, following)
            fits = True
        else:
            blocks = batch.device_blocks or torch_blocks(batch)
            if self._inputs is None:
                self._inputs = StepInputs.like(
                    batch, blocks, self.shapes, labels=self.most_labels, loops=self.loops,
                    relations=self.relations,
                )  # fmt: skip
            fits = self._inputs.fill(batch, blocks)
        assert self._inputs is not None
        self._inputs.key.fill_(self._dropout_stream(batch.epoch, batch.step))
        if self._inputs.replay is None:
            self._inputs.replay = self._capture()
        self._inputs.replay()
        self._take_turns()
        return fits

    def _draw(self, step: PaddedStep, following: MiniBatch | None) -> None:
        """Make sure that a step's batch is drawn, and the next one beside the step."""
        draws, self._drawn = step.draws, step
        if self._inputs is None:
            self._open(draws)
        if self._ahead is None:
            draws.expect(step.epoch, step.step)  # the step itself begins with the draw
            return
        assert self._inputs is not None
        if self._ready != (step.epoch, step.step):
            draws.expect(step.epoch, step.step)
            self._inputs.draw()
        self._ready = None
        if following is None:
            draws.expect_none()
        else:
            self._ready = following.epoch, following.step
            draws.expect(*self._ready)

    def _open(self, draws: Any) -> None:
        """Make the buffers of drawn batches, and capture the step over them in each turn."""
        draws.expect_none()  # runs before the capture have no batch
        self._inputs = StepInputs.over(draws)
        self._ahead = StepInputs.over(draws) if self.shapes.ahead else None
        for inputs in (self._inputs, self._ahead):
            if inputs is not None:
                inputs.replay = self._capture()
                self._take_turns()

    def _take_turns(self) -> None:
        if self._ahead is not None:
            self._inputs, self._ahead = self._ahead, self._inputs

    def _dropout_stream(self, epoch: int, step: int) -> int:
        value = int(stream(self.seed, epoch, step, self.comm.rank, Purpose.DROPOUT))
        return value - (1 << 64) if value >= 1 << 63 else value

    def _capture(self) -> Callable[[], None]:
        """Return what replays the step over its present buffers: graphs, or single calls."""
        processor = processor_of(self.gradients.flat.device)
        if not processor.captures:
            return self._steps
        for group in self.optimizer.param_groups:
            group["capturable"] = True
        device = processor.device
        before = self._skip.clone()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_RUNS):
                self._skip.fill_(1.0)  # a run before the capture trains nothing
                self._place.zero_()
                self._steps()
        torch.cuda.current_stream(device).wait_stream(side)
        calls = [self._graph(piece) if whole else piece for piece, whole in self._pieces()]
        self._skip.copy_(before)
        self._place.zero_()
        return partial(_call_all, calls)

    def _graph(self, piece: Callable[[], None]) -> Callable[[], None]:
        """Capture a piece of the step as a CUDA graph; return what replays it."""
        graph = torch.cuda.CUDAGraph()
        # What the loader's threads do meanwhile is theirs, and no part of the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            piece()
        self._pool = graph.pool()
        self._graphs.append(graph)
        return graph.replay

    def _pieces(self) -> list[tuple[Callable[[], None], bool]]:
        """Return the step's pieces in order, each with whether a graph holds it."""
        if self.comm.captures:
            return [(partial(self._beside, self._compute, self._sum, self._update), True)]
        return [(partial(self._beside, self._compute), True), (self._sum, False),
                (self._update, True)]  # fmt: skip

    def _steps(self) -> None:
        """Make the step's calls, none of which waits for the device."""
        _call_all([piece for piece, _ in self._pieces()])

    def _beside(self, *calls: Callable[[], None]) -> None:
        """Make calls while the next batch is drawn on a lane of its own; both are then joined."""
        streams, ahead = self._streams, self._ahead
        if ahead is None:
            assert self._inputs is not None
            self._inputs.draw()
            _call_all(calls)
            return
        begun = streams.mark()
        with streams.on(DRAW_LANE):
            streams.wait(begun)
            ahead.draw()
            drawn = streams.mark()
        _call_all(calls)
        streams.wait(drawn)

    def _compute(self) -> None:
        inputs, flat = self._inputs, self.gradients.flat
        assert inputs is not None
        flat.zero_()
        with self.precision.forward(flat.device.type), drawing_by(inputs.key):
            logits = self.model(inputs.x, inputs.blocks)
        total = loss_sum(widen(logits), inputs.y, self.task, inputs.num_labels)
        loss = total / inputs.global_num_seeds.squeeze(0)
        loss.backward()
        self.gradients.loss.copy_(loss.detach())
        self.gradients.overflow.copy_(inputs.overflow.squeeze(0))

    def _sum(self) -> None:
        if self.comm.size > 1:
            self.comm.all_reduce_sum(self.gradients.flat)

    def _update(self) -> None:
        self._skip.copy_(torch.maximum(self._skip, (self.gradients.overflow > 0).float()))
        self.optimizer.step()
        result = torch.stack([self.gradients.loss, self._skip]).unsqueeze(0)
        self._results.index_copy_(0, self._place, result)
        self._place.add_(1)

    def _look(self, window: list[_Taken], index: int, start: float) -> list[float]:
        """Wait for the window's steps; return the losses of those that are done, in order.

        The first batch that did not fit is taken kernel by kernel, and its loss is the last.
        """
        if not window:
            return []
        core = time.thread_time()
        results = self._results[: len(window)].tolist()
        seconds = time.perf_counter() - start - sum(each.waited_seconds for each in window)
        each, core = seconds / len(window), (time.thread_time() - core) / len(window)
        done = next((i for i, (_, skipped) in enumerate(results) if skipped), len(window))
        found = [loss for loss, _ in results[:done]]
        for number, (loss, taken) in enumerate(zip(found, window, strict=False)):
            finite_loss(loss, taken.epoch, taken.step)
            self.meter.add(Stage.FORWARD_BACKWARD, index + number, each, core)
            self.meter.add(STEP, index + number, each + taken.waited_seconds, core)
        self._place.zero_()
        self._skip.zero_()
        self._meter_rows()
        if done < len(window):
            lost = each * (len(window) - done)
            found.append(self._redo(window[done], index + done, lost))
        return found

    def _redo(self, taken: _Taken, index: int, lost_seconds: float) -> float:
        """Take a step kernel by kernel; the seconds of steps that were left out are its own."""
        assert taken.batch is not None
        self.overflowed += 1
        core, start = time.thread_time(), time.perf_counter()
        batch = taken.batch.make() if isinstance(taken.batch, PaddedStep) else taken.batch
        loss = self.step(batch, index)
        seconds = time.perf_counter() - start + lost_seconds + taken.waited_seconds
        self.meter.add(STEP, index, seconds, time.thread_time() - core)
        return loss

    def _forward_backward(self, batch: MiniBatch) -> None:
        """Compute loss and gradients kernel by kernel, with the captured step's dropout."""
        key = torch.tensor([self._dropout_stream(batch.epoch, batch.step)])
        with drawing_by(key.to(self.gradients.flat.device)):
            super()._forward_backward(batch)


BATCH_ROW_BYTES, BATCH_EDGE_BYTES = 32, 32
"""Bytes of a copied batch per node beside its row, and per edge: as drawn and as models take it."""


def most_batches(plan: Plan, shapes: StepShapes) -> int:
    """Return how many batches of each rank may be in use, beside those made ahead; alike on all.

    The plan's memory holds one, and what it leaves free the others. Without a prediction nothing is
    bounded.
    """
    memories = plan.prediction.memory_bytes
    free = [use.headroom for name, use in memories.items() if name.startswith("rank")]
    if not free:
        return LOOK_EVERY
    rows = shapes.rows[-1] * (4 * plan.graph.feature_dim + BATCH_ROW_BYTES)
    return 1 + max(0, min(free)) // (rows + sum(shapes.edges) * BATCH_EDGE_BYTES)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
