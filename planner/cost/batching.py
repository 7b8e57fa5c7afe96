"""What stacks, dependent batches and a cache that fills itself add to a rank's seconds and bytes.

The probe measures batches that are sampled one by one and reads without a directory. The tables
`bulk_sample` (seconds of a batch in a stack of k over those of one alone) and `dependent_sample`
(of a batch that hangs together with kappa - 1 others over an independent one's) come with the
profile (`planner.profile.draws`); without them such batches are priced as single independent
ones, and the plan says so.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.candidate import Candidate, RankRows
from planner.cost import memory
from planner.cost.backends.cpu import RankSeconds
from planner.cost.memory import SLOT_BYTES, TRAINING_BATCHES
from planner.cost.rates import lookup, readers
from planner.machine.model import MachineModel
from planner.workload import BatchProfile
from runtime.sampling.bulk.memory import HEADROOM, BulkBytes

DIRECTORY_BYTES = 4
"""Of each node: the slot its row is in."""
STAGING = 1.25
"""Rows of room in the buffer that misses are read into, over a batch's."""
LOOK_UPS = 2
"""Places of the directory that a row asks for: its slot by its node, its last touch by its slot."""
SPARE = 1.05
"""Batches vary: a stack's bytes over the pilot's."""
IN_USE = 1
"""Batches in use beside those ready ahead."""


def stack_bytes(pilot: BulkBytes, bulk: int, depth: int) -> int:
    """Bytes that let the runtime stack k batches while earlier ones are still in use.

    B = table + max_m (1.15 (k + 2 (d + 1)) batch_m + scratch_m), and 5% for batches that vary

    Args:
        pilot: bytes at each moment of sampling a stack.
        bulk: k.
        depth: d, batches ready ahead; each stack gives d + 1 batches arrays of their own, and as
            many may be left of the stack before (`runtime.loader.bulk`).

    Source: `runtime.sampling.bulk.memory`, solved for the budget.

    >>> stack_bytes(BulkBytes(table_bytes=1000, moments=((100.0, 50),)), 4, 2)
    2310
    """
    held = HEADROOM * (bulk + 2 * (depth + IN_USE))
    peak = max(held * batch + scratch for batch, scratch in pilot.moments)
    return int(SPARE * (pilot.table_bytes + peak))


def choice_parts(
    candidate: Candidate, batch: BatchProfile, num_nodes: int, dim: int
) -> dict[str, int]:
    """Private bytes that the choices take before a cache keeps any row."""
    found: dict[str, int] = {}
    if candidate.bulk_batches > 1:
        found["stack of batches"] = candidate.bulk_bytes
    if candidate.cache is not None:
        rows = memory.tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
        found["cache directory"] = DIRECTORY_BYTES * num_nodes + round(STAGING * rows * 4 * dim)
    return found


def with_choices(
    rank: RankSeconds,
    candidate: Candidate,
    machine: MachineModel,
    rows: RankRows,
    batch: BatchProfile,
    num_nodes: int,
    row_bytes: int,
) -> RankSeconds:
    """A rank's seconds with its stacks and its cache."""
    if candidate.bulk_batches > 1:
        rank = _stacked(rank, candidate, machine)
    if candidate.kappa is not None and candidate.kappa > 1:
        rank = _dependent(rank, candidate.kappa, machine)
    if candidate.cache is not None:
        rank = _cached(rank, candidate, machine, rows, num_nodes, row_bytes)
    return rank


def _stacked(rank: RankSeconds, candidate: Candidate, machine: MachineModel) -> RankSeconds:
    words = dict(rank.provenance)
    if "bulk_sample" not in machine.tables:
        words["sample"] = f"derived: stacks priced as single batches; {words['sample']}"
        return replace(rank, provenance=words)
    rate = lookup(machine, "bulk_sample", batches=candidate.bulk_batches)
    words["sample"] = f"{rate.provenance} x ({words['sample']})"
    spreads = {**rank.spreads, "sample": rank.spreads["sample"] + rate.spread}
    sample = rank.sample * rate.seconds
    return replace(rank, sample=sample, provenance=words, spreads=spreads)


def _dependent(rank: RankSeconds, kappa: int, machine: MachineModel) -> RankSeconds:
    """Numbers that change little by little are mixed from two, by the normal law."""
    words = dict(rank.provenance)
    if "dependent_sample" not in machine.tables:
        words["sample"] = f"derived: priced as independent batches; {words['sample']}"
        return replace(rank, provenance=words)
    rate = lookup(machine, "dependent_sample", kappa=float(kappa))
    words["sample"] = f"{rate.provenance} x ({words['sample']})"
    spreads = {**rank.spreads, "sample": rank.spreads["sample"] + rate.spread}
    return replace(rank, sample=rank.sample * rate.seconds, provenance=words, spreads=spreads)


def look_up_seconds(
    machine: MachineModel, candidate: Candidate, num_nodes: int, cache_rows: float
) -> float:
    """Of one row in the directory of a cache of so many rows.

    It is two tables that are read and written at random, each as relabelling is: the slots of
    nodes, and the touches of slots.
    """
    directory = DIRECTORY_BYTES * num_nodes + SLOT_BYTES * cache_rows
    asked = lookup(machine, "sample_vertex", table_bytes=directory, readers=readers(candidate))
    return LOOK_UPS * asked.seconds


def _cached(
    rank: RankSeconds,
    candidate: Candidate,
    machine: MachineModel,
    rows: RankRows,
    num_nodes: int,
    row_bytes: int,
) -> RankSeconds:
    """Each row is looked up in the directory; one that missed is copied twice more."""
    total = sum(rows.rows.values())
    missed = total - rows.rows.get("cache", 0.0)
    copied = lookup(
        machine,
        "gather",
        rows=max(1.0, missed),
        row_bytes=row_bytes,
        working_set_bytes=max(1.0, missed) * row_bytes,
        readers=readers(candidate) * candidate.threads.gather,
    )
    more = total * look_up_seconds(machine, candidate, num_nodes, rows.cache_rows)
    more += 2 * missed * copied.seconds / candidate.threads.gather
    words = f"{rank.provenance['gather']}; derived: directory as relabelling, misses copied twice"
    return replace(rank, gather=rank.gather + more, provenance={**rank.provenance, "gather": words})


def ordered_seconds(
    candidate: Candidate, loader: Mapping[str, float], trainer_seconds: float
) -> float:
    """Least seconds per step where loader threads must take a stage in turn.

    A cache takes its batches in order, so only one thread gathers. A stack of k batches is drawn
    by one thread while at most d batches are ready: T >= t + (k s + g - d t) / k.

    Args:
        candidate: k, d and the cache.
        loader: seconds of each loader stage; s is sample, g all others.
        trainer_seconds: t.

    >>> from planner.candidate import list_cores, make_candidate
    >>> from runtime.plan import Threads
    >>> one = make_candidate(list_cores(1), threads=Threads(sample=1))
    >>> ordered_seconds(replace(one, bulk_batches=4), {"sample": 1.0, "gather": 0.0}, 1.0)
    1.5
    """
    if candidate.threads.sample == 0:
        return 0.0
    sample = loader.get("sample", 0.0)
    rest = sum(loader.values()) - sample
    least = 0.0
    if candidate.cache is not None:
        least = loader.get("gather", 0.0)
    if candidate.bulk_batches > 1:
        ahead = candidate.prefetch_depth * trainer_seconds
        waits = max(0.0, candidate.bulk_batches * sample + rest - ahead) / candidate.bulk_batches
        least = max(least, sample, trainer_seconds + waits)
    return least
