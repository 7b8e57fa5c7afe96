"""Time one part of full-graph training in its process: the runtime's loop, with nothing sent.

`python -m gnnplan.planner.fullgraph.timing` speaks the lines of planner.profile.protocol. The
part's edges are the graph's own, because where neighbours lie decides how caches serve them;
features and labels are made up. A communicator plays the other ranks: what would arrive is rows of
the right shape. How long a row is under way is priced from the machine's tables instead.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.planner.fullgraph.parts import Case, CaseSeconds, PartAnswer, PartRequest
from gnnplan.planner.profile.protocol import half_width, serve_standard_streams
from gnnplan.runtime import codec
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.fullgraph.exchange import Exchange, Pending
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.stages import Stage

WARMUP_EPOCHS = 2
LEAST_EPOCHS = 3
MOST_EPOCHS = 15
CASE_SECONDS = 1.0
"""Seconds for which a case is repeated, within the numbers above."""


def time_part(request: PartRequest) -> PartAnswer:
    """Time every case of one part, one after the other."""
    from gnnplan.runtime.device import set_threads

    set_threads(request.threads)
    found: list[CaseSeconds] = []
    updates: list[float] = []
    loop: Any = None
    for case in request.cases:
        loop = _loop(request, case)
        found.append(_draws(loop) if case.draws_only else _epochs(loop))
        updates += loop.meter.seconds(Stage.OPTIMIZER, skip_steps=WARMUP_EPOCHS)
    return PartAnswer(
        cases=found,
        optimizer_seconds=float(np.median(updates or [0.0])),
        num_parameters=sum(p.numel() for p in loop.model.parameters()),
        widths=[request.in_dim, *(_inputs(c) for c in loop.model.convs[1:]), request.num_classes],
    )


def _inputs(conv: Any) -> int:
    return int(conv.in_channels)


def _loop(request: PartRequest, case: Case) -> Any:
    """Make the runtime's loop over the part, on rows and labels made up."""
    import torch

    from gnnplan.runtime.fullgraph.forward import FullGraphModel
    from gnnplan.runtime.meter import StageMeter
    from gnnplan.runtime.models.build import build_model
    from gnnplan.runtime.train.fullgraph import FullGraphLoop
    from gnnplan.runtime.train.gradients import GradientBuffer
    from gnnplan.runtime.train.minibatch import make_optimizer

    graph = open_graph(Path(request.graph_path), validate=False, fingerprint=request.fingerprint)
    work = request.workload
    comm = StandIn(
        request.rank, request.size, np.load(request.wanted_path), request.wanted_counts,
        asked_counts=request.asked_counts,
    )  # fmt: skip
    model: Any = build_model(work, request.in_dim, request.num_classes, request.task)
    full = FullGraphModel(
        model, work.model, graph.indptr, graph.indices, np.load(request.partition_path),
        case.settings, comm=comm, seed=work.seed,
    )  # fmt: skip
    full.exchange = TimedExchange(comm)
    generator = torch.Generator().manual_seed(request.rank)
    x = torch.randn(full.part.num_inner, request.in_dim, generator=generator)
    if case.settings.precompute_first_layer:
        full.precompute(x)
    wanted = np.zeros(graph.num_nodes, np.bool_)
    wanted[graph.train_idx] = True
    seeds = np.flatnonzero(wanted[full.part.inner])
    model.train()
    return FullGraphLoop(
        model=model,
        optimizer=make_optimizer(
            model, learning_rate=work.learning_rate, weight_decay=work.weight_decay
        ),
        gradients=GradientBuffer(model), comm=comm, meter=StageMeter(), task=request.task,
        seed=work.seed, full=full, x=x, seeds=torch.as_tensor(seeds),
        y=_labels(request, len(seeds), generator), num_seeds=max(1, graph.num_train),
    )  # fmt: skip


def _labels(request: PartRequest, count: int, generator: Any) -> Any:
    import torch

    if request.task == "multilabel":
        return torch.randint(0, 2, (count, request.num_classes), generator=generator)
    classes = 2 if request.task == "binary" else request.num_classes
    return torch.randint(0, classes, (count,), generator=generator)


def _epochs(loop: Any) -> CaseSeconds:
    """Time whole epochs: medians in the stages of the runtime's meter."""
    from gnnplan.runtime.train.fullgraph import WholeEpoch

    windows: list[list[float]] = []
    started, epoch = time.perf_counter(), 0
    while _goes_on(epoch, started):
        loop.step(WholeEpoch(epoch=epoch), epoch)
        windows.append(loop.full.exchange.windows)
        epoch += 1
        if epoch == WARMUP_EPOCHS:
            started = time.perf_counter()
    measured = {
        stage: loop.meter.seconds(stage, skip_steps=WARMUP_EPOCHS)
        for stage in (Stage.SAMPLE, Stage.FORWARD_BACKWARD, Stage.HALO_EXCHANGE)
    }
    compute = measured[Stage.FORWARD_BACKWARD]
    return CaseSeconds(
        sample=float(np.median(measured[Stage.SAMPLE])),
        forward_backward=float(np.median(compute)),
        packing=float(np.median(measured[Stage.HALO_EXCHANGE] or [0.0])),
        windows=[float(v) for v in np.median(np.array(windows[WARMUP_EPOCHS:]), axis=0)],
        spread=half_width(compute),
    )


