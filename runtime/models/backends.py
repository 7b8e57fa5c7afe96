"""Which loops a tensor takes: numba's on the host, Triton's on a GPU, or torch's own operations."""

import functools

import torch
from torch import Tensor

from runtime.fallback import has_triton

HALVES = (torch.float16, torch.bfloat16)
"""Summed in float32."""


def runs_on_kernels(x: Tensor) -> bool:
    """Whether the numba loops apply to this tensor."""
    on_host = x.device.type == "cpu" and x.dtype == torch.float32
    # Mixed precision is torch's: the loops know float32 alone.
    return on_host and not torch.is_autocast_enabled("cpu")


def runs_on_device(x: Tensor) -> bool:
    """Whether the GPU's kernels apply to this tensor."""
    if x.device.type != "cuda" or x.dtype not in (torch.float32, *HALVES):
        return False
    # Atomic additions have no order: who asks torch for one gets torch's own sums.
    return _has_triton() and not torch.are_deterministic_algorithms_enabled()


_has_triton = functools.cache(has_triton)
