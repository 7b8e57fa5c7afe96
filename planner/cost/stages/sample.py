"""Price stage `sample`: the elapsed seconds per batch of drawing neighbours and relabelling them.

Each kernel of a GPU's sampler is a launch by the host. Over one to three hops L and stacks of one
to eight batches k, with p batches made ahead, the runtime's samplers launch

    a batch by itself       a + b L
    the same as a graph     g + h L: its replay, and what is copied in and out
    a batch of a stack      (c + d L) / k + e + f L + 7 min(k, p + 1) / k

The last batches of a stack get tensors of their own. tests/planner/cost/stages/test_gpu_launches.py
counts them again. That a stack waits for the GPU at every hop is not priced.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gnnplan.planner.candidate import Candidate
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, sampler_or_unknown


def sample_seconds(
    edges: float, vertices: float, seconds_per_edge: float, seconds_per_vertex: float
) -> float:
    """Return the seconds one thread takes to sample one batch; as many core-seconds.

    T = E c_e + V c_v: E edges drawn over all hops, V distinct vertices relabelled, c_e and c_v
    seconds of each at this graph's size and number of samplers.

    Source: both rates are measured by the probe with the real sampler on generated graphs.

    >>> sample_seconds(edges=1e6, vertices=2e5, seconds_per_edge=10e-9, seconds_per_vertex=50e-9)
    0.02
    """
    return edges * seconds_per_edge + vertices * seconds_per_vertex


NEIGHBOUR_BYTES = 4
"""Least bytes of one read of a neighbour's id; links move a whole transaction."""
OFFSETS_BYTES = 16
"""Bytes of a list's begin and end."""
HASH_READS = 3
"""Random accesses to the relabelling table per drawn edge: look up, insert, read back."""
LIST_PASSES = 2
"""Passes over a list by samplers that read whole lists: one counts, one writes."""
SCAN_SECONDS = 5e-11
"""A GPU's seconds of deciding on one neighbour of a list, both passes together (DEC-114)."""
KERNELS_PER_HOP = 8
"""Kernels per hop of systems whose code is not at hand: draw, prefix sum, hash, compact."""


def gpu_sample_seconds(
    edges: float,
    expanded: float,
    launches: float,
    *,
    neighbour_seconds: float,
    offsets_seconds: float,
    hash_seconds: float,
    kernel_seconds: float,
    lists_seconds: float | None = None,
) -> float:
    """Return the seconds a GPU takes to draw one batch.

    T = E c_n + X c_o + 3 E c_h + K t_k: E edges drawn, X vertices whose lists are read, K kernels;
    c_n and c_o seconds of a neighbour's id and of a list's two offsets, read at random from where
    the topology lies; c_h of an access to the GPU's own memory; t_k of one launch.

    A sampler that decides on every neighbour takes `lists_seconds` in place of E c_n.

    Source: docs/formulas.md 2.4; the relabelling term is derived.

    >>> round(1e3 * gpu_sample_seconds(1e6, 1e5, 16, neighbour_seconds=5e-9, offsets_seconds=5e-9,
    ...     hash_seconds=1e-10, kernel_seconds=1e-5), 2)
    5.96
    """
    chosen = edges * neighbour_seconds if lists_seconds is None else lists_seconds
    reads = chosen + expanded * offsets_seconds
    return reads + HASH_READS * edges * hash_seconds + launches * kernel_seconds


def scan_seconds(entries: float, lists: float, list_seconds: float) -> float:
    """Return a GPU's seconds of reading whole lists and deciding on each of their neighbours.

    2 X c(4 D / X) + D c_d: X lists of D neighbours in all, each list read twice as one row.

    >>> round(1e3 * scan_seconds(15e6, 1e5, 1e-8), 2)
    2.75
    """
    return LIST_PASSES * lists * list_seconds + entries * SCAN_SECONDS


OWN_TENSORS = 7
"""Copies that take a batch out of its stack."""
COUNTED = "kernels counted in the sampler's code"


@dataclass(frozen=True, slots=True)
class LaunchLaw:
    """Coefficients (constant, per hop) of the numbers of launches in the module's text."""

    alone: tuple[float, float]
    """a, b of a batch by itself."""
    stack: tuple[float, float]
    """c, d of a whole stack."""
    each: tuple[float, float]
    """e, f of each batch of a stack."""
    graph: tuple[float, float] = (0, 0)
    """g, h of a batch drawn by one CUDA graph; zeros where none can be captured."""


