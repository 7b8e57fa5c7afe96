"""Build the model that a workload names: SAGE, GCN, GAT or R-GCN on blocks, or a user's own.

SAGE, GCN and GAT are those of torch_geometric.nn.models with ReLU: same layers, same parameter
names, so a state dictionary moves either way. Layers run on rectangular CSR blocks, with the
parameters of PyG's modules:

| layer    | formula, for destination i                                        | source           |
|----------|-------------------------------------------------------------------|------------------|
| SAGEConv | W_l sum_j w_ij x_j + b + W_r x_i (w_ij = 1/k_i where none given)  | arXiv:1706.02216 |
| GCNConv  | sum_j w_ij W x_j + b, j over the neighbours and i itself          | arXiv:1609.02907 |
| GATConv  | concat or mean over heads of sum_j alpha_ij W x_j, + b            | arXiv:1710.10903 |
| RGCNConv | W_root x_i + b + sum_r mean of W_r x_j over j in N_r(i)           | arXiv:1703.06103 |

alpha_ij = softmax_j(leaky_relu(a_src . h_j + a_dst . h_i)) over i's edges with one self-loop, and
N_r(i) are the drawn in-neighbours of relation r. x is (num_src, in), the result (num_dst, out).
State dictionaries are PyG's, and so is the result up to rounding.
"""

import importlib
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, RGCNConv, SAGEConv

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.graph.format import TASKS
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.functions import (
    aggregate_linear,
    drop,
    linear,
    runs_on_device,
    runs_on_kernels,
    wide,
)
from gnnplan.runtime.models.kernels import attend_rows, attention_gradient
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.processor import processor_of

# Weights are drawn from the process's generator: ranks that are threads take turns at it. A user's
# factory may build one of these models inside its own turn.
_drawing = threading.RLock()


def supports(conv: nn.Module) -> bool:
    """Return whether `apply_conv` computes exactly what this convolution does."""
    if getattr(conv, "flow", None) != "source_to_target" or getattr(conv, "explain", None):
        return False
    if type(conv) is SAGEConv:
        return conv.aggr == "mean" and not conv.project and not conv.normalize
    if type(conv) is GCNConv:
        return conv.aggr in ("add", "sum") and conv.normalize and _is_textbook_gcn(conv)
    if type(conv) is GATConv:
        plain = conv.edge_dim is None and conv.lin is not None and conv.aggr in ("add", "sum")
        return plain and conv.add_self_loops and conv.res is None
    return False


def _is_textbook_gcn(conv: GCNConv) -> bool:
    return conv.add_self_loops and not conv.improved and not conv.cached


def apply_conv(conv: nn.Module, x: Tensor, block: TorchBlock, *, relu: bool = False) -> Tensor:
    """Compute a convolution on one block, then the rectifier with `relu`: (num_dst, out).

    Args:
        conv: SAGEConv, GCNConv or GATConv for which `supports` holds. GCN reads the block's weights
            (`fill_weights`), which include the self-loop.
        x: rows of the sources, (num_src, in).
        block: the adjacency.
        relu: whether the rectifier follows.
    """
    if x.shape[0] != block.num_src:
        raise InputError(f"layer input: expected {block.num_src} source rows, found {x.shape[0]}")
    if isinstance(conv, SAGEConv):
        root = conv.lin_r.weight if conv.root_weight else None
        return aggregate_linear(x, conv.lin_l.weight, root, conv.lin_l.bias, block, relu=relu)
    if isinstance(conv, GCNConv):
        if block.weight is None:
            raise InputError("GCN: expected a block with weights; call fill_weights on the batch")
        return aggregate_linear(x, conv.lin.weight, None, conv.bias, block, relu=relu)
    if isinstance(conv, GATConv):
        return _apply_gat(conv, x, block, relu=relu)
    raise InputError(f"layer: expected SAGEConv, GCNConv or GATConv, found {type(conv).__name__}")


