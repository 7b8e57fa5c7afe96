"""Find the cheapest changes that make a plan fit, and what was priced beside one that does.

A smaller batch moves frontiers by [A5], a smaller model its parts in proportion. Estimates say
"about"; a new plan decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import Budgets, size_text
from gnnplan.planner.cost.rates import topology_bytes
from gnnplan.planner.cost.request import (
    expected_vertices,
    held_row_bytes,
    row_bytes,
    seeds_per_rank,
    steps_per_epoch,
)
from gnnplan.planner.cost.stages.all_reduce import gradient_bytes
from gnnplan.planner.cost.systems import EpochWork
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.queries.rivals import RunnersUp, TodayCounts
from gnnplan.planner.search.choose import (
    PlacedCandidate,
    Priced,
    PricedCandidate,
    fullest_memory,
    lacking_memory,
    nearest_to_fit,
)
from gnnplan.planner.search.search import Search
from gnnplan.planner.workload import timing_key
from gnnplan.runtime.plan.schema import Alternative, MemoryUse

BATCH_PARTS = ("activations", "batches")
"""Parts of a rank that grow with the batch's vertices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Change, and the bytes that it takes off the memory that does not fit."""

    what: str
    saves_bytes: int
    enough: bool
    """Whether the memory would fit after this change alone."""


def find_remedies(search: Search, priced: Sequence[PlacedCandidate]) -> list[Remedy]:
    """List changes that lower the memory that the nearest candidate does not fit into.

    Changes that are enough come first, then those that save most; more memory is the last.
    """
    priced = lacking_memory(priced) or priced
    found = nearest_to_fit(priced)
    name, memory = fullest_memory(found)
    each = found.prediction.memory_bytes.get("rank0", memory)
    times = _ranks_within(name, found.candidate)
    saved = {
        **_smaller_batch(search, found, each, times),
        **_fewer_hidden(search, found, each, times),
        **_half_precision(search, found, memory, name),
        **_other_ranks(search, priced, name, memory),
    }
    return rank_remedies(saved, name, memory, search.request.budgets)


def _ranks_within(name: str, candidate: Candidate) -> int:
    """Count the ranks whose parts a memory's sum holds.

    A rank's own sum holds one; a host's those of its cores, and of GPUs no more than processes.
    """
    if name.startswith("rank"):
        return 1
    return 0 if candidate.gpus else candidate.num_ranks // candidate.hosts


def _smaller_batch(
    search: Search, found: PlacedCandidate, each: MemoryUse, times: int
) -> dict[str, int]:
    """Halve the global batch: its parts shrink with its expected vertices [A5]."""
    batch = search.request.workload.batch_size
    if batch < 2:
        return {}
    seeds = seeds_per_rank(batch, found.candidate.num_ranks)
    p = search.hotness[seeds].features
    whole = expected_vertices(p, 1.0)
    ratio = expected_vertices(p, 0.5) / whole if whole > 0 else 1.0
    size = sum(each.parts.get(part, 0) for part in BATCH_PARTS)
    return {f"--batch-size {batch // 2}": round(times * size * (1.0 - ratio))}


def _fewer_hidden(
    search: Search, found: PlacedCandidate, each: MemoryUse, times: int
) -> dict[str, int]:
    """Halve the hidden columns, and with them the activations beyond the input rows."""
    work, graph = search.request.workload, search.request.graph
    if work.hidden < 2:
        return {}
    seeds = seeds_per_rank(work.batch_size, found.candidate.num_ranks)
    sizes = [v.mean for v in search.request.profile.batch(seeds).vertices]
    # Layer l of L works on the vertices of hop L - l; the outermost reads the features.
    outer = sizes[-1] * graph.feature_dim
    inner = sum(sizes[:-1]) * work.hidden
    share = inner / (inner + outer) if inner + outer > 0 else 0.0
    parts = each.parts
    size = parts.get("activations", 0) * share / 2 + parts.get("model and optimizer", 0) / 2
    return {f"--hidden {work.hidden // 2}": round(times * size)}


