"""The training step as one graph over padded shapes, replayed for every batch.

  batch -> inputs of fixed shapes -> forward, backward, all-reduce, update -> results on the device

Where the device can draw and gather a batch without the host (`gpu.padded`), that is the step's
first part, and nothing is copied (DEC-166).

Numbers of true rows lie on the device, where kernels read them. Padding adds zeros alone to loss
and gradients. A batch that does not fit is taken as an empty one and flagged: its update, and every
later one, is left out on the device until the host looks, every `LOOK_EVERY` steps. The host then
takes that batch kernel by kernel and goes on behind it, so updates keep their order (DEC-168).

A GPU replays a CUDA graph; where none is captured the same calls are made one by one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from gnnplan.runtime.device import has_triton
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.loader.device_place import PaddedStep
from gnnplan.runtime.meter import STEP
from gnnplan.runtime.models.adjacency import TorchBlock, torch_blocks
from gnnplan.runtime.models.functions import drawing_by
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.plan.schema import Plan, StepShapes
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.rng import Purpose, stream
from gnnplan.runtime.stages import Stage, refuse_captured
from gnnplan.runtime.train.minibatch import TrainLoop, finite_loss
from gnnplan.runtime.train.precision import widen

LOOK_EVERY = 16
"""Steps between two looks of the host at losses and flags (DEC-168)."""
_WARM_RUNS = 3
"""Runs before the capture, in which kernels are compiled and libraries make their workspaces."""


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

    @staticmethod
    def over(draws: Any) -> "StepInputs":
        """Return buffers that the device draws every batch into."""
        padded = draws.new_batch()
        device = padded.x.device
        blocks = [
            TorchBlock(
                num_src=block.num_src, num_dst=block.num_dst, indptr=block.indptr,
                indices=block.indices, live=block.num_dst_now, dst=block.dst,
            )
            for block in padded.blocks
        ]  # fmt: skip
        return StepInputs(
            blocks=blocks,
            x=padded.x,
            y=padded.y,
            num_labels=padded.counts[:1],
            global_num_seeds=torch.ones(1, device=device),
            overflow=torch.zeros(1, device=device),
            key=torch.zeros(1, dtype=torch.int64, device=device),
            draws=draws,
            padded=padded,
        )

    def draw(self) -> None:
        """Draw the next batch on the device, where batches are not copied in; waits for nothing."""
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
            _empty_block(block, rows[i], rows[i + 1], edges[i] + loops * rows[i + 1], relations)
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
        room = [self.y.shape[0] >= batch.y.shape[0], *(_fits(own, block) for own, block in pairs)]
        fits = all(room)
        self.overflow.fill_(float(not fits))
        self.num_labels.fill_(batch.y.shape[0] if fits else 0)
        self.global_num_seeds.fill_(float(batch.global_num_seeds))
        for own, block in pairs:
            _fill_block(own, block if fits else _without_rows(block))
        if fits:
            self.x[: batch.x.shape[0]].copy_(batch.x)
            self.y[: batch.y.shape[0]].copy_(batch.y)
        return fits


def _empty_block(
    block: TorchBlock, num_src: int, num_dst: int, num_edges: int, relations: int
) -> TorchBlock:
    """Make a padded block without true rows, with the tensors that a block has."""
    return TorchBlock(
        num_src=num_src,
        num_dst=num_dst,
        indptr=block.indptr.new_zeros(num_dst + 1),
        indices=block.indices.new_full((num_edges,), num_src - 1),
        weight=None if block.weight is None else block.weight.new_zeros(num_edges),
        relation_ptr=None if block.relation_ptr is None else block.relation_ptr.new_zeros(
            relations * num_dst + 1
        ),
        src_type=None if block.src_type is None else block.src_type.new_zeros(num_src),
        live=block.indptr.new_zeros(1),
        dst=block.indices.new_full((num_edges,), num_dst - 1),
    )  # fmt: skip


def _fits(own: TorchBlock, block: TorchBlock) -> bool:
    """Return whether a block leaves the last row of sources and destinations to padding."""
    rows = block.num_src < own.num_src and block.num_dst < own.num_dst
    return rows and block.num_edges <= own.num_edges


def _without_rows(block: TorchBlock) -> TorchBlock:
    """Return a block of no rows with a block's kinds of tensors."""
    return replace(block.map_tensors(lambda tensor: tensor[:0]), num_src=0, num_dst=0)


