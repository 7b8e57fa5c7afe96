"""Apply cost terms, which change a rank's stage times after its backend has priced them.

TERMS lists them in order. The probe measures single, independent batches and reads without a
directory: stacks, dependent batches and caches that fill themselves are terms.

So are lists that a GPU lays out whole, and its dependent numbers. Neighbours preferred by place are
drawn from the law of a whole list. A dependent draw mixes two words per candidate: both become
normal numbers, and their sum a word again (DEC-111; `runtime.sampling.gpu.rng`). LABOR has a
candidate per neighbour that its lists hold, layers one per distinct neighbour, of which that is an
upper bound. The host's starts are `stages.host`'s.
"""

from collections.abc import Callable
from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import DIRECTORY_BYTES, SLOT_BYTES
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import INDEX_BYTES, MachineTable, lookup, readers
from gnnplan.planner.cost.stages.exchange_gpu import add_peer_exchange
from gnnplan.planner.cost.stages.gather_gpu import (
    add_gpu_cache,
    copy_seconds_per_byte,
    gpu_look_up_seconds,
    memory_seconds_per_byte,
)
from gnnplan.planner.cost.stages.host import MIX_STARTS, mix_starts, start_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.table import TableName
from gnnplan.runtime.sampling.registry import sampler_or_unknown
from gnnplan.runtime.stages import Stage

Term = Callable[[RankWork, RankTimes], RankTimes]

LOOK_UPS = 2
"""Random reads of the directory per row: a node's slot and the slot's last touch."""
MIXED_BYTES = 20 * MIX_STARTS
"""Bytes per candidate that kernels of dependent numbers read and write: two numbers of 64 bits,
some a mask."""
LAID_BYTES = 150
"""Bytes per entry of a list that is laid out with its law and running sums."""
LINK_STARTS = (28, 14)
"""Starts of looking links up and drawing their negatives: once, and per hop of passing them over.
"""


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


def mixed_seconds(
    candidates: float, kernels: float, *, kernel_seconds: float, byte_seconds: float
) -> tuple[float, float]:
    """Return the seconds to launch, and those to compute, one batch's dependent numbers.

    K t_k and 9220 C b: K kernels, C candidates over all hops, t_k of a launch, b seconds per byte
    of copies within the GPU's memory.

    Source: derived from the operations of `runtime.sampling.gpu.rng`.

    >>> a, b = mixed_seconds(1e6, 1000, kernel_seconds=1e-5, byte_seconds=1e-12)
    >>> round(1e3 * a, 2), round(1e3 * b, 2)
    (10.0, 9.22)
    """
    return kernels * kernel_seconds, MIXED_BYTES * candidates * byte_seconds


def listed_seconds(
    entries: float, *, read_seconds_per_byte: float, byte_seconds: float
) -> tuple[float, float]:
    """Return the seconds to read whole lists, and those to lay them out in the GPU's memory.

    4 E c and 150 E b: E entries of all lists that a batch expands, c seconds per byte of a stream
    from where the lists are, b of copies within the GPU's memory.

    Source: derived from the operations of `runtime.sampling.gpu.locality`.

    >>> listed_seconds(1e6, read_seconds_per_byte=1e-10, byte_seconds=1e-12)
    (0.0004, 0.00015)
    """
    return INDEX_BYTES * entries * read_seconds_per_byte, LAID_BYTES * entries * byte_seconds


def add_gpu_dependence(work: RankWork, times: RankTimes) -> RankTimes:
    """Add the numbers of dependent batches to a GPU's sampling, unless they were timed there."""
    machine, candidate = work.machine, work.candidate
    kernels = mix_starts(work.parameters, len(work.batch.edges), work.sampler)
    if not (kernels and work.draws_on_gpu) or work.is_timed_with("kappa"):
        return times
    started, computed = mixed_seconds(
        _entries(work),
        kernels / candidate.bulk_batches,
        kernel_seconds=start_seconds(machine),
        byte_seconds=memory_seconds_per_byte(machine, candidate),
    )
    words = "derived: two normal numbers per neighbour that a list holds"
    return slower_sampling(times, words, host=started, memory=computed)


