"""Tripathy et al.'s matrix-based sampling on Perlmutter, from presets and formulas 4.2 to 4.9.

What is priced is their system, not ours: batches are lists in which a vertex stands as often as it
was drawn (formulas 4.4 [M11]), P = QA holds whole adjacency rows (4.2), and every pass of NORM and
SAMPLE goes over all of P (4.3). The adjacency is on every GPU, features lie in p/c block rows.
"""

import functools
import itertools
from dataclasses import dataclass

from gnnplan.planner.cost.backends.grid import fetch_words, largest_replication, replications
from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce
from gnnplan.planner.cost.stages.gather_gpu import find_routes, memory_seconds_per_byte
from gnnplan.planner.cost.stages.sample import KERNELS_PER_HOP
from gnnplan.planner.graph_presets import graph_preset
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import byte_seconds
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.analytic import DegreeClasses, lognormal_classes, mean_drawn
from gnnplan.planner.profile.operations import LayerShape
from tests.benchmarks.published_parts import chosen, sage_seconds
from tests.benchmarks.published_tables import (
    BATCHES,
    MATRIX_GRAPHS,
    TRIPATHY_BATCH,
    TRIPATHY_FANOUTS,
    TRIPATHY_HIDDEN,
)

FEWEST, MOST = 4, 128
"""GPUs between which efficiencies are taken: a node's, and the most that the abstract names. The
numbers behind the published ones are not in the text at hand."""
FLOAT_BYTES = 4
ENTRY_BYTES = 24
"""w: an entry of P as released, two 64-bit indices and a double (formulas 4.9)."""
STORED_BYTES, OFFSET_BYTES = 8, 8
"""An entry of A in memory, and where a row of it begins (formulas 4.9)."""
PASSES_BYTES = STORED_BYTES + ENTRY_BYTES + 16 + 16 + 16
"""Derived, per entry of P: read from A, written, summed by row (index and value), divided (read and
written), summed up along the row (read and written)."""
GPUS_PER_HOST = 4
CALLS = 3
"""All-to-alls of one fetch: counts, ids, rows (formulas 4.8)."""
USABLE = 0.9
"""Share of a GPU's memory that may be planned."""
ACTIVATIONS = 3
"""Copies of the hidden rows: kept, made, and their gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A batch as stacked matrices: nothing deduplicated, vertices carried along."""

    rows: list[float]
    """Up to each hop, seeds first."""
    drawn: list[float]
    """At each hop."""
    entries: list[float]
    """Non-zeros of P at each hop: whole neighbour lists of all rows."""