FIRST_SEEN = LaunchLaw(alone=(12, 13), stack=(30, 46.7), each=(3.3, 2.3), graph=(5, 1))
EVERY_HOP = LaunchLaw(alone=(6, 17), stack=(27, 56), each=(1.8, 1.0), graph=(3, 2))
LOCAL = LaunchLaw(alone=(11, 71), stack=(11, 71), each=(0, 0))
"""Neighbours preferred by place, in draws with replacement; they are not drawn in stacks."""
BY_TYPE_FIRST_SEEN = LaunchLaw(alone=(13, 22), stack=(13, 22), each=(0, 0))
BY_TYPE_EVERY_HOP = LaunchLaw(alone=(7, 26), stack=(7, 26), each=(0, 0))
"""Neighbours by edge type, all types of one fan-out; they are not drawn in stacks."""
LAYERS = LaunchLaw(alone=(0, 214), stack=(0, 213), each=(0, 1))


def launch_law(sampler: str, *, every_hop: bool) -> LaunchLaw:
    """Return a sampler's law; all but layer-wise samplers launch what neighbour sampling does."""
    launches = sampler_or_unknown(sampler).launches
    if launches in ("layers", "local"):
        return LAYERS if launches == "layers" else LOCAL
    if launches == "types":
        return BY_TYPE_EVERY_HOP if every_hop else BY_TYPE_FIRST_SEEN
    return EVERY_HOP if every_hop else FIRST_SEEN


FANOUT_STARTS = 7
"""Launches of a hop for each fan-out more that its edge types have."""


def more_fanouts(workload: Workload, relations: int) -> int:
    """Return how many fan-outs beyond one the hops of a typed graph have, in sum.

    >>> more_fanouts(Workload(fanouts=[5, 3], type_fanouts={"a": [2, 3], "b": [1, 3]}), 3)
    2
    """
    named = list(workload.type_fanouts.values())
    every = [*named, workload.fanouts] if len(named) < relations else named
    return sum(len(set(hop)) - 1 for hop in zip(*every, strict=True))


def batch_launches(
    candidate: Candidate, hops: int, *, sampler: str = DEFAULT_SAMPLER, every_hop: bool = False
) -> float:
    """Return the kernels that the host launches for a batch, beside the copy of its seeds.

    >>> from gnnplan.planner.candidate import list_cores, make_candidate
    >>> batch_launches(make_candidate(list_cores(1)), 2)
    38.0
    """
    law = launch_law(sampler, every_hop=every_hop)
    if candidate.threads.capture and candidate.bulk_batches == 1:
        return float(law.graph[0] + law.graph[1] * hops)
    k = candidate.bulk_batches
    if k == 1 and candidate.topology.policy != "partitioned":
        return float(law.alone[0] + law.alone[1] * hops)
    common = law.stack[0] + law.stack[1] * hops + OWN_TENSORS * min(k, candidate.prefetch_depth + 1)
    return common / k + law.each[0] + law.each[1] * hops


PRICED = frozenset(
    ["dependence", "estimator", "factor", "kappa", "layer_dependent", "norm", "sizes", "tolerance"]
)
"""Parameters that are priced, or change next to nothing of how a GPU draws."""


def unpriced_words(sampler: str, parameters: Mapping[str, float | str]) -> str:
    """Say for which parameters a GPU's sampling is not priced; empty where there are none.

    >>> unpriced_words("neighbor", {"weights": "graph", "draws": "without-replacement"})
    '; priced for the defaults, not for weights=graph'
    """
    usual = sampler_or_unknown(sampler).parameters
    found = [
        f"{name}={value}"
        for name, value in sorted(parameters.items())
        if name not in PRICED and value != usual.get(name)
    ]
    return f"; priced for the defaults, not for {', '.join(found)}" if found else ""


def launch_words(candidate: Candidate, sampler: str) -> str:
    """Say where the number of kernels comes from."""
    if candidate.threads.capture and candidate.bulk_batches == 1:
        return "by one CUDA graph"
    words = COUNTED
    if not sampler_or_unknown(sampler).launches:
        words += f" for neighbours, not for {sampler}"
    if candidate.bulk_batches > 1:
        words += f", {candidate.bulk_batches} batches to a stack"
    return words
