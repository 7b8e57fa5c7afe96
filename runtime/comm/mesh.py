"""The ranks of a job, with their devices and their group, and the 1.5D process grid.

The group of a `Mesh` is the training thread's. A feature store with peers makes itself another
(`Communicator.duplicate`): an exchange of rows on a prefetch thread never meets the gradient
exchange in one queue.

The grid has p/c process rows of c processes each; rank = row * c + column. A matrix is cut into R =
p/c block rows of ceil(n/R) rows, and each of row i's c processes holds a copy of block i. A product
visits the block rows that it needs in stages, which the c process columns share evenly (formulas
4.6; Tripathy et al., MLSys 2024).
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gnnplan.runtime.comm.collectives import Communicator, devices_served
from gnnplan.runtime.comm.route import use_route_to
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.plan.schema import Device, Plan
from gnnplan.runtime.process import GLOO_THREADS, batch_threads, make_batch
from gnnplan.runtime.processor import open_processor

GPU_BACKENDS = "cpu:gloo,cuda:nccl"
"""Backends of a job of GPUs: theirs, and one for the host's tensors and objects."""
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
    """Communicator of gradients and evaluation; one rank sends nothing."""
    owns_group: bool
    """Whether this object set up torch.distributed and must tear it down."""

    def close(self) -> None:
        """Leave the process group that this object made."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """Return rank and number of ranks, of the initialised group or of torchrun's environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def open_mesh(plan: Plan, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Mesh:
    """Join the job: set up gloo, for GPUs nccl beside it, or use the group that exists.

    Ranks or hosts that are not the plan's raise PlanError, a GPU that is not there InputError.
    """
    rank, size = rank_and_size()
    devices = plan.strategy.devices
    if size != plan.num_ranks:
        raise PlanError(
            f"expected {plan.num_ranks} ranks (the plan's devices), found {size}; "
            f"start {plan.num_ranks} processes or plan again with --devices {size}"
        )
    planned = devices[rank]
    check_place(devices, rank)
    device = open_processor(plan, rank).device
    owns = size > 1 and not dist.is_initialized()
    # Sums beside the backward pass must not wait until compute leaves them the core.
    give_way = plan.strategy.threads.comm == 0
    if owns:
        if "MASTER_ADDR" in os.environ:
            use_route_to(os.environ["MASTER_ADDR"])
        timeout = timedelta(seconds=timeout_seconds)
        store = _store_of_attempt(timeout)
        bound: dict[str, Any] = {}
        if (backend := backend_of(devices)) == "nccl":
            backend, bound = GPU_BACKENDS, {"device_id": device}
        with batch_threads() if give_way else nullcontext():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout, **bound
            )
    elif size > 1 and give_way:  # the group is the user's, and its threads run already
        make_batch(GLOO_THREADS)
    between_hosts = len({each.host for each in devices}) > 1
    group = None
    if size > 1 and device.type == "cpu" and "cpu" not in devices_served():
        group = dist.new_group(backend="gloo")  # the user's is for GPUs alone
    return Mesh(
        rank=rank,
        size=size,
        host=planned.host,
        device=device,
        comm=Communicator(group, device=device, between_hosts=between_hosts, give_way=give_way),
        owns_group=owns,
    )


def backend_of(devices: list[Device]) -> str:
    """Choose nccl between GPUs, and gloo between processors or where ranks share a GPU."""
    places = {(each.host, each.index) for each in devices}
    alone = all(each.needs_gpu for each in devices) and len(places) == len(devices)
    return "nccl" if alone else "gloo"


def check_place(devices: list[Device], rank: int) -> None:
    """Refuse ranks that torchrun placed on other hosts than the plan did.

    All ranks on one machine are accepted: tests and trials play several hosts there.
    """
    here = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if None in here or here[1] == str(len(devices)):
        return
    mates = [each.rank for each in devices if each.host == devices[rank].host]
    planned = str(mates.index(rank)), str(len(mates))
    if here != planned:
        raise PlanError(
            f"rank {rank} is planned as place {planned[0]} of {planned[1]} on host "
            f"{devices[rank].host}, torchrun started it as place {here[0]} of {here[1]}; start "
            "each host's own number of ranks, in the order of the plan's hosts"
        )


def _store_of_attempt(timeout: timedelta) -> Store:
    """Open the job's key-value store, without the keys of earlier attempts.

    torchrun's store outlives a restart of the ranks (torch 2.13), with the addresses under which
    gloo would look for ranks that are gone.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt{restarts}", store)


def stages_of_column(column: int, num_rows: int, replication: int) -> range:
    """Return stages [floor(j R / c), floor((j + 1) R / c)): columns differ by one at most [C16]."""
    return range(column * num_rows // replication, (column + 1) * num_rows // replication)


def block_bounds(num_nodes: int, num_rows: int) -> NDArray[np.int64]:
    """Return begins and end of the block rows of ceil(n/R) rows, int64 (R + 1,).

    Last blocks may be empty. With floor(n/R), rows behind the last block would belong to nobody.
    """
    size = -(-num_nodes // num_rows)
    return np.minimum(size * np.arange(num_rows + 1, dtype=np.int64), num_nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGrid:
    """One rank's place in the grid, and the ranks that it talks to."""

    replication: int
    """c: processes per row, and copies of each block."""
    num_rows: int
    """R = p/c: process rows."""
    row_comm: Communicator
    """The c processes of this row, by column."""
    column_comm: Communicator
    """The R processes of this column, by row."""

    @property
    def row(self) -> int:
        """Process row of this rank, i."""
        return self.column_comm.rank

    @property
    def column(self) -> int:
        """Process column of this rank, j."""
        return self.row_comm.rank

    def ranks_of_row(self) -> range:
        """Return the ranks of this process row."""
        return range(self.row * self.replication, (self.row + 1) * self.replication)

    def stages(self) -> range:
        """Return the block rows that this rank's column handles."""
        return stages_of_column(self.column, self.num_rows, self.replication)

    def bounds(self, num_nodes: int) -> NDArray[np.int64]:
        """Return begins and end of the block rows of a graph."""
        return block_bounds(num_nodes, self.num_rows)

    def agree_min(self, value: int) -> int:
        """Return the smallest of all ranks' values; collective."""
        in_row = min(self.row_comm.all_gather_objects(value))
        return min(self.column_comm.all_gather_objects(in_row))

    def close(self) -> None:
        """Give back the process groups."""
        self.row_comm.close()
        self.column_comm.close()


def open_grid(comm: Communicator, replication: int) -> ProcessGrid:
    """Arrange p ranks in a grid with c = `replication`, a divisor of p; collective."""
    ranks, c = comm.size, replication
    if c < 1 or ranks % c != 0:
        raise PlanError(
            f"expected copies that divide the {ranks} ranks, found replication {c}; plan again"
        )
    rows = [list(range(first, first + c)) for first in range(0, ranks, c)]
    columns = [list(range(column, ranks, c)) for column in range(c)]
    return ProcessGrid(
        replication=c,
        num_rows=ranks // c,
        row_comm=comm.split(rows),
        column_comm=comm.split(columns),
    )
