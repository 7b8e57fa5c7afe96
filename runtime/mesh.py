"""The ranks of a job: who is who, which device each has, and over which groups they talk.

The group here is the training thread's. A feature store with peers makes itself another
(`Communicator.duplicate`), so that an exchange of rows on a prefetch thread never meets the
gradient exchange in one queue. Hosts and cliques are the plan's; groups of them are made on demand.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.route import use_route_to
from gnnplan.runtime.cores import GLOO_THREADS, batch_threads, make_batch
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.plan.schema import Device, Plan
from gnnplan.runtime.processor import open_processor

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
    hosts: list[list[int]] = field(default_factory=list[list[int]])
    """Ranks of each host, hosts by number."""
    cliques: list[list[int]] = field(default_factory=list[list[int]])
    """Ranks of each clique, cliques by number."""

    def host_group(self) -> Communicator:
        """The ranks of this host, on a process group of their own; collective over all ranks."""
        return self.comm.split(self.hosts, on_one_host=True)

    def clique_group(self) -> Communicator:
        """The ranks of this rank's clique, on a group of their own; collective over all ranks."""
        return self.comm.split(self.cliques)

    def leader_group(self) -> Communicator | None:
        """The first ranks of all hosts; None on other ranks. Collective over all ranks."""
        leaders = [ranks[0] for ranks in self.hosts]
        others = [rank for rank in range(self.size) if rank not in leaders]
        group = self.comm.split([leaders, others] if others else [leaders])
        if self.rank in leaders:
            return group
        group.close()
        return None

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
        PlanError: the number of ranks that run, or their hosts, are not the plan's.
        InputError: the plan wants a GPU that is not there.
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
    # Sums beside the backward pass would wait for compute to leave the core to them.
    give_way = plan.strategy.threads.comm == 0
    if owns:
        if "MASTER_ADDR" in os.environ:
            use_route_to(os.environ["MASTER_ADDR"])
        backend = backend_of(devices)
        timeout = timedelta(seconds=timeout_seconds)
        store = _store_of_attempt(timeout)
        with batch_threads() if backend == "gloo" and give_way else nullcontext():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
    elif size > 1 and give_way:  # the group is the user's, and its threads run already
        make_batch(GLOO_THREADS)
    hosts = ranks_by([each.host for each in devices])
    return Mesh(
        rank=rank,
        size=size,
        host=planned.host,
        device=device,
        comm=Communicator(between_hosts=len(hosts) > 1, give_way=give_way),
        owns_group=owns,
        hosts=hosts,
        cliques=ranks_by([each.clique for each in devices]),
    )


def backend_of(devices: list[Device]) -> str:
    """Between GPUs nccl; between processors, and where ranks share a GPU (nccl refuses), gloo."""
    places = {(each.host, each.index) for each in devices}
    alone = all(each.needs_gpu for each in devices) and len(places) == len(devices)
    return "nccl" if alone else "gloo"


def ranks_by(numbers: list[int]) -> list[list[int]]:
    """Ranks that share a number, lists in the order of the numbers.

    >>> ranks_by([1, 0, 1])
    [[1], [0, 2]]
    """
    return [
        [rank for rank, number in enumerate(numbers) if number == shared]
        for shared in sorted(set(numbers))
    ]


def check_place(devices: list[Device], rank: int) -> None:
    """Refuse ranks that torchrun placed on other hosts than the plan did.

    All ranks on one machine are let through: hosts may be played there.

    Raises:
        PlanError: this rank is planned at another place of its host.
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
    """The job's key-value store, without the keys of earlier attempts.

    torchrun's store outlives a restart of the ranks (torch 2.13), and with it the addresses under
    which gloo would look for ranks that are gone.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt{restarts}", store)