def _apply_gat(conv: GATConv, x: Tensor, block: TorchBlock, *, relu: bool) -> Tensor:
    heads, width = conv.heads, conv.out_channels
    h = linear(x, conv.lin.weight, None)  # pyright: ignore[reportOptionalMemberAccess]
    by_head = h.view(-1, heads, width)
    out = attention(
        h,
        (by_head * conv.att_src).sum(-1),
        (by_head[: block.num_dst] * conv.att_dst).sum(-1),
        block.self_looped(),
        slope=conv.negative_slope,
        dropout=conv.dropout if conv.training else 0.0,
    )
    if not conv.concat:
        out = out.view(-1, heads, width).mean(dim=1)
    if conv.bias is not None:
        out = out + conv.bias
    return out.relu() if relu else out


_jit: Any = numba.njit(cache=True, nogil=True)


@_jit
@no_type_check
def _edges_of_relation(relation_ptr, indices, relation, num_relations, out_ptr, out_indices):
    position = 0
    for i in range(out_ptr.shape[0] - 1):
        row = i * num_relations + relation
        for e in range(relation_ptr[row], relation_ptr[row + 1]):
            out_indices[position] = indices[e]
            position += 1
        out_ptr[i + 1] = position


def relation_blocks(block: TorchBlock, num_relations: int) -> list[TorchBlock]:
    """Split a typed block into one block per relation; raises InputError where it has others."""
    rows = block.num_dst * num_relations + 1
    if block.relation_ptr is None or block.relation_ptr.shape[0] != rows:
        raise InputError(
            f"model rgcn: expected blocks with edges of {num_relations} types, found others; "
            "sample with TypedSampler"
        )
    if block.live is not None:  # the rows of a relation lie among the others', where they are
        return [
            replace(block, indptr=block.relation_ptr[relation:], step=num_relations, dst=None)
            for relation in range(num_relations)
        ]
    if processor_of(block.indptr.device).apart:
        return _relation_blocks_apart(block, block.relation_ptr, num_relations)
    ends, indices = block.relation_ptr.numpy(), block.indices.numpy()
    counts = np.diff(ends).reshape(-1, num_relations).sum(0)
    blocks = []
    for relation in range(num_relations):
        indptr = np.zeros(block.num_dst + 1, np.int64)
        own = np.empty(int(counts[relation]), np.int32)
        _edges_of_relation(ends, indices, relation, num_relations, indptr, own)
        blocks.append(
            TorchBlock(
                num_src=block.num_src,
                num_dst=block.num_dst,
                indptr=torch.from_numpy(indptr),
                indices=torch.from_numpy(own),
            )
        )
    return blocks


def _relation_blocks_apart(block: TorchBlock, ends: Tensor, num_relations: int) -> list[TorchBlock]:
    """Split a typed block in torch operations, for a GPU; waits once, for the relations' edges."""
    counts = ends.diff().view(-1, num_relations)
    numbers = torch.arange(num_relations, device=ends.device).repeat(block.num_dst)
    relation = numbers.repeat_interleave(counts.flatten(), output_size=block.num_edges)
    indices = block.indices[relation.argsort(stable=True)]
    indptrs = torch.nn.functional.pad(counts.t().cumsum(1), (1, 0))
    parts = indices.split(counts.sum(0).tolist())
    return [
        TorchBlock(num_src=block.num_src, num_dst=block.num_dst, indptr=indptr, indices=part)
        for indptr, part in zip(indptrs, parts, strict=True)
    ]


