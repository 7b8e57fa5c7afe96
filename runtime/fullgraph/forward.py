"""A model's forward pass over one part of the graph."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from runtime.comm.collectives import Communicator
from runtime.errors import PlanError
from runtime.fullgraph.convolve import attend, convolve, convolve_known
from runtime.fullgraph.crossing import Crossing, edge_weights
from runtime.fullgraph.draws import AbstractMasks, EpochDraws
from runtime.fullgraph.exchange import Exchange
from runtime.fullgraph.outside import AbstractOutside, Boundary
from runtime.fullgraph.part import Part, build_part, connect
from runtime.fullgraph.slices import Slices
from runtime.models.build import BlockModel
from runtime.plan import FullGraph

MODELS = ("sage", "gcn", "gat")


def check_settings(settings: FullGraph, model: str, task: str) -> None:
    """Raise PlanError where these settings cannot be trained.

    Args:
        settings: the plan's.
        model: the workload's.
        task: the graph's.
    """
    where = "full-graph training"
    if model not in MODELS:
        raise PlanError(f"{where}: expected model {', '.join(MODELS)}, found {model!r}")
    if task == "link":
        raise PlanError(f"{where}: expected a node task, found link; plan mini-batches instead")
    if not 0 <= settings.keep <= 1:
        raise PlanError(f"{where}: expected keep in [0, 1], found {settings.keep}; plan again")
    if settings.exchange == "broadcast" and (settings.keep < 1 or model == "gat"):
        raise PlanError(
            f"{where}: broadcast sends whole slices for sage and gcn, expected keep 1, found model "
            f"{model} with keep {settings.keep}; use exchange boundary"
        )
    if settings.drop == "edges" and settings.keep < 1 and settings.precompute_first_layer:
        raise PlanError(
            f"{where}: a first layer that is computed once cannot drop edges anew each epoch; "
            "use drop boundary-edges or nodes, or leave precompute_first_layer out"
        )


class FullGraphModel:
    """This rank's inner nodes under the plan's model and settings.

    Args:
        model: SAGE, GCN or GAT as `build_model` makes it.
        name: sage | gcn | gat.
        indptr: CSC of the whole graph.
        indices: its in-neighbours.
        partition: owner of each node.
        settings: the plan's.
        comm: the ranks.
        seed: of the draws.
        device: where the model is; draws are made on the host.
        overlap: exchange on a thread of its own.
        masks: where draws come from, for tests that enumerate them.

    Making one is collective: parts tell each other what they need.
    """

    def __init__(
        self,
        model: BlockModel,
        name: str,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32] | NDArray[np.int64],
        partition: NDArray[np.int32],
        settings: FullGraph,
        *,
        comm: Communicator,
        seed: int = 0,
        device: torch.device | None = None,
        overlap: bool = False,
        masks: AbstractMasks | None = None,
    ) -> None:
        self.model, self.name, self.settings = model, name, settings
        by_edge = settings.drop != "nodes" and settings.keep < 1
        part = build_part(
            indptr, indices, partition, comm.rank, comm.size,
            loops=name != "sage", edge_ids=by_edge,
        )  # fmt: skip
        self.part: Part = connect(part, comm)
        weights = edge_weights(self.part, indptr, indices, name)
        self.exchange = Exchange(comm, overlap=overlap)
        self._device = device or torch.device("cpu")
        self.draws = EpochDraws(
            self.part, weights, settings,
            seed=seed, num_layers=len(model.convs),
            comm=self.exchange.comm,
            attention=name == "gat", masks=masks,
        )  # fmt: skip
        self._slices: Slices | None = None
        if settings.exchange == "broadcast":
            whole = self.draws.whole
            self._slices = Slices(
                self.part, partition, whole.inner, weights[1], self.exchange, self._device
            )
        self._whole = self.draws.whole.to(self._device)
        self._known: Tensor | None = None

    def precompute(self, x: Tensor) -> None:
        """Aggregate the unsampled inputs of the first layer, once. Collective.

        SAGE and GCN keep the first layer's sums, GAT the halo's input rows.
        """
        whole = self._whole
        if self.name == "gat":
            sent = self.exchange.start(x, whole.send, whole.send_counts, whole.received_counts)
            self._known = sent.wait()
            return
        outside = self._slices or Boundary(whole, self.exchange)
        with torch.no_grad():
            self._known = outside.rows(x.detach(), with_root=self.name == "sage")

    def layers(self, epoch: int) -> list[Crossing]:
        """The epoch's draws. Collective where edges are sampled."""
        drawn = self.draws.layers(epoch)
        whole = self.draws.whole
        return [self._whole if c is whole else c.to(self._device) for c in drawn]

    def forward(self, x: Tensor, layers: list[Crossing]) -> Tensor:
        """Logits of the inner nodes, shape (n_in, classes); collective, and so is its backward.

        Args:
            x: input rows of the inner nodes, shape (n_in, d_0).
            layers: from `layers`.
        """
        model = self.model
        last = len(model.convs) - 1
        for number, (conv, crossing) in enumerate(zip(model.convs, layers, strict=True)):
            x = self._layer(conv, x, crossing, number, relu=number < last)
            if model.dropout > 0 and number < last:
                x = nn.functional.dropout(x, model.dropout, training=model.training)
        return x

    def _layer(
        self, conv: nn.Module, x: Tensor, crossing: Crossing, number: int, *, relu: bool
    ) -> Tensor:
        known = self._known if number == 0 else None
        if isinstance(conv, GATConv):
            return attend(conv, x, crossing, self.exchange, relu=relu, known=known)
        if known is not None:
            return convolve_known(conv, known, x.shape[0], relu=relu)
        outside: AbstractOutside = self._slices or Boundary(crossing, self.exchange)
        return convolve(conv, x, outside, relu=relu)

    def close(self) -> None:
        """End the exchange."""
        self.exchange.close()
