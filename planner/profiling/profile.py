"""Graph -> profile: pre-sample for every number of ranks, then time the model on those shapes."""

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.cooperative import part_of, part_profile
from planner.errors import SettingsError
from planner.machine import MachineModel
from planner.profiling import cache
from planner.profiling.batches import MOST_SAMPLED, draw_all, draw_sharing, sampler_of
from planner.profiling.cache import Profile
from planner.profiling.launching import with_launcher
from planner.profiling.model_seconds import SCALES, STEPS, with_loading
from planner.profiling.presample import Progress
from planner.profiling.team import Team
from planner.profiling.timing_rounds import ROUNDS, TimedBatch, time_all
from planner.settings import PlanSettings
from planner.workload import BatchProfile, Combination, WorkloadProfile
from runtime import codec
from runtime.graph.dataset import Graph

VERSION = 38
"""Rises when a profile means something else than before."""

GATHER_TABLES = ("gather", "mapped_gather", "disk_read")
"""Of the machine, against which a graph's gathers and reads of the disk are held."""


def profile_key(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
) -> str:
    """Hash of everything that decides a profile.

    Gathers on the graph are kept as factors of the machine's tables: a machine that is probed anew
    has others, and an old factor would undo what the new table says.
    """
    work = settings.workload
    decided = [
        VERSION,
        [graph.fingerprint, machine.fingerprint, settings.sampler, settings.dialect],
        [machine.tables.get(name) for name in GATHER_TABLES],
        settings.sampler_parameters,
        replace(work, learning_rate=0.0, weight_decay=0.0, allow="exact"),
        list(combinations),
        [SCALES, STEPS, ROUNDS, MOST_SAMPLED],
    ]
    return codec.content_hash(decided)[:32]


def profile(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> Profile:
    """The profile of a workload, from the cache where it was made before.

    Args:
        graph: the dataset.
        settings: sampler, model and global batch.
        machine: its fingerprint enters the key, since layer times are the machine's.
        combinations: (ranks, threads) that candidates may use.
        progress: told what is going on.
        measure: False takes a cached profile or raises; nothing is drawn or timed.

    Raises:
        SettingsError: nothing may be measured and no such profile is cached.
        WorkerFailed: the model could not be timed; the text is its own error.
    """
    key = profile_key(graph, settings, machine, combinations)
    found = cached(key, graph, measure=measure)
    if found is not None:
        return found
    made = make_profile(
        graph, settings, combinations, machine=machine, fingerprint=key, progress=progress
    )
    cache.save(key, made)
    # Read back: the first plan and a repeated one then see the very same numbers.
    return cache.load(key) or made


def cached(key: str, graph: Graph, *, measure: bool) -> Profile | None:
    """The cached profile of that key, or None where it may be made.

    Raises:
        SettingsError: there is none and nothing may be measured.
    """
    found = cache.load(key)
    if found is None and not measure:
        raise SettingsError(
            f"expected the profile of {graph.name} in {cache.cache_folder()}, found none for these "
            "settings and this machine; plan again"
        )
    return found


def make_profile(
    graph: Graph,
    settings: PlanSettings,
    combinations: Sequence[Combination],
    *,
    machine: MachineModel | None = None,
    fingerprint: str = "",
    progress: Progress | None = None,
) -> Profile:
    """Pre-sample and time, without looking at the cache; gathering as `with_loading` has it."""
    work = settings.workload
    batches, hotness = draw_all(graph, settings, combinations, progress)
    shared, stacks = draw_sharing(graph, settings, combinations)
    by_key: dict[str, list[Combination]] = {}
    for combination in combinations:
        by_key.setdefault(combination.key(work.batch_size), []).append(combination)

    def batch_of(found: Combination) -> BatchProfile:
        if shared is None or not found.shared:
            return batches[-(-work.batch_size // found.num_ranks)]
        every_hop, whole = settings.dialect == "every_hop", batches[work.batch_size]
        part = part_of(whole, shared, found.num_ranks, every_hop=every_hop)
        return part_profile(whole, part)

    wanted = [TimedBatch(batch=batch_of(mine[0]), combinations=mine) for mine in by_key.values()]
    with Team(max(c.ranks for c in combinations)) as team:
        found = time_all(graph, settings, wanted, team, progress)
        timing = {
            key: with_loading(*each, machine, mine[0].ranks)
            for (key, mine), each in zip(by_key.items(), found, strict=True)
        }
        process = with_launcher(team.process)
    numbers = WorkloadProfile(
        graph_fingerprint=graph.fingerprint,
        sampler_fingerprint=fingerprint or codec.content_hash(sampler_of(settings))[:32],
        batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
        timing=timing,
        process=process,
        shared=shared,
        stacks=stacks,
    )
    return Profile(numbers=numbers, hotness=hotness)
