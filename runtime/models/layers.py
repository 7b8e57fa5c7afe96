"""PyG's convolutions computed on rectangular CSR blocks, with the convolution's own parameters.

| layer    | formula, for destination i                                        | source           |
|----------|-------------------------------------------------------------------|------------------|
| SAGEConv | W_l sum_j w_ij x_j + b + W_r x_i (w_ij = 1/k_i where none given)  | arXiv:1706.02216 |
| GCNConv  | sum_j w_ij W x_j + b, j over the neighbours and i itself          | arXiv:1609.02907 |
| GATConv  | concat or mean over heads of sum_j alpha_ij W x_j, + b            | arXiv:1710.10903 |

x is (num_src, in), the result (num_dst, out). The modules hold parameters and options only: their
state dictionaries are PyG's, and so is the result up to rounding.
"""

from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from runtime.errors import InputError
from runtime.models.adjacency import TorchBlock
from runtime.models.attention import attention
from runtime.models.functions import aggregate_linear, linear


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
