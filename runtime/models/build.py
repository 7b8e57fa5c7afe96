"""Build the model a workload names: SAGE, GCN, GAT or R-GCN on blocks, or a user's own factory.

The built-in models are those of torch_geometric.nn.models (GraphSAGE, GCN, GAT) with ReLU: same
layers, same parameter names, so a state dictionary moves either way.
"""

import importlib
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.layers import build_rgcn
from gnnplan.runtime.plan.schema import Workload

# The generator the weights come from is the process's: ranks that are threads take turns at it. A
# user's factory may build one of our models inside its own turn.
_drawing = threading.RLock()


class BlockModel(nn.Module):
    """L convolutions with ReLU and dropout between them.

    Attributes:
        convs: The convolutions, input side first; layer l consumes block l.
    """

    def __init__(self, convs: Sequence[nn.Module], *, dropout: float = 0.0):
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.dropout = dropout

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Logits of the seeds.

        Args:
            x: Features of the outermost block's sources, shape (num_input, in).
            blocks: One per layer, outermost first.

        Returns:
            Shape (num_seeds, classes).
        """
        if len(blocks) != len(self.convs):
            raise InputError(
                f"model of {len(self.convs)} layers: expected as many blocks, found {len(blocks)}; "
                "give one fan-out per layer"
            )
        for layer, block in enumerate(blocks):
            x = self.forward_layer(layer, x, block)
        return x

    def forward_layer(self, layer: int, x: Tensor, block: TorchBlock) -> Tensor:
        """One layer with its activation: (num_src, in) to (num_dst, out).

        What layer-wise inference calls, and `forward` is made of.
        """
        from gnnplan.runtime.models.layers import apply_conv

        last = layer == len(self.convs) - 1
        x = apply_conv(self.convs[layer], x, block, relu=not last)
        if self.dropout > 0 and not last:
            x = nn.functional.dropout(x, self.dropout, training=self.training)
        return x


def _widths(workload: Workload, in_dim: int, num_classes: int) -> list[tuple[int, int]]:
    inner = [workload.hidden] * (workload.num_layers - 1)
    return list(zip([in_dim, *inner], [*inner, num_classes], strict=True))


def _sage(workload: Workload, in_dim: int, num_classes: int) -> list[nn.Module]:
    from torch_geometric.nn import SAGEConv

    return [SAGEConv(a, b) for a, b in _widths(workload, in_dim, num_classes)]


def _gcn(workload: Workload, in_dim: int, num_classes: int) -> list[nn.Module]:
    from torch_geometric.nn import GCNConv

    return [GCNConv(a, b) for a, b in _widths(workload, in_dim, num_classes)]


def _gat(workload: Workload, in_dim: int, num_classes: int) -> list[nn.Module]:
    from torch_geometric.nn import GATConv

    heads = workload.heads
    if heads < 1 or (workload.num_layers > 1 and workload.hidden % heads):
        raise InputError(
            f"model gat: expected hidden ({workload.hidden}) divisible by heads ({heads}); "
            "change --hidden or --heads"
        )
    widths = _widths(workload, in_dim, num_classes)
    inner = [GATConv(a, b // heads, heads=heads, dropout=workload.dropout) for a, b in widths[:-1]]
    a, b = widths[-1]
    return [*inner, GATConv(a, b, heads=heads, concat=False, dropout=workload.dropout)]


_BUILDERS: dict[str, Callable[[Workload, int, int], list[nn.Module]]] = {
    "sage": _sage,
    "gcn": _gcn,
    "gat": _gat,
}


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
    workload: Workload,
    in_dim: int,
    num_classes: int,
    task: str,
    *,
    types: GraphTypes | None = None,
) -> nn.Module:
    """The model of a workload, freshly initialised from `workload.seed`.

    Args:
        workload: `model` is sage, gcn, gat, rgcn or module:factory. A factory is called as
            factory(workload, in_dim, num_classes, task) and returns a torch.nn.Module with
            forward(x, blocks) -> logits of the seeds; with a forward_layer(layer, x, block) as
            BlockModel's it is also evaluated layer by layer.
        in_dim: Columns of the features.
        num_classes: Columns of the logits (binary: 1; link: `workload.hidden`).
        task: multiclass | multilabel | binary | link, for which the model is the encoder of `link`.
        types: The graph's types (`types_of`), needed by rgcn alone.

    Raises:
        InputError: unknown model or task, or settings that do not fit each other.
    """
    if task not in ("multiclass", "multilabel", "binary", "link"):
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
            return build_rgcn(workload, types, num_outputs)
        if workload.model not in _BUILDERS:
            names = ", ".join([*_BUILDERS, "rgcn"])
            raise InputError(f"model: expected {names} or module:factory, found {workload.model!r}")
        convs = _BUILDERS[workload.model](workload, in_dim, num_outputs)
        return BlockModel(convs, dropout=workload.dropout)


def flatten_gradients(model: nn.Module) -> Tensor:
    """One flat tensor whose views are the `.grad` of the model's parameters, zeroed.

    The gradient all-reduce then needs no copy. Zero it with `flat.zero_()` between steps;
    `zero_grad(set_to_none=True)` would detach it. Padding keeps each view 64-byte aligned.

    Raises:
        InputError: parameters of more than one dtype or device.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1:
        raise InputError(f"model: expected parameters of one dtype and device, found {kinds}")
    dtype, device = kinds.pop()
    step = max(64 // dtype.itemsize, 1)
    sizes = [-(-p.numel() // step) * step for p in parameters]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = part[: parameter.numel()].view_as(parameter)
    return flat
