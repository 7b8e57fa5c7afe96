"""Build the model that a workload names: SAGE, GCN, GAT or R-GCN on blocks, or a user's own.

SAGE, GCN and GAT are those of torch_geometric.nn.models with ReLU: same layers, same parameter
names, so a state dictionary moves either way.
"""

import importlib
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, RGCNConv, SAGEConv

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.graph.format import TASKS
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.functions import drop
from gnnplan.runtime.models.layers import apply_conv, apply_rgcn, supports
from gnnplan.runtime.plan.schema import Workload

# Weights are drawn from the process's generator: ranks that are threads take turns at it. A user's
# factory may build one of these models inside its own turn.
_drawing = threading.RLock()


def _check_blocks(convs: nn.ModuleList, blocks: Sequence[TorchBlock]) -> None:
    if len(blocks) != len(convs):
        raise InputError(
            f"model of {len(convs)} layers: expected as many blocks, found {len(blocks)}; "
            "give one fan-out per layer"
        )


class BlockModel(nn.Module):
    """Convolutions, input side first, with ReLU and dropout between them; layer l takes block l.

    Raises:
        InputError: a convolution that `supports` does not hold for.
    """

    def __init__(self, convs: Sequence[nn.Module], *, dropout: float = 0.0):
        super().__init__()
        for layer, conv in enumerate(convs):
            if not supports(conv):
                raise InputError(
                    f"layer {layer}: expected SAGEConv of means, GCNConv or GATConv with what PyG "
                    f"sets by default but for widths, heads, bias and dropout, found {conv} of "
                    "other settings; return a module of your own with forward(x, blocks)"
                )
        self.convs = nn.ModuleList(convs)
        self.dropout = dropout

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Compute the logits of the seeds, (num_seeds, classes).

        `x` are the features of the outermost block's sources, (num_input, in); one block per layer,
        outermost first.
        """
        _check_blocks(self.convs, blocks)
        for layer, block in enumerate(blocks):
            x = self.forward_layer(layer, x, block)
        return x

    def forward_layer(self, layer: int, x: Tensor, block: TorchBlock) -> Tensor:
        """Compute one layer with its activation: (num_src, in) to (num_dst, out)."""
        last = layer == len(self.convs) - 1
        x = apply_conv(self.convs[layer], x, block, relu=not last)
        if self.dropout > 0 and not last:
            x = drop(x, self.dropout, training=self.training)
        return x


class RGCN(nn.Module):
    """A linear map per node type, then R-GCN layers with ReLU and dropout between them."""

    def __init__(self, workload: Workload, types: GraphTypes, num_outputs: int) -> None:
        super().__init__()
        hidden = workload.hidden
        self.widths = list(types.widths)
        self.dropout = workload.dropout
        self.inputs = nn.ModuleList(nn.Linear(width, hidden) for width in self.widths)
        outs = [hidden] * (workload.num_layers - 1) + [num_outputs]
        self.convs = nn.ModuleList(RGCNConv(hidden, out, len(types.edge_types)) for out in outs)

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Compute the logits of the seeds, (num_seeds, classes).

        `x` has the features of the outermost block's sources, each type's in its first columns,
        (num_input, widest type); typed blocks stand outermost first, the first with sources' types.
        """
        _check_blocks(self.convs, blocks)
        h = self._encode(x, blocks[0]).relu()
        for layer, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            h = apply_rgcn(conv, h, block)
            if layer < len(self.convs) - 1:
                h = drop(h.relu(), self.dropout, training=self.training)
        return h

    def _encode(self, x: Tensor, block: TorchBlock) -> Tensor:
        src_type = block.src_type
        if len(self.widths) == 1:
            return self.inputs[0](x)
        if src_type is None:
            raise InputError("model rgcn: expected the type of each source, found none")
        if block.live is not None:  # how many rows a type has is the device's to know
            h = x.new_zeros(())
            for number, (width, to_hidden) in enumerate(zip(self.widths, self.inputs, strict=True)):
                h = torch.where((src_type == number).unsqueeze(1), to_hidden(x[:, :width]), h)
            return h
        order, parts = [], []
        for number, (width, to_hidden) in enumerate(zip(self.widths, self.inputs, strict=True)):
            own = (src_type == number).nonzero().view(-1)
            order.append(own)
            parts.append(to_hidden(x[own, :width]))
        # The inverse of the order by type puts the rows back where they were.
        return torch.cat(parts)[torch.cat(order).argsort()]


def _make_convs(workload: Workload, in_dim: int, num_classes: int) -> list[nn.Module]:
    inner = [workload.hidden] * (workload.num_layers - 1)
    widths = list(zip([in_dim, *inner], [*inner, num_classes], strict=True))
    if workload.model != "gat":
        kind = {"sage": SAGEConv, "gcn": GCNConv}[workload.model]
        return [kind(a, b) for a, b in widths]
    heads, dropout = workload.heads, workload.dropout
    if heads < 1 or (workload.num_layers > 1 and workload.hidden % heads):
        raise InputError(
            f"model gat: expected hidden ({workload.hidden}) divisible by heads ({heads}); "
            "change --hidden or --heads"
        )
    convs = [GATConv(a, b // heads, heads=heads, dropout=dropout) for a, b in widths[:-1]]
    return [*convs, GATConv(*widths[-1], heads=heads, concat=False, dropout=dropout)]


def _from_import_path(workload: Workload, in_dim: int, num_classes: int, task: str) -> nn.Module:
    module_name, _, factory_name = workload.model.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"model {workload.model}: expected an importable module:factory, found {error}"
        ) from None
    model = factory(workload, in_dim, num_classes, task)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model {workload.model}: expected the factory to return a torch.nn.Module, "
            f"found {type(model).__name__}"
        )
    return model


def build_model(
    workload: Workload, in_dim: int, num_classes: int, task: str, *, types: GraphTypes | None = None
) -> nn.Module:
    """Build the model of a workload, with weights drawn from `workload.seed`.

    Args:
        workload: `model` is sage, gcn, gat, rgcn or module:factory. A factory is called as
            factory(workload, in_dim, num_classes, task) and returns a torch.nn.Module with
            forward(x, blocks) -> logits of the seeds. With a forward_layer(layer, x, block) as
            BlockModel's it is also evaluated layer by layer.
        in_dim: number of feature columns.
        num_classes: number of logits (binary: 1; link: `workload.hidden`).
        task: multiclass | multilabel | binary | link, for which the model is the encoder.
        types: types of the graph (`types_of`), needed by rgcn alone.

    Raises:
        InputError: unknown model or task, or settings that do not fit each other.
    """
    if task not in TASKS:
        raise InputError(f"task: expected multiclass, multilabel, binary or link, found {task!r}")
    if workload.num_layers < 1 or len(workload.fanouts) != workload.num_layers:
        raise InputError(
            f"expected one fan-out per layer, found {len(workload.fanouts)} fan-outs for "
            f"{workload.num_layers} layers"
        )
    num_outputs = {"binary": 1, "link": workload.hidden}.get(task, num_classes)
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        if ":" in workload.model:
            return _from_import_path(workload, in_dim, num_outputs, task)
        if workload.model == "rgcn":
            if types is None:
                raise InputError("model rgcn: expected the graph's types, found none; pass types")
            return RGCN(workload, types, num_outputs)
        if workload.model not in ("sage", "gcn", "gat"):
            raise InputError(
                f"model: expected sage, gcn, gat, rgcn or module:factory, found {workload.model!r}"
            )
        convs = _make_convs(workload, in_dim, num_outputs)
        return BlockModel(convs, dropout=workload.dropout)