def lists_of(classes: DegreeClasses, seeds: float, fanouts: tuple[int, ...]) -> Lists:
    """Expected sizes; a drawn vertex is of a class by its share of the edges.

    >>> from gnnplan.planner.profile.analytic import lognormal_classes
    >>> found = lists_of(lognormal_classes(10**6, 10**9, 0.1), 1024, (15, 10, 5))
    >>> [round(x) for x in found.rows]  # formulas 4.4 [M11], with the vertices themselves
    [1024, 16384, 180224, 1081344]
    """
    share = classes.nodes * classes.weight
    share = share / share.sum()
    held = seeds * classes.nodes / classes.nodes.sum()
    rows, drawn, entries = [seeds], list[float](), list[float]()
    for fanout in fanouts:
        entries.append(float(held @ classes.degree))
        drawn.append(float(held @ mean_drawn(classes.degree, fanout)))
        held = held + drawn[-1] * share
        rows.append(float(held.sum()))
    return Lists(rows=rows, drawn=drawn, entries=entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Seconds of one batch on each GPU."""

    sample: float
    fetch: float
    local: float
    compute: float
    all_reduce: float

    @property
    def total(self) -> float:
        """In line: bulk-synchronous phases."""
        return self.sample + self.fetch + self.local + self.compute + self.all_reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledEpoch:
    """An epoch of matrix-based sampling with SAGE."""

    step: Step
    steps: int
    replication: int
    most: int
    """The largest c that fits."""
    bulk: int
    """k: a rank's batches that are sampled at once."""

    @property
    def seconds(self) -> float:
        """Of the epoch."""
        return self.steps * self.step.total


def most_gpus(name: str, efficiency: float) -> int:
    """The most GPUs at which whole batches allow a published efficiency, to its two digits.

    >>> most_gpus("products", 0.88), most_gpus("protein", 0.61)  # 196 / (32 * 7) = 0.875
    (32, 128)
    """
    counts = [FEWEST << i for i in range((MOST // FEWEST).bit_length())]
    batches = BATCHES[name]
    allowed = [p for p in counts if batches / (p * -(-batches // p)) >= efficiency - 0.005]
    return max(allowed)


@functools.cache
def _lists(name: str) -> Lists:
    nodes, edges, _ = MATRIX_GRAPHS[name]
    classes = lognormal_classes(nodes, edges, graph_preset(name).law.spread)
    return lists_of(classes, TRIPATHY_BATCH, TRIPATHY_FANOUTS)


@functools.cache
def _machine(hosts: int) -> MachineModel:
    return load_preset(f"perlmutter:{hosts}")


@functools.cache
def matrix_epoch(name: str, gpus: int, copies: int | None = None) -> ScaledEpoch:
    """An epoch on some of Perlmutter's GPUs.

    Args:
        name: of `MATRIX_GRAPHS`.
        gpus: p, whole nodes.
        copies: c; None: the largest that fits beside the largest k.

    P of k batches and rows of c copies share a GPU's memory. As published, both are as high as it
    allows; k is raised first (formulas 4.9).
    """
    machine, lists = _machine(gpus // 4), _lists(name)
    nodes, edges, width = MATRIX_GRAPHS[name]
    one = chosen(machine, 4)
    byte = memory_seconds_per_byte(machine, one)
    kernel = machine.table("gpu_kernel").at(ranks=1.0)
    depth = len(lists.drawn)
    entries = sum(lists.entries)
    widths = [width, TRIPATHY_HIDDEN, TRIPATHY_HIDDEN, graph_preset(name).classes]
    shapes = [
        LayerShape(
            num_src=lists.rows[depth - layer],
            num_dst=lists.rows[depth - layer - 1],
            num_edges=lists.drawn[depth - layer - 1],
            in_dim=widths[layer],
            out_dim=widths[layer + 1],
            inputs=layer == 0,
            heads=1,
        )
        for layer in range(depth)
    ]
    parameters = sum(2 * a * b for a, b in itertools.pairwise(widths))
    reduced = gpu_all_reduce(machine, chosen(machine, gpus), float(FLOAT_BYTES * parameters))
    memory = next(m.capacity_bytes for m in machine.memories if m.kind == "device")
    row_bytes = width * FLOAT_BYTES
    hidden = sum(lists.rows[:-1]) * TRIPATHY_HIDDEN * FLOAT_BYTES
    batch = ENTRY_BYTES * (entries + sum(lists.drawn))
    other = lists.rows[-1] * row_bytes + ACTIVATIONS * hidden
    topology = edges * STORED_BYTES + nodes * OFFSET_BYTES
    free = memory * USABLE - topology - other - nodes * row_bytes / gpus
    steps = -(-BATCHES[name] // gpus)
    bulk = max(1, min(steps, int(free // batch)))
    most = largest_replication(
        gpus,
        memory * USABLE,
        nodes * row_bytes,
        topology,
        other_bytes=bulk * batch + other,
        topology_partitioned=False,
    )
    best = copies or max(replications(gpus, max(1, most)))
    sample = entries * PASSES_BYTES * byte + KERNELS_PER_HOP * depth * kernel / bulk
    step = Step(
        sample=sample,
        fetch=fetch_seconds(machine, gpus, best, lists.rows[-1], width),
        local=2 * lists.rows[-1] * row_bytes * byte,  # read at random places, written in a row
        compute=sage_seconds(machine, shapes),
        all_reduce=reduced.seconds,
    )
    return ScaledEpoch(step=step, steps=steps, replication=best, most=max(1, most), bulk=bulk)


def fetch_seconds(
    machine: MachineModel, gpus: int, copies: int, inputs: float, width: int
) -> float:
    """All-to-allv in a process column: its ranks in one host over NVLink, the others by the NIC."""
    ranks = gpus // copies
    if ranks == 1:
        return 0.0
    moved = fetch_words(inputs, width, gpus, copies) * FLOAT_BYTES
    mates = max(1, GPUS_PER_HOST // copies) - 1
    near = mates / (ranks - 1)
    peers = max(byte_seconds(find_routes(machine, chosen(machine, 4)).peer).values())
    message = machine.table("gpu_message").at(ranks=4.0)
    inside, outside, wait = near * moved * peers, 0.0, mates * message
    if near < 1:
        nic = min(
            x.bandwidth_bytes_per_second
            for x in machine.links
            if x.name.startswith("nic") and x.name.endswith((".out", ".in"))
        )
        outside = (1 - near) * moved * GPUS_PER_HOST / nic  # all of a host's GPUs fetch at once
        wait += (ranks - 1 - mates) * machine.table("host_message").at(ranks=1.0)
    return max(inside, outside) + CALLS * wait
