"""A block's sums by the host's loops: `fused.Sums` over one rank's own rows."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.models import dense
from runtime.models.adjacency import TorchBlock
from runtime.models.fused import Sums
from runtime.models.kernels import aggregate_rows, source_gradient

_NO_WEIGHT: NDArray[np.float32] = np.empty(0, np.float32)


class BlockSums(Sums):
    """Over a block whose rows one rank has, wherever they lie."""

    def __init__(self, block: TorchBlock) -> None:
        self.block = block

    @property
    def num_dst(self) -> int:
        """Destinations of the block."""
        return self.block.num_dst


class HostSums(BlockSums):
    """float32 rows in host memory."""

    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """With rows of zeros up to `dense.padded_rows`."""
        block = self.block
        out = torch.empty(dense.padded_rows(block.num_dst), (2 if with_root else 1) * x.shape[1])
        out[block.num_dst :].zero_()
        weight = _NO_WEIGHT if block.weight is None else block.weight.numpy()
        edges = (block.indptr.numpy(), block.indices.numpy(), weight)
        aggregate_rows(*edges, x.contiguous().numpy(), out.numpy(), with_root)
        return out

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Every source's row is written once."""
        indptr, rows, weight = self.block.transposed()
        out = torch.empty(self.block.num_src, width)
        given = grad.contiguous().numpy()
        source_gradient(indptr, rows, weight, given, out.numpy(), width, with_root)
        return out
