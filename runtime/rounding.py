"""Square roots with the same bits everywhere.

IEEE 754 asks for correctly rounded roots; numpy, numba and CUDA give them. torch on a CPU does not:
its vectors of 512 bits miss the last bit of one float32 in six, and which processor is at hand
decides whether they are used.
"""

import numpy as np
import torch
from torch import Tensor


def root(x: Tensor) -> Tensor:
    """Square roots of floating-point x, correctly rounded; of its shape and type."""
    return torch.sqrt(x) if x.is_cuda else torch.from_numpy(np.sqrt(x.cpu().numpy())).to(x.device)