def _draws(loop: Any) -> CaseSeconds:
    """Time the epoch's draws alone."""
    seconds: list[float] = []
    began, epoch = time.perf_counter(), 0
    while _goes_on(epoch, began):
        started = time.perf_counter()
        loop.full.layers(epoch)
        seconds.append(time.perf_counter() - started)
        epoch += 1
    return CaseSeconds(
        sample=float(np.median(seconds[WARMUP_EPOCHS:])),
        forward_backward=0.0, packing=0.0, windows=[], spread=half_width(seconds[WARMUP_EPOCHS:]),
    )  # fmt: skip


def _goes_on(epoch: int, started: float) -> bool:
    done = epoch - WARMUP_EPOCHS
    if done < LEAST_EPOCHS:
        return True
    return done < MOST_EPOCHS and time.perf_counter() - started < CASE_SECONDS


def build(plain: Any) -> Callable[[], PartAnswer]:
    """Bind a request's cases, each built when its turn comes: together they would not fit."""
    return functools.partial(time_part, codec.decode(PartRequest, plain))


def _spread_places(counts: Sequence[int], asked: Sequence[int]) -> Tensor:
    """Return so many places, evenly spread, of each receiver's list."""
    found = [np.arange(k) * n // max(1, k) for n, k in zip(counts, asked, strict=False)]
    return torch.as_tensor(np.concatenate([np.empty(0, np.int64), *found]).astype(np.int64))


class StandIn(Communicator):
    """A communicator of one rank that answers for all other ranks.

    `wanted` are the nodes that the others need of this rank, by receiver, `wanted_counts` how many,
    and `asked_counts` how many of them each asks for where edges are dropped.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        wanted: NDArray[np.int64],
        wanted_counts: list[int],
        *,
        asked_counts: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._wanted = (torch.as_tensor(wanted), wanted_counts)
        self._asked = (_spread_places(wanted_counts, asked_counts), list(asked_counts))
        self._rows: dict[int, Tensor] = {}

    def all_to_all_ids(
        self, ids: Tensor, counts: Sequence[int], *, stage: Stage = Stage.EXCHANGE_IDS
    ) -> tuple[Tensor, list[int]]:
        """Return what the others ask for when the parts are made, later what a draw leaves."""
        del ids, counts
        return self._asked if stage is Stage.HALO_EXCHANGE else self._wanted

    def all_to_all_rows(
        self,
        rows: Tensor,
        counts: Sequence[int],
        received_counts: Sequence[int],
        *,
        out: Tensor | None = None,
        stage: Stage = Stage.EXCHANGE_ROWS,
    ) -> Tensor:
        """Return rows of the right number and width, made once per width."""
        del counts, out, stage
        width, count = rows.shape[1], sum(received_counts)
        kept = self._rows.get(width)
        if kept is None or kept.shape[0] < count:
            kept = torch.randn(count, width, generator=torch.Generator().manual_seed(width))
            self._rows[width] = kept * 0.1
        return self._rows[width][:count]

    def all_reduce_sum(self, tensor: Tensor, *, stage: Stage = Stage.ALL_REDUCE) -> Tensor:
        """Return the tensor as it is."""
        del stage
        return tensor


@dataclass(slots=True)
class TimedPending(Pending):
    """An exchange under way that says how much work was done before its rows were needed."""

    started: float = 0.0

    def wait(self) -> Tensor:
        """Return the rows, and end the window."""
        assert isinstance(self.exchange, TimedExchange)
        self.exchange.windows.append(time.perf_counter() - self.started)
        return Pending.wait(self)


class TimedExchange(Exchange):
    """An exchange that keeps the window of every call, in order."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.windows: list[float] = []

    def reset(self) -> None:
        """Start counting anew."""
        super().reset()
        self.windows = []

    def start(
        self, x: Tensor, send: Tensor | None, counts: Sequence[int], received_counts: Sequence[int]
    ) -> Pending:
        """Pack the rows as a rank does; the answer is there at once."""
        found = super().start(x, send, counts, received_counts)
        return TimedPending(self, found.rows, started=time.perf_counter())


if __name__ == "__main__":
    serve_standard_streams(
        ("torch", "torch_geometric.nn", "gnnplan.runtime.train.fullgraph"), build
    )
