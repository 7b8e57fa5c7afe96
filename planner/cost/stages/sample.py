"""Stage `sample`: drawing neighbours and relabelling them, elapsed seconds per batch.

Each kernel that a GPU's sampler starts is a launch that the host makes. Over one to three hops L
and stacks of one to eight batches k the kernels counted in the runtime's samplers follow

    a batch by itself       a + b L
    a batch of a stack      (c + d L) / k + e + f L + 7 min(k, p + 1) / k

where p batches are made ahead: the last ones of a stack get tensors of their own. Counted again by
tests/planner/cost/stages/test_gpu_launches.py. A stack also waits for the GPU at every hop, which
costs the other lanes nothing and is not priced.
"""

from dataclasses import dataclass

from gnnplan.planner.candidate import Candidate
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, sampler_or_unknown


def sample_seconds(
    edges: float, vertices: float, seconds_per_edge: float, seconds_per_vertex: float
) -> float:
    """Seconds one thread takes to sample one batch; as many core-seconds.

    T = E c_e + V c_v: E edges drawn over all hops, V distinct vertices relabelled, c_e and c_v
    seconds of each at this graph's size and number of samplers.

    Source: both rates are measured by the probe with the real sampler on generated graphs.

    >>> sample_seconds(edges=1e6, vertices=2e5, seconds_per_edge=10e-9, seconds_per_vertex=50e-9)
    0.02
    """
    return edges * seconds_per_edge + vertices * seconds_per_vertex


NEIGHBOUR_BYTES = 4
"""Least that one read of a neighbour's id asks for; links move a whole transaction."""
OFFSETS_BYTES = 16
"""Where a list begins and ends."""
HASH_READS = 3
"""Random accesses to the relabelling table per drawn edge: look up, insert, read back."""
KERNELS_PER_HOP = 8
"""Draw, prefix sum, hash, compact and their like: of systems whose code is not at hand."""


def gpu_sample_seconds(
    edges: float,
    expanded: float,
    launches: float,
    *,
    neighbour_seconds: float,
    offsets_seconds: float,
    hash_seconds: float,
    kernel_seconds: float,
) -> float:
    """Seconds a GPU takes to draw one batch.

    T = E c_n + X c_o + 3 E c_h + K t_k: E edges drawn, X vertices whose lists are read, K kernels;
    c_n and c_o seconds of a neighbour's id and of a list's two offsets, read at random from where
    the topology lies; c_h of an access to the GPU's own memory; t_k of one launch.

    Source: docs/formulas.md 2.4 (one transaction per neighbour read, and one for the offsets); the
    relabelling term is derived.

    >>> round(1e3 * gpu_sample_seconds(1e6, 1e5, 16, neighbour_seconds=5e-9, offsets_seconds=5e-9,
    ...     hash_seconds=1e-10, kernel_seconds=1e-5), 2)
    5.96
    """
    reads = edges * neighbour_seconds + expanded * offsets_seconds
    return reads + HASH_READS * edges * hash_seconds + launches * kernel_seconds


OWN_TENSORS = 7
"""Copies that take a batch out of its stack."""
COUNTED = "kernels counted in the sampler's code"


@dataclass(frozen=True, slots=True)
class LaunchLaw:
    """Constants and shares of each hop, as in the module's text."""

    alone: tuple[float, float]
    """a, b."""
    stack: tuple[float, float]
    """c, d."""
    each: tuple[float, float]
    """e, f."""


FIRST_SEEN = LaunchLaw(alone=(12, 13), stack=(30, 46.7), each=(3.3, 2.3))
EVERY_HOP = LaunchLaw(alone=(6, 17), stack=(27, 56), each=(1.8, 1.0))
LAYERS = LaunchLaw(alone=(0, 214), stack=(0, 213), each=(0, 1))


def launch_law(sampler: str, *, every_hop: bool) -> LaunchLaw:
    """Choose a sampler's law; others than layers' are taken to start what neighbours do."""
    if sampler_or_unknown(sampler).launches == "layers":
        return LAYERS
    return EVERY_HOP if every_hop else FIRST_SEEN


def batch_launches(
    candidate: Candidate, hops: int, *, sampler: str = DEFAULT_SAMPLER, every_hop: bool = False
) -> float:
    """Kernels that the host starts for a batch of so many hops; 1 where one graph holds them.

    >>> from gnnplan.planner.candidate import list_cores, make_candidate
    >>> batch_launches(make_candidate(list_cores(1)), 2)
    38.0
    """
    if candidate.threads.capture and candidate.bulk_batches == 1:
        return 1.0
    law = launch_law(sampler, every_hop=every_hop)
    k = candidate.bulk_batches
    if k == 1:
        return float(law.alone[0] + law.alone[1] * hops)
    common = law.stack[0] + law.stack[1] * hops + OWN_TENSORS * min(k, candidate.prefetch_depth + 1)
    return common / k + law.each[0] + law.each[1] * hops


def launch_words(candidate: Candidate, sampler: str) -> str:
    """Say what stands behind the number of kernels."""
    if candidate.threads.capture and candidate.bulk_batches == 1:
        return "by one CUDA graph"
    words = COUNTED
    if not sampler_or_unknown(sampler).launches:
        words += f" for neighbours, not for {sampler}"
    if candidate.bulk_batches > 1:
        words += f", {candidate.bulk_batches} batches to a stack"
    return words
