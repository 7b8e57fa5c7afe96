"""PyG's convolutions computed on rectangular CSR blocks, with the convolution's own parameters.

| layer    | formula, for destination i                                        | source           |
|----------|-------------------------------------------------------------------|------------------|
| SAGEConv | W_l sum_j w_ij x_j + b + W_r x_i (w_ij = 1/k_i where none given)  | arXiv:1706.02216 |
| GCNConv  | sum_j w_ij W x_j + b, j over the neighbours and i itself          | arXiv:1609.02907 |
| GATConv  | concat or mean over heads of sum_j alpha_ij W x_j, + b            | arXiv:1710.10903 |

x is (num_src, in), the result (num_dst, out). The modules hold parameters and options only: their
state dictionaries are PyG's, and so is the result up to rounding.

R-GCN on typed blocks, with the parameters of PyG's RGCNConv.

For destination i, with N_r(i) its drawn in-neighbours of relation r:

    W_root x_i + b + sum_r 1/|N_r(i)| sum_{j in N_r(i)} W_r x_j

Source: Schlichtkrull et al., arXiv:1703.06103, formula 2 with c_{i,r} = |N_r(i)|. Before the first
layer every node type has a linear map of its own from its feature columns to the hidden width.
"""

from collections.abc import Sequence
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.attention import attention
from gnnplan.runtime.models.functions import aggregate_linear, linear
from gnnplan.runtime.plan.schema import Workload


def supports(conv: nn.Module) -> bool:
    """Whether `apply_conv` computes exactly what this convolution does."""
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
    """The convolution on one block, then the rectifier with `relu`.

    Args:
        conv: SAGEConv, GCNConv or GATConv for which `supports` holds. GCN reads the block's weights
            (`weights.fill_weights`), which include the self-loop.
        x: Shape (num_src, in).
        block: The adjacency.
        relu: Apply the rectifier.

    Returns:
        Shape (num_dst, out).

    Raises:
        InputError: a layer of another kind, a GCN block without weights, or x of another length.
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
    """A typed block as one block per relation.

    Raises:
        InputError: the block is not typed, or has another number of relations.
    """
    rows = block.num_dst * num_relations + 1
    if block.relation_ptr is None or block.relation_ptr.shape[0] != rows:
        raise InputError(
            f"model rgcn: expected blocks with edges of {num_relations} types, found others; "
            "sample with TypedSampler"
        )
    device = block.indptr.device
    ends, indices = block.relation_ptr.cpu().numpy(), block.indices.cpu().numpy()
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
                indptr=torch.from_numpy(indptr).to(device),
                indices=torch.from_numpy(own).to(device),
            )
        )
    return blocks


def apply_rgcn(conv: Any, x: Tensor, block: TorchBlock) -> Tensor:
    """An RGCNConv (mean, no bases or blocks) on one typed block.

    Args:
        conv: Its `weight` is (num_relations, in, out), `root` (in, out), `bias` (out,).
        x: Shape (num_src, in).
        block: The adjacency, with `relation_ptr`.

    Returns:
        Shape (num_dst, out).
    """
    out = linear(x[: block.num_dst], conv.root.t(), conv.bias)
    for weight, part in zip(conv.weight, relation_blocks(block, conv.num_relations), strict=True):
        if part.num_edges:
            out = out + aggregate_linear(x, weight.t().contiguous(), None, None, part)
    return out


class RGCN(nn.Module):
    """An input map per node type, then R-GCN layers with ReLU and dropout between them."""

    def __init__(self, workload: Workload, types: GraphTypes, num_outputs: int) -> None:
        from torch_geometric.nn import RGCNConv

        super().__init__()
        hidden = workload.hidden
        self.widths = list(types.widths)
        self.dropout = workload.dropout
        self.inputs = nn.ModuleList(nn.Linear(width, hidden) for width in self.widths)
        outs = [hidden] * (workload.num_layers - 1) + [num_outputs]
        self.convs = nn.ModuleList(RGCNConv(hidden, out, len(types.edge_types)) for out in outs)

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Logits of the seeds.

        Args:
            x: Features of the outermost block's sources, each type's in its first columns; shape
                (num_input, widest type).
            blocks: One per layer, outermost first, typed; the first says the sources' types.

        Returns:
            Shape (num_seeds, classes).
        """
        if len(blocks) != len(self.convs):
            raise InputError(
                f"model of {len(self.convs)} layers: expected as many blocks, found {len(blocks)}; "
                "give one fan-out per layer"
            )
        h = self._encode(x, blocks[0].src_type).relu()
        for layer, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            h = apply_rgcn(conv, h, block)
            if layer < len(self.convs) - 1:
                h = nn.functional.dropout(h.relu(), self.dropout, training=self.training)
        return h

    def _encode(self, x: Tensor, src_type: Tensor | None) -> Tensor:
        if len(self.widths) == 1:
            return self.inputs[0](x)
        if src_type is None:
            raise InputError("model rgcn: expected the type of each source, found none")
        order, parts = [], []
        for number, (width, to_hidden) in enumerate(zip(self.widths, self.inputs, strict=True)):
            own = (src_type == number).nonzero().view(-1)
            order.append(own)
            parts.append(to_hidden(x[own, :width]))
        # The inverse of the order by type puts the rows back where they were.
        return torch.cat(parts)[torch.cat(order).argsort()]


def build_rgcn(workload: Workload, types: GraphTypes | None, num_outputs: int) -> RGCN:
    """The R-GCN of a workload.

    Raises:
        InputError: the graph's types are not given.
    """
    if types is None:
        raise InputError("model rgcn: expected the graph's types, found none; pass types")
    return RGCN(workload, types, num_outputs)
