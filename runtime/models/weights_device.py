"""Edge weights of blocks where they lie, in torch operations: `weights` for a GPU, bit for bit.

Products are taken in the order of the loops there, and roots and quotients are correctly rounded
on both, so the weights are the same numbers.
"""

from torch import Tensor

from runtime.models.adjacency import TorchBlock, insert_self_loops
from runtime.rounding import root


def gcn_blocks(
    blocks: list[TorchBlock], degrees: list[tuple[Tensor, Tensor]], *, may_loop: bool = True
) -> list[TorchBlock]:
    """GCN's blocks: one self-loop per row, last in it, and the weights of `weights._gcn_block`.

    Args:
        blocks: as drawn, outermost first.
        degrees: of each: full in-degrees of its destinations, and 1 / sqrt(d) of its sources, both
            float32 (`full_degrees` or `sampled_degrees`).
        may_loop: whether drawn edges may be self-loops; False spares a wait for the device.
    """
    return [
        _gcn_block(block, full, inverse_root, may_loop=may_loop)
        for block, (full, inverse_root) in zip(blocks, degrees, strict=True)
    ]


def full_degrees(
    block: TorchBlock, n_id: Tensor, degree: Tensor, loops: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Degrees in the full graph, for gcn_norm full.

    Args:
        block: the block.
        n_id: int64, global ids of its sources first.
        degree: int64 [N], self-loops included.
        loops: int32 [N], self-loops; None where the graph has none.
    """
    nodes = n_id[: block.num_src]
    full = degree[nodes].float()
    # numpy takes float32 less int32 in float64: so here, or roots would be rounded differently.
    neighbours = full if loops is None else full.double() - loops[nodes].double()
    return full, _inverse_root(neighbours)


def sampled_degrees(block: TorchBlock, outermost: TorchBlock | None) -> tuple[Tensor, Tensor]:
    """Degrees in the sampled subgraph, for gcn_norm sampled.

    Args:
        block: the block.
        outermost: the block that holds the whole subgraph (dialect first_seen); None: `block`.
    """
    reference = block if outermost is None else outermost
    row = reference.row_of_edge()
    other = (reference.indices != row).float()
    counts = other.new_zeros(reference.num_dst).index_add_(0, row, other)
    neighbours = other.new_zeros(block.num_src)
    counted = min(reference.num_dst, block.num_src)
    neighbours[:counted] = counts[:counted]
    return block.indptr.diff().float(), _inverse_root(neighbours)


def _inverse_root(neighbours: Tensor) -> Tensor:
    return (1 / root(neighbours + 1)).float()


def _gcn_block(
    block: TorchBlock, full: Tensor, inverse_root: Tensor, *, may_loop: bool
) -> TorchBlock:
    row, source = block.row_of_edge(), block.indices.long()
    if block.weight is None:
        drawn = block.indptr.diff().float()
        mean = (1 / drawn)[row]
    else:
        mean = block.weight
    weight = full[row] * mean * inverse_root[row] * inverse_root[source]
    inserted = insert_self_loops(block, may_loop=may_loop)
    filled = weight.new_empty(inserted.block.num_edges)
    filled[inserted.edges] = weight if inserted.kept is None else weight[inserted.kept]
    own = inverse_root[: block.num_dst]
    filled[inserted.loops] = own * own
    inserted.block.weight = filled
    return inserted.block
