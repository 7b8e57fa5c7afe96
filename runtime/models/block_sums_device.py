"""A block's sums by a GPU's kernels: `fused.Sums` over rows in its memory."""

from torch import Tensor

from runtime.models.aggregate_triton import spread_rows, sum_rows
from runtime.models.block_sums import BlockSums


class DeviceSums(BlockSums):
    """Rows of float32, float16 or bfloat16, summed in float32."""

    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """No more than there are."""
        return sum_rows(x, self.block, with_root=with_root)

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """By atomic additions, in float32."""
        return spread_rows(grad, self.block, width, with_root=with_root)