def apply_rgcn(conv: Any, x: Tensor, block: TorchBlock) -> Tensor:
    """Compute an RGCNConv (mean, no bases or blocks) on one typed block: (num_dst, out)."""
    out = linear(x[: block.num_dst], conv.root.t(), conv.bias)
    # A GPU starts as many kernels whatever was drawn; cores have nothing to do without edges.
    apart = processor_of(block.indptr.device).apart
    for weight, part in zip(conv.weight, relation_blocks(block, conv.num_relations), strict=True):
        if part.num_edges or apart:
            out = out + aggregate_linear(x, weight.t().contiguous(), None, None, part)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        score_src: Tensor,
        score_dst: Tensor,
        keep: Tensor,
        block: TorchBlock,
        slope: float,
    ) -> Tensor:
        alpha = torch.empty(block.num_edges, score_src.shape[1])
        out = torch.empty(block.num_dst, h.shape[1])
        ctx.block, ctx.slope = block, np.float32(slope)
        ctx.save_for_backward(h, score_src, score_dst, keep, alpha)
        arrays = [t.detach().contiguous().numpy() for t in (h, score_src, score_dst)]
        edges = (block.indptr.numpy(), block.indices.numpy())
        attend_rows(*edges, *arrays, ctx.slope, keep.numpy(), alpha.numpy(), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        h, score_src, score_dst, keep, alpha = ctx.saved_tensors
        d_h, d_src, d_dst = (torch.zeros_like(t) for t in (h, score_src, score_dst))
        arrays = [t.detach().contiguous().numpy() for t in (h, score_src, score_dst)]
        edges = (ctx.block.indptr.numpy(), ctx.block.indices.numpy())
        rest = [t.contiguous().numpy() for t in (keep, alpha, grad_outputs[0], d_h, d_src, d_dst)]
        attention_gradient(*edges, *arrays, ctx.slope, *rest)
        return d_h, d_src, d_dst, None, None, None


def _attend_plain(
    h: Tensor, score_src: Tensor, score_dst: Tensor, keep: Tensor, block: TorchBlock, slope: float,
    *, by_kernels: bool,
) -> Tensor:  # fmt: skip
    """Compute attention in torch operations; `by_kernels` lets a GPU's kernels do the sums."""
    heads, dtype = score_src.shape[1], h.dtype
    h, score_src, score_dst, keep = (wide(each) for each in (h, score_src, score_dst, keep))
    row, source = block.row_of_edge(), block.indices.long()
    score = torch.nn.functional.leaky_relu(score_src[source] + score_dst[row], slope)
    index = row.unsqueeze(1).expand(-1, heads)
    largest = score.new_zeros(block.num_dst, heads).scatter_reduce(
        0, index, score.detach(), "amax", include_self=False
    )
    weight = (score - largest[row]).exp()
    total = weight.new_zeros(block.num_dst, heads).index_add(0, row, weight)
    alpha = weight / total[row]
    alpha = alpha * keep if keep.shape[0] else alpha
    if by_kernels and h.dtype == torch.float32 and runs_on_device(h):
        from gnnplan.runtime.models.aggregate_triton import sum_by_head

        return sum_by_head(h, alpha, block).to(dtype)
    messages = h.view(h.shape[0], heads, h.shape[1] // heads)[source] * alpha.unsqueeze(2)
    out = h.new_zeros(block.num_dst, h.shape[1]).index_add(0, row, messages.flatten(1))
    return out.to(dtype)


def attention(
    h: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    block: TorchBlock,
    *,
    slope: float,
    dropout: float = 0.0,
    by_kernels: bool = False,
) -> Tensor:
    """Sum over each destination's edges, weighted by attention: (num_dst, heads * width).

    Args:
        h: transformed sources, heads side by side, (num_src, heads * width).
        score_src: a_src . h_j, (num_src, heads).
        score_dst: a_dst . h_i, (num_dst, heads).
        block: the adjacency, with self-loops where the model wants them.
        slope: negative slope of the leaky rectifier.
        dropout: probability with which a coefficient is dropped (training only).
        by_kernels: whether a GPU's kernels sum, without a row of each edge in memory (DEC-121).
    """
    keep = h.new_empty(0, score_src.shape[1])
    if dropout > 0:
        ones = h.new_ones(block.num_edges, score_src.shape[1])
        keep = drop(ones, dropout)
    if not runs_on_kernels(h):
        plain = (h, score_src, score_dst, keep, block, slope)
        return _attend_plain(*plain, by_kernels=by_kernels)
    return _Attention.apply(h, score_src, score_dst, keep, block, slope)


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


def _check_parameters(name: str, factory: Callable[..., object]) -> None:
    """Refuse a factory that cannot be called as `build_model` calls it."""
    try:
        found = inspect.signature(factory)
    except (TypeError, ValueError):  # no function, or one that tells of no parameters
        return
    try:
        found.bind(None, 0, 0, "")
    except TypeError:
        raise InputError(
            f"model {name}: expected a factory that is called as factory(workload, in_dim, "
            f"num_classes, task), found {name.partition(':')[2]}{found}; give it these parameters"
        ) from None


def _from_import_path(workload: Workload, in_dim: int, num_classes: int, task: str) -> nn.Module:
    module_name, _, factory_name = workload.model.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"model {workload.model}: expected an importable module:factory, found {error}"
        ) from None
    _check_parameters(workload.model, factory)
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