def _half_precision(
    search: Search, found: PlacedCandidate, memory: MemoryUse, name: str
) -> dict[str, int]:
    graph = search.request.graph
    if graph.feature_dtype != "float32":
        return {}
    if name.startswith("rank"):
        size = memory.parts.get("own rows", 0)
    else:
        copies = found.copies // found.candidate.hosts
        each = held_row_bytes(graph, found.candidate)
        size = memory.parts.get("features", 0) + copies * each
    how = "graph import --feature-dtype bfloat16"
    return {f"features in bfloat16 ({how}, which rounds them)": size // 2}


def _other_ranks(
    search: Search, priced: Sequence[PlacedCandidate], name: str, memory: MemoryUse
) -> dict[str, int]:
    """Take other numbers of devices that were priced and need less, and twice as many."""
    found: dict[str, int] = {}
    for other in priced:
        theirs = other.prediction.memory_bytes.get(name)
        if theirs is not None and theirs.total < memory.total:
            what = f"--devices {other.candidate.num_ranks}"
            found[what] = max(found.get(what, 0), memory.total - theirs.total)
    asked, machine = search.settings.devices, search.request.machine
    more = 2 * (asked or 0)
    most = len(machine.gpus) or machine.num_cores
    if name.startswith("rank") and asked is not None and more <= most:
        # Not profiled: half the seeds per rank are as half the batch.
        halved = _smaller_batch(search, nearest_to_fit(priced), memory, 1)
        found[f"--devices {more}"] = sum(halved.values())
    return found


def rank_remedies(
    saved: Mapping[str, int], name: str, memory: MemoryUse, budgets: Budgets
) -> list[Remedy]:
    """Rank changes by the bytes that each saves: those that are enough, the others, more memory."""
    ways = [
        Remedy(what=what, saves_bytes=size, enough=size >= -memory.headroom)
        for what, size in saved.items()
        if size > 0
    ]
    ways.sort(key=lambda way: (not way.enough, -way.saves_bytes))
    return [*ways, _more_memory(name, memory, budgets)]


def _more_memory(name: str, memory: MemoryUse, budgets: Budgets) -> Remedy:
    """Give more memory: a higher limit, or a larger machine."""
    option = "--device-memory" if name.startswith("rank") else "--host-memory"
    limited = budgets.device_bytes if name.startswith("rank") else budgets.host_bytes
    what = option if limited is not None else f"a machine with more memory in {name}"
    return Remedy(
        what=f"{what} of {size_text(memory.total)}", saves_bytes=-memory.headroom, enough=True
    )


def add_remedies(error: PlanDoesNotFit, find: Callable[[], Sequence[Remedy]]) -> PlanDoesNotFit:
    """Return a refusal with the remedies; what memory is not short of has none."""
    if not error.constraint:
        return error
    return PlanDoesNotFit(
        f"{error}; {advice(find())}",
        constraint=error.constraint,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
    )


def advice(ways: Sequence[Remedy]) -> str:
    """Write the remedies in one line.

    >>> advice([Remedy(what="--hidden 8", saves_bytes=2_000_000, enough=False)])
    'ways out: --hidden 8 saves about 2.0 MB (not enough alone)'
    """
    words: list[str] = []
    for way in ways:
        alone = "" if way.enough else " (not enough alone)"
        verb = "adds" if " of " in way.what else "saves about"
        words.append(f"{way.what} {verb} {size_text(way.saves_bytes)}{alone}")
    return f"ways out: {'; '.join(words)}"


def find_runners_up(
    priced: Sequence[Priced],
    chosen: Priced,
    *,
    asked: bool,
    name_of: Callable[[Priced], str],
    why: Callable[[Priced, Priced], str],
) -> RunnersUp:
    """Find the best candidate of each number of ranks, and the plainest that may be chosen.

    Args:
        priced: candidates of the chosen one's search.
        chosen: candidate that the plan takes, which stands for its number of ranks.
        asked: whether the number of ranks was given.
        name_of: returns the words for a candidate.
        why: returns why a candidate lost against another.
    """
    best = {_ranks_words(chosen): chosen}
    for p in sorted(priced, key=lambda p: (not p.eligible, p.seconds)):
        best.setdefault(_ranks_words(p), p)

    def told(p: Priced) -> Alternative:
        step = p.seconds if p.eligible else None
        lost = p.candidate != chosen.candidate
        return Alternative(name=name_of(p), step_seconds=step, why=why(p, chosen) if lost else "")

    fits = [p for p in (*priced, chosen) if p.eligible]
    return RunnersUp(
        by_ranks={words: told(p) for words, p in best.items()},
        plainest=told(min(fits, key=_plainness)) if fits else None,
        asked=asked,
    )


def _ranks_words(p: PricedCandidate) -> str:
    hosts = p.candidate.hosts
    return f"{p.candidate.num_ranks} on {hosts} hosts" if hosts > 1 else f"{p.candidate.num_ranks}"


def _plainness(p: PricedCandidate) -> tuple[int, ...]:
    """Return a key that is least for few ranks that read all from the host, batches in line."""
    c = p.candidate
    return (
        c.num_ranks,
        c.policy != "none",
        c.topology.policy != "host",
        c.batching != "independent",
        c.bulk_batches,
        c.kappa or 1,
        c.threads.sample,
        -c.threads.compute,
    )


HIT_SHARES = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of the nodes, hottest first, whose hit rates are kept of a search."""


def count_for_today(search: Search, chosen: PlacedCandidate) -> TodayCounts | None:
    """Count what a framework of today would do on the plan's GPUs, or on cores.

    There in one process, and in as many as the plan's ranks where whole batches were not profiled.
    None where such batches were not either.
    """
    request, gpus = search.request, len(chosen.candidate.gpus)
    batch_size, known = request.workload.batch_size, request.profile.timing
    ranks, hosts = gpus or 1, chosen.candidate.hosts if gpus else 1
    if timing_key(seeds_per_rank(batch_size, ranks), hosts=hosts) not in known:
        ranks, hosts = chosen.candidate.num_ranks, chosen.candidate.hosts
    seeds = seeds_per_rank(batch_size, ranks)
    timing, hotness = known.get(timing_key(seeds, hosts=hosts)), search.hotness
    if timing is None or seeds not in hotness:
        return None
    batch, graph = request.profile.batch(seeds), request.graph
    threads = 1 if gpus else max(1, request.machine.num_cores // (2 * ranks))
    vertices = [v.mean for v in batch.vertices]
    p = np.sort(hotness[seeds].features)[::-1].astype(np.float64)
    found = np.cumsum(p)[[max(0, round(share * p.size) - 1) for share in HIT_SHARES]]
    return TodayCounts(
        work=EpochWork(
            batches=steps_per_epoch(graph.num_train, batch_size),
            input_rows=vertices[-1],
            edges=sum(each.mean for each in batch.edges),
            expanded=sum(vertices[:-1]) if request.every_hop else vertices[-2],
            row_bytes=row_bytes(graph),
            compute_seconds=timing.compute_seconds(ranks=ranks // hosts, threads=threads)
            + timing.optimizer.at(ranks=ranks // hosts, threads=threads),
            gradient_bytes=gradient_bytes(timing.num_parameters),
            reduce_seconds=chosen.prediction.stages.get("all_reduce", 0.0),
        ),
        gpus=gpus,
        processes=ranks,
        num_nodes=graph.num_nodes,
        list_bytes=topology_bytes(graph),
        hit_shares=list(HIT_SHARES),
        hit_rates=[float(each / max(found[-1], 1e-300)) for each in found],
    )