def _fill_block(own: TorchBlock, block: TorchBlock) -> None:
    assert own.live is not None
    assert own.dst is not None
    own.live.fill_(block.num_dst)
    _put(own.indptr, block.indptr, block.num_edges)
    _put(own.indices, block.indices, own.num_src - 1)
    _put(own.dst, block.row_of_edge() if block.num_edges else block.indices, own.num_dst - 1)
    pairs = (own.weight, block.weight, 0), (own.relation_ptr, block.relation_ptr, block.num_edges)
    for into, values, rest in (*pairs, (own.src_type, block.src_type, 0)):
        if into is not None and values is not None:
            _put(into, values, rest)


def _put(into: Tensor, values: Tensor, rest: int) -> None:
    """Copy values to the begin of a buffer, and fill what is behind them."""
    into[: values.shape[0]].copy_(values)
    into[values.shape[0] :].fill_(rest)


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
    _inputs: StepInputs | None = field(init=False, default=None)
    _replay: Callable[[], None] | None = field(init=False, default=None)
    _drawn: PaddedStep | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        device = self.gradients.flat.device
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
        )

    def run(
        self, batches: Iterator[MiniBatch], first_index: int, on_step: Callable[[float], None]
    ) -> list[float]:
        """Take one step per batch, as `TrainLoop.run`; losses come several at a time."""
        self.model.train()
        losses: list[float] = []
        again: deque[MiniBatch] = deque()
        window: list[_Taken] = []
        start = time.perf_counter()
        while True:
            index = first_index + len(losses) + len(window)
            batch, waited = (again.popleft(), 0.0) if again else self._wait(batches, index)
            fits = True
            if batch is not None:
                self.meter.enter(Stage.FORWARD_BACKWARD, index)
                fits = self._submit(batch)
                late = self.comm.size > 1 or isinstance(batch, PaddedStep)
                kept = batch if late or not fits else None
                window.append(_Taken(batch.epoch, batch.step, kept, waited))
            alone = self.comm.size == 1 and not fits  # what the host knows need not wait
            if batch is None or alone or len(window) == self.every:
                found = self._look(window, first_index + len(losses), start)
                again.extendleft(
                    each.batch for each in reversed(window[len(found) :]) if each.batch is not None
                )
                for loss in found:
                    losses.append(loss)
                    on_step(loss)
                window, start = [], time.perf_counter()
                if batch is None and not again:
                    return losses
            del batch

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

    def _submit(self, batch: MiniBatch) -> bool:
        """Start a step on a batch without waiting for it; return whether the batch fits."""
        if isinstance(batch, PaddedStep):
            return self._submit_drawn(batch)
        blocks = batch.device_blocks or torch_blocks(batch)
        if self._inputs is None:
            self._inputs = StepInputs.like(
                batch, blocks, self.shapes, labels=self.most_labels, loops=self.loops,
                relations=self.relations,
            )  # fmt: skip
        fits = self._inputs.fill(batch, blocks)
        self._inputs.key.fill_(self._dropout_stream(batch.epoch, batch.step))
        if self._replay is None:
            self._replay = self._capture()
        self._replay()
        return fits

    def _submit_drawn(self, step: PaddedStep) -> bool:
        """Start a step whose batch the device draws; whether it fits shows at the next look."""
        if self._inputs is None:
            self._inputs = StepInputs.over(step.draws)
            self._replay = self._capture()
        assert self._replay is not None
        self._drawn = step
        step.draws.expect(step.epoch, step.step)
        self._inputs.key.fill_(self._dropout_stream(step.epoch, step.step))
        self._replay()
        return True

    def _dropout_stream(self, epoch: int, step: int) -> int:
        value = int(stream(self.seed, epoch, step, self.comm.rank, Purpose.DROPOUT))
        return value - (1 << 64) if value >= 1 << 63 else value

    def _capture(self) -> Callable[[], None]:
        """Return what replays the step: a CUDA graph, or its calls one by one."""
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
                self._steps()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # What the loader's threads do meanwhile is theirs, and no part of the graph.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._steps()
        self._skip.copy_(before)
        self._place.zero_()
        return graph.replay

    def _steps(self) -> None:
        """Make the step's calls, none of which waits for the device."""
        inputs, flat = self._inputs, self.gradients.flat
        assert inputs is not None
        inputs.draw()
        flat.zero_()
        with self.precision.forward(flat.device.type), drawing_by(inputs.key):
            logits = self.model(inputs.x, inputs.blocks)
        total = loss_sum(widen(logits), inputs.y, self.task, inputs.num_labels)
        loss = total / inputs.global_num_seeds.squeeze(0)
        loss.backward()
        self.gradients.loss.copy_(loss.detach())
        self.gradients.overflow.copy_(inputs.overflow.squeeze(0))
        if self.comm.size > 1:
            self.comm.all_reduce_sum(flat)
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
