"""Apply cost terms, which change a rank's stage times after its backend has priced them.

TERMS lists them in order. The probe measures single, independent batches and reads without a
directory: stacks, dependent batches and caches that fill themselves are terms.
"""

from collections.abc import Callable

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import DIRECTORY_BYTES, SLOT_BYTES
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import MachineTable, lookup, readers
from gnnplan.planner.cost.stages.exchange_gpu import add_peer_exchange
from gnnplan.planner.cost.stages.gather_gpu import add_gpu_cache, gpu_look_up_seconds
from gnnplan.planner.cost.stages.lists_gpu import add_gpu_dependence, add_gpu_links, add_gpu_lists
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.stages import Stage

Term = Callable[[RankWork, RankTimes], RankTimes]

LOOK_UPS = 2
"""Random reads of the directory per row: a node's slot and the slot's last touch."""


def add_stack_rate(work: RankWork, times: RankTimes) -> RankTimes:
    """Price sampling in stacks by their measured ratio to single batches."""
    candidate = work.candidate
    if candidate.bulk_batches == 1 or not _samples_alone(candidate):
        return times
    missing = "stacks priced as single batches"
    return _scale_sampling(
        work, times, MachineTable.BULK_SAMPLE, missing, batches=candidate.bulk_batches
    )


def add_dependence_rate(work: RankWork, times: RankTimes) -> RankTimes:
    """Price sampling of dependent batches by their measured ratio to independent ones."""
    candidate = work.candidate
    if candidate.kappa is None or candidate.kappa <= 1 or not _samples_alone(candidate):
        return times
    missing = "priced as independent batches"
    return _scale_sampling(
        work, times, MachineTable.DEPENDENT_SAMPLE, missing, kappa=float(candidate.kappa)
    )


def add_cache_upkeep(work: RankWork, times: RankTimes) -> RankTimes:
    """Price a cache that fills itself: a look-up per row, two more copies per miss."""
    candidate, rows = work.candidate, work.rows
    if candidate.cache is None or not _samples_alone(candidate):
        return times
    total = sum(rows.rows.values())
    missed = total - rows.rows.get("cache", 0.0)
    copied = lookup(
        work.machine,
        MachineTable.GATHER,
        rows=max(1.0, missed),
        row_bytes=work.row_bytes,
        working_set_bytes=max(1.0, missed) * work.row_bytes,
        readers=readers(candidate) * candidate.threads.gather,
    )
    nodes = work.graph.num_nodes
    more = total * look_up_seconds(work.machine, candidate, nodes, rows.cache_rows)
    more += 2 * missed * copied.seconds / candidate.threads.gather
    gather = times.stages[Stage.GATHER]
    changed = StageTime(
        seconds=gather.seconds + more,
        spread=gather.spread,
        provenance=f"{gather.provenance}; derived: directory as relabelling, misses copied twice",
    )
    return times.with_stages({Stage.GATHER: changed})


TERMS: tuple[Term, ...] = (
    add_stack_rate,
    add_dependence_rate,
    add_cache_upkeep,
    add_gpu_lists,
    add_gpu_links,
    add_gpu_dependence,
    add_gpu_cache,
    add_peer_exchange,
)


def add_terms(work: RankWork, times: RankTimes) -> RankTimes:
    """Apply every term in turn."""
    for term in TERMS:
        times = term(work, times)
    return times


def look_up_seconds(
    machine: MachineModel, candidate: Candidate, num_nodes: int, cache_rows: float
) -> float:
    """Return the seconds of finding one row in a cache's directory.

    On cores it is two tables that are accessed at random, as relabelling is: slots of nodes, and
    touches of slots.
    """
    if candidate.gpus:
        return gpu_look_up_seconds(machine, candidate)
    directory = DIRECTORY_BYTES * num_nodes + SLOT_BYTES * cache_rows
    rate = lookup(
        machine, MachineTable.SAMPLE_VERTEX, table_bytes=directory, readers=readers(candidate)
    )
    return LOOK_UPS * rate.seconds


def _samples_alone(candidate: Candidate) -> bool:
    """Return whether a rank samples on cores, with no other rank's help."""
    alone = candidate.batching == "independent" and candidate.topology.policy != "partitioned"
    return alone and not candidate.gpus


def _scale_sampling(
    work: RankWork, times: RankTimes, name: MachineTable, missing: str, **coordinates: float
) -> RankTimes:
    """Multiply sampling by a measured ratio; without one, say what is missing."""
    sample = times.stages[Stage.SAMPLE]
    if name not in work.machine.tables:
        words = f"derived: {missing}; {sample.provenance}"
        changed = StageTime(seconds=sample.seconds, spread=sample.spread, provenance=words)
        return times.with_stages({Stage.SAMPLE: changed})
    rate = lookup(work.machine, name, **coordinates)
    changed = StageTime(
        seconds=sample.seconds * rate.seconds,
        spread=sample.spread + rate.spread,
        provenance=f"{rate.provenance} x ({sample.provenance})",
    )
    return times.with_stages({Stage.SAMPLE: changed})
