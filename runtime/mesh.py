"""The ranks of a job: who is who, which device each has, and over which groups they talk.

The group here is the training thread's. A feature store with peers makes itself another
(`Communicator.duplicate`), so that an exchange of rows on a prefetch thread never meets the
gradient exchange in one queue.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.comm.collectives import Communicator
from runtime.errors import InputError, PlanError
from runtime.plan import Device, Plan

TIMEOUT_SECONDS = 600.0
"""Longest wait in one collective before a rank counts as lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's view of the job."""

    rank: int
    size: int
    host: int
    device: torch.device
    comm: Communicator
    """Gradients and evaluation; with one rank it sends nothing."""
    owns_group: bool
    """True where this object set up torch.distributed and must tear it down."""

    def close(self) -> None:
        """Leave the process groups that this object made."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """Rank and number of ranks: of the initialised group, else of torchrun's environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def open_mesh(plan: Plan, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Mesh:
    """Join the job: set up gloo (processors) or nccl (GPUs), or use the group that exists.

    Raises:
        PlanError: the number of ranks that run is not the plan's.
        InputError: the plan wants a GPU that is not there.
    """
    rank, size = rank_and_size()
    if size != plan.num_ranks:
        raise PlanError(
            f"expected {plan.num_ranks} ranks (the plan's devices), found {size}; "
            f"start {plan.num_ranks} processes or plan again with --devices {size}"
        )
    planned = plan.strategy.devices[rank]
    device = torch_device(planned)
    owns = size > 1 and not dist.is_initialized()
    if owns:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return Mesh(
        rank=rank,
        size=size,
        host=planned.host,
        device=device,
        comm=Communicator(),
        owns_group=owns,
    )


def torch_device(planned: Device) -> torch.device:
    """The torch device of a planned rank, made current where it is a GPU.

    Raises:
        InputError: that GPU is not there.
    """
    if planned.kind == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if planned.index >= found:
        raise InputError(
            f"rank {planned.rank} is planned on GPU {planned.index}, this host has {found}; "
            "plan again on this machine"
        )
    device = torch.device("cuda", planned.index)
    torch.cuda.set_device(device)
    return device
