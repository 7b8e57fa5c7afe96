"""Processes in a group that serves GPUs alone, without a GPU: gloo under the name of CUDA.

A collective of such a group refuses the host's tensors, as NCCL's group does.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.ranks import free_port, run_on_ranks

GPU = torch.device("cuda", 0)


def on_gpu_group(size: int, body: Callable[[Path], None], folder: Path) -> None:
    """Run body(folder) in `size` processes that a user's script has joined for GPUs alone."""
    run_on_ranks(_run_rank, (size, free_port(), body, folder), size)


def _run_rank(rank: int, size: int, port: int, body: Callable[[Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("cuda:gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        body(folder)
    finally:
        dist.destroy_process_group()
