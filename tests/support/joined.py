"""Machines of several hosts and profiles of joined ranks: round rates, counts of a real graph."""

from dataclasses import replace

import numpy as np

from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.hosts import HostRates
from gnnplan.planner.probe.hosts_machine import join_hosts
from gnnplan.planner.probe.timing import summarize
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.presample import draw_sharing, presample
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Combination, ProcessCost, WorkloadProfile
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler
from tests.support.machines import GIB, machine
from tests.support.profiles import timing

CARD_BYTES_PER_SECOND = 100e6
MESSAGE_SECONDS = 1e-4


def host_rates(hosts: int, card: float = CARD_BYTES_PER_SECOND) -> HostRates:
    """Links of one rate; a collective takes 100 us and its bytes over the card."""
    sizes = [1_000, 40_000, 1_000_000, 100_000_000]
    points = [summarize([MESSAGE_SECONDS + size / card]) for size in sizes]
    counts = list(range(2, hosts + 1))
    link = card * (1 - np.eye(hosts))
    return HostRates(
        latency_seconds=np.full((hosts, hosts), MESSAGE_SECONDS),
        bandwidth=link,
        sent=np.full(hosts, card),
        received=np.full(hosts, card),
        message_bytes=sizes,
        messages={(a, b): points for a in range(hosts) for b in range(hosts) if a != b},
        host_counts=counts,
        collectives={
            name: [p for p in points for _ in counts] for name in ("all_reduce", "all_to_all")
        },
    )


def hosts_machine(
    hosts: int = 2, *, card: float = CARD_BYTES_PER_SECOND, host_bytes: int = 8 * GIB
) -> MachineModel:
    """Hosts of two cores each, as machine() has them; this machine's fingerprint on each."""
    one = replace(machine(host_bytes=host_bytes), fingerprint=machine_fingerprint())
    return join_hosts([one] * hosts, host_rates(hosts, card))


def joined_profile(
    graph: Graph, settings: PlanSettings, combinations: list[Combination]
) -> Profile:
    """Batches and their sharing drawn from the graph; the model's time by hand."""
    work = settings.workload
    sampler = Sampler(name=settings.sampler, dialect=settings.dialect)
    drawn = [presample(graph, work, sampler, c) for c in _counts(combinations)]
    shared, stacks = draw_sharing(graph, settings, combinations)
    numbers = WorkloadProfile(
        graph_fingerprint=graph.fingerprint,
        sampler_fingerprint="by hand",
        batches=[batch for batch, _ in drawn],
        timing={
            c.key(work.batch_size): timing(-(-work.batch_size // c.num_ranks), c.ranks)
            for c in combinations
        },
        process=ProcessCost(start_seconds=2.0, resident_bytes=200_000_000),
        shared=shared,
        stacks=stacks,
    )
    return Profile(numbers=numbers, hotness={h.seeds_per_rank: h for _, h in drawn})


def _counts(combinations: list[Combination]) -> list[int]:
    return sorted({1} | {c.num_ranks for c in combinations})
