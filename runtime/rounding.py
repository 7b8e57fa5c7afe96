"""Square roots with the same bits everywhere, apart from what must import without torch."""

import numpy as np
import torch
from torch import Tensor


def square_root(x: Tensor) -> Tensor:
    """Return correctly rounded square roots of floating-point x.

    IEEE 754 asks for them; numpy, numba and CUDA give them. torch on a CPU does not (DEC-71).
    """
    return torch.sqrt(x) if x.is_cuda else torch.from_numpy(np.sqrt(x.cpu().numpy())).to(x.device)
