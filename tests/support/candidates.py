"""Candidates for tests, made from few words and without a machine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gnnplan.planner.candidate import Candidate, list_cores, make_candidate
from gnnplan.planner.search.dimensions.batches import share_draws
from gnnplan.runtime.plan.schema import Device, Threads, TopologyPlacement


def candidate_of_ranks(
    num_ranks: int = 1,
    *,
    threads: Threads | None = None,
    prefetch_depth: int = 2,
    policy: str = "none",
    gpus: Sequence[str] = (),
    cliques: Sequence[Sequence[int]] = (),
    hosts: int = 1,
    topology: Literal["host", "replicated", "partitioned"] = "host",
    replication: int = 1,
    bulk: int = 1,
    kappa: int | None = None,
) -> Candidate:
    """A candidate on cores, or on the GPUs named; all ranks are one clique where none is given."""
    found = make_candidate(
        list_devices(gpus, cliques) if gpus else list_cores(num_ranks, hosts),
        threads=threads,
        prefetch_depth=prefetch_depth,
        policy=policy,
    )
    placed = TopologyPlacement(policy=topology, replication=replication)
    return share_draws(replace(found, topology=placed, bulk_batches=bulk), kappa)


def list_devices(gpus: Sequence[str], cliques: Sequence[Sequence[int]] = ()) -> list[Device]:
    """GPUs of one host by their names."""
    of = {rank: number for number, ranks in enumerate(cliques) for rank in ranks}
    return [
        Device(rank=r, kind="cuda", clique=of.get(r, 0), memory=f"{name}.memory", index=r)
        for r, name in enumerate(gpus)
    ]
