"""Where an experiment runs: on a GPU that ranks share, or its course alone on cores.

NCCL refuses two ranks on one GPU that it takes for one host's; under a `NCCL_HOSTID` of its own
each rank counts as a host, and they talk by sockets over loopback. On cores the same experiment
runs with gloo and Triton's interpreter on tiny sizes: that shows that it would run, and measures
nothing.
"""

import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gnnplan.runtime import processor
from gnnplan.runtime.emulation import threads
from tests.support.ranks import free_port, run_on_ranks

COLLECTIVE_SECONDS = 40.0
"""Longest wait in a collective: an experiment ends with an error of its own, not by its limit."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The device of an experiment."""

    emulated: bool = False
    """On cores, on tiny sizes: nothing of it is recorded."""
    until: float = math.inf
    """Reading of time.monotonic() at which this process is ended."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        return torch.device("cpu") if self.emulated else torch.device("cuda", 0)

    @property
    def backend(self) -> str:
        """What ranks that share the device talk by."""
        return "gloo" if self.emulated else "nccl"

    @property
    def left_seconds(self) -> float:
        """Seconds until this process is ended."""
        return self.until - time.monotonic()

    def wait(self) -> None:
        """Wait for the device."""
        if not self.emulated:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give back the memory of what is no longer used, and an emulated GPU.

        Raises:
            RuntimeError: the GPU reported an error, after which this process cannot use it.
        """
        gc.collect()
        threads.stop()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def as_host(rank: int) -> dict[str, str]:
    """Variables that make NCCL take a rank for a host of its own."""
    return {"NCCL_HOSTID": f"gnnplan-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def take_gpu(rank: int, size: int) -> None:
    """Give this rank a GPU of its own, or the one that is there as if it were its own."""
    alone = torch.cuda.device_count() >= size
    number = rank if alone else 0
    if not alone:
        os.environ |= as_host(rank)
        # One GPU stands for all: what the plan lets ranks map, they map.
        processor.CudaProcessor.can_map = lambda self, index: True
    processor.find_gpu = lambda plan, rank, shown: number
    torch.cuda.set_device(number)


def run_sharing(
    setting: Setting, body: Callable[..., None], ranks: int, *arguments: Any, join: bool = True
) -> None:
    """Run body(setting, rank, *arguments) in processes that share the device.

    Args:
        setting: of the experiment.
        body: a function of a module.
        ranks: processes.
        arguments: handed on.
        join: make the process group first; without, the environment alone is torchrun's.

    Raises:
        Exception: whatever a rank raises.
    """
    run_on_ranks(_on_rank, (setting, body, ranks, free_port(), join, arguments), ranks)


def _on_rank(
    rank: int,
    setting: Setting,
    body: Callable[..., None],
    ranks: int,
    port: int,
    join: bool,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    os.environ |= as_host(rank)
    if not setting.emulated:
        torch.cuda.set_device(0)
    if join:
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        dist.init_process_group(setting.backend, rank=rank, world_size=ranks, timeout=limit)
    body(setting, rank, *arguments)
    if join:
        dist.destroy_process_group()