def add_gpu_lists(work: RankWork, times: RankTimes) -> RankTimes:
    """Add the lists that a preference for local neighbours reads whole to a GPU's sampling."""
    machine, candidate = work.machine, work.candidate
    if not work.draws_on_gpu or not sampler_or_unknown(work.sampler).prefers_local:
        return times
    near, own = memory_seconds_per_byte(machine, candidate), work.list_places.get("own", 0.0)
    far = copy_seconds_per_byte(machine, candidate)[work.rank]
    (near_read, laid), (far_read, _) = (
        listed_seconds(_entries(work), read_seconds_per_byte=each, byte_seconds=near)
        for each in (near, far)
    )
    words = "derived: every list that a hop expands is read whole and laid out"
    memory, links = laid + own * near_read, (1 - own) * far_read
    if work.timing.gpu is not None and work.is_timed_with("factor"):  # but for where lists lie
        words = "measured: every list that a hop expands is read whole and laid out"
        memory, links = 0.0, links if work.timing.gpu.topology == "replicated" else 0.0
    return slower_sampling(times, words, memory=memory, links=links)


def add_gpu_links(work: RankWork, times: RankTimes) -> RankTimes:
    """Add the lists in which a GPU looks up links to leave out and edges that are no negatives.

    D d entries are laid out, and n q d_c read, of lists of d entries: D links of the step, twice
    where both directions are left out; n links of the rank, q negatives each, whose candidates have
    d_c entries, the graph's mean or the destinations' own.
    """
    machine, candidate, links = work.machine, work.candidate, work.workload.links
    if not work.draws_on_gpu or work.graph.task != "link":
        return times
    near, on_host = memory_seconds_per_byte(machine, candidate), candidate.topology.policy == "host"
    far = copy_seconds_per_byte(machine, candidate)[work.rank] if on_host else near
    batch_size, hops = work.workload.batch_size, len(work.batch.edges)
    mean = work.graph.num_edges / max(1, work.graph.num_nodes)
    directions = {"none": 0, "forward": 1, "both": 2}[links.exclude]
    looked_up = directions * batch_size * _list_length(work)
    drawn = batch_size / candidate.num_ranks * links.num_negatives
    drawn *= mean if links.negatives == "uniform" else _list_length(work)
    read, laid = listed_seconds(looked_up, read_seconds_per_byte=far, byte_seconds=near)
    read += INDEX_BYTES * drawn * far
    near_seconds, link_seconds = (laid, read) if on_host else (laid + read, 0.0)
    started = start_seconds(machine) * (LINK_STARTS[0] + LINK_STARTS[1] * hops)
    words = (
        "derived: the step's links are looked up in their destinations' lists, and negatives too"
    )
    return slower_sampling(times, words, host=started, memory=near_seconds, links=link_seconds)


def _list_length(work: RankWork) -> float:
    """Return the mean length of the lists that a batch expands, or else of all lists."""
    reached = [v.mean for v in work.batch.vertices[:-1]]
    expanded = sum(reached) if work.every_hop else reached[-1]
    if work.batch.list_entries > 0:
        return work.batch.list_entries / max(1.0, expanded)
    return work.graph.num_edges / max(1, work.graph.num_nodes)


def _entries(work: RankWork) -> float:
    """Return the entries of the lists that a batch expands; as drawn where none were counted."""
    counted = work.batch.read_edges or work.batch.list_entries
    return max(counted, sum(e.mean for e in work.batch.edges))


def slower_sampling(
    times: RankTimes, words: str, *, host: float = 0.0, memory: float = 0.0, links: float = 0.0
) -> RankTimes:
    """Return times whose sampling takes longer on the host, in the GPU's memory and on links."""
    sample, device = times.stages[Stage.SAMPLE], times.device
    changed = StageTime(
        seconds=sample.seconds + host + memory + links,
        spread=sample.spread,
        provenance=f"{sample.provenance}; {words}",
    )
    busy = replace(
        device,
        host=device.host + host,
        memory=device.memory + memory,
        links=device.links + links,
    )
    return replace(times.with_stages({Stage.SAMPLE: changed}), device=busy)


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
    work: RankWork, times: RankTimes, name: TableName, missing: str, **coordinates: float
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
