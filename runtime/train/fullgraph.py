"""Full-graph training as a job's loader and loop: one optimiser step per epoch over all seeds.

The job (`job`) runs, validates, checkpoints and reports it like mini-batches. A step's loss is the
sum over this rank's training nodes divided by those of all ranks, so the flat all-reduce gives the
gradient of one process.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import DatasetError, InputError, PlanError
from gnnplan.runtime.features.tier import AbstractFeatureStore, Counters
from gnnplan.runtime.fullgraph import check_settings
from gnnplan.runtime.fullgraph.forward import FullGraphModel
from gnnplan.runtime.fullgraph.part import Part
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.position import Position
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.build import BlockModel, build_model
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.evaluate import Reader, reader_of
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import (
    TrainLoop,
    make_optimizer,
    seed_dropout,
    share_parameters,
)


class DatasetRows(AbstractFeatureStore):
    """The dataset's own rows for evaluation, and the bytes of the rank's part."""

    def __init__(self, graph: Graph) -> None:
        self._read: Reader = reader_of(graph, None)
        self.feature_dim = graph.feature_dim
        self.held_bytes = 0
        """Bytes of input rows that the rank keeps."""

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """Read rows from the dataset."""
        self._read(ids, out)
        return Counters()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the part's input rows."""
        return self.held_bytes

    def close(self) -> None:
        """Do nothing: no file is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeEpoch:
    """All training nodes at once, in the place of a mini-batch."""

    epoch: int
    step: int = 0


class FullGraphEpochs:
    """Loader of epochs of one step each, with `PlannedLoader`'s methods."""

    def __init__(
        self,
        plan_id: str,
        graph: Graph,
        full: FullGraphModel,
        store: DatasetRows,
        meter: StageMeter,
    ) -> None:
        self.graph, self.full, self.store, self.meter = graph, full, store, meter
        self.handed_out = 0
        self.position = Position(plan_id, len(self))

    @property
    def topology(self) -> Part:
        """Edges that the rank holds."""
        return self.full.part

    def __len__(self) -> int:
        """Return the steps per epoch."""
        return 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as `PlannedLoader.state_dict`."""
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position, as `PlannedLoader.load_state_dict`."""
        self.position.load_state_dict(state)

    def batches(self, most: int | None = None) -> Iterator[Any]:
        """Yield the current epoch's one step."""
        if most is None or most > 0:
            epoch = self.position.epoch
            self.position.advance()
            self.handed_out += 1
            yield WholeEpoch(epoch=epoch)

    def set_factor(self, factor: float) -> None:
        """Refuse a factor: locality-aware sampling draws mini-batches."""
        raise PlanError(f"full-graph training: expected no locality factor, found {factor}")

    def close(self) -> None:
        """End the exchange."""
        self.full.close()
        self.store.close()


@dataclass(kw_only=True)
class FullGraphLoop(TrainLoop):
    """A rank's part of the graph, the model over it, and its share of the loss."""

    full: FullGraphModel
    x: Tensor
    """Input rows of the inner nodes, float32 (n_in, d_0)."""
    seeds: Tensor
    """Inner positions of this rank's training nodes, int64."""
    y: Tensor
    num_seeds: int
    """Number of training nodes of all ranks."""

    def step(self, batch: "MiniBatch | WholeEpoch", index: int) -> float:
        """Take one epoch; meter the exchange's share of forward and backward as its own stage."""
        exchange = self.full.exchange
        before = exchange.sent_bytes
        exchange.reset()
        with self.meter.measure(Stage.SAMPLE, index):
            layers = self.full.layers(batch.epoch)
        self.meter.enter(Stage.FORWARD_BACKWARD, index)
        core, started = time.thread_time(), time.perf_counter()
        self.gradients.flat.zero_()
        seed_dropout(self.seed, batch.epoch, batch.step, self.comm.rank, self.x.device)
        logits = self.full.forward(self.x, layers)
        loss = loss_sum(logits[self.seeds], self.y, self.task) / self.num_seeds
        loss.backward()
        self.gradients.loss.copy_(loss.detach())
        seconds, core = time.perf_counter() - started, time.thread_time() - core
        exposed = exchange.exposed_seconds
        self.meter.add(Stage.FORWARD_BACKWARD, index, max(0.0, seconds - exposed), core)
        if self.comm.size > 1:
            self.meter.add(Stage.HALO_EXCHANGE, index, exposed)
        self.meter.count(index, {"halo": exchange.rows}, {"halo": exchange.sent_bytes - before})
        return self.finish_step(batch.epoch, batch.step, index)


def open_full_graph(
    plan: Plan, folder: Path, graph: Graph, device: torch.device, comm: Communicator
) -> tuple[FullGraphEpochs, FullGraphLoop]:
    """Open the loader and the loop of a plan with mode full-graph. Collective."""
    workload, settings = plan.workload, plan.strategy.full_graph
    check_settings(settings, workload.model, str(graph.task))
    if graph.topology_only or graph.y is None:
        raise DatasetError(f"{graph.path}: expected features and labels to train on, found none")
    partition = np.array(load_array(plan, folder, "partition"))
    model = build_model(workload, graph.feature_dim, graph.num_classes, str(graph.task))
    if not isinstance(model, BlockModel):
        raise InputError(f"model {workload.model}: expected layers of this package")
    model.to(device)
    share_parameters(model, comm)
    full = FullGraphModel(
        model, workload.model, graph.indptr, graph.indices, partition, settings,
        comm=comm, seed=workload.seed, device=device,
        overlap=plan.strategy.threads.comm > 0,
    )  # fmt: skip
    store, meter = DatasetRows(graph), StageMeter()
    loop = make_full_graph_loop(plan, graph, full, store, meter, device, comm)
    return FullGraphEpochs(plan.plan_id, graph, full, store, meter), loop


def make_full_graph_loop(
    plan: Plan,
    graph: Graph,
    full: FullGraphModel,
    store: DatasetRows,
    meter: StageMeter,
    device: torch.device,
    comm: Communicator,
) -> FullGraphLoop:
    """Make the loop over a spread model. Collective where a layer is precomputed."""
    workload = plan.workload
    inner = full.part.inner
    rows = np.empty((inner.shape[0], graph.feature_dim), np.float32)
    store.read(inner, rows)
    store.held_bytes = rows.nbytes
    x = torch.from_numpy(rows).to(device)
    if plan.strategy.full_graph.precompute_first_layer:
        full.precompute(x)
    wanted = np.zeros(graph.num_nodes, np.bool_)
    wanted[graph.train_idx] = True
    seeds = np.flatnonzero(wanted[inner])
    assert graph.y is not None
    y = torch.from_numpy(np.array(graph.y[inner[seeds]])).to(device)
    return FullGraphLoop(
        model=full.model,
        optimizer=make_optimizer(
            full.model, learning_rate=workload.learning_rate, weight_decay=workload.weight_decay
        ),
        gradients=GradientBuffer(full.model),
        comm=comm,
        meter=meter,
        task=str(graph.task),
        seed=workload.seed,
        full=full,
        x=x,
        seeds=torch.from_numpy(seeds).to(device),
        y=y,
        num_seeds=int(wanted.sum()),
    )
