"""Choices beside ranks, threads and placement: stacks, dependent batches, local neighbours.

Each is tried on the fastest candidates; one that cannot be tried is left out with its reason.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner.candidate import DYNAMIC, Candidate
from planner.cost.choices import stack_bytes
from planner.settings import PlanSettings
from planner.solver.drawn import Draws
from planner.solver.sampling import statistics_of
from runtime.sampling.parameters import PARAMETERS
from runtime.sampling.statistics import StatisticsClass

BULKS = (4, 16, 64)
"""Batches of a stack."""
KAPPAS = (4, 16, 64, 256)
"""Batches that hang together, beside 1: the user's own."""
FACTORS = (2.0, 4.0, 8.0, 16.0)
"""Preferences for local neighbours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A kind of choice that was not priced, and why."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """Candidates to price beside those they were made from."""

    candidates: list[Candidate]
    left_out: list[LeftOut]


def variants(
    settings: PlanSettings, draws: Draws | None, bases: Iterable[Candidate], num_steps: int
) -> Variants:
    """Every such choice on each of the given candidates.

    Args:
        settings: the sampler, and what the user allows.
        draws: sizes of batches; None where the graph is not at hand.
        bases: candidates, placed.
        num_steps: optimiser steps of an epoch.
    """
    found: list[Candidate] = []
    left_out: dict[str, LeftOut] = {}
    plain = [
        b
        for b in bases
        if b.batching == "independent" and b.topology != "partitioned" and b.hosts == 1
    ]
    for base in plain:
        for each in (
            *_stacked(draws, base, num_steps),
            *_dependent(settings, draws, base),
            *_local(settings, draws, base),
        ):
            if isinstance(each, LeftOut):
                left_out.setdefault(each.name, each)
            elif each not in found:
                found.append(each)
    tried = {kind for c in found for kind in _kinds(c)}
    kept = [each for name, each in left_out.items() if name not in tried]
    return Variants(candidates=found, left_out=kept)


STACKS, DEPENDENCE, LOCALITY = "stacks of batches", "dependent batches", "local neighbours"
"""Names of the kinds of choices."""


def _kinds(candidate: Candidate) -> Iterator[str]:
    if candidate.bulk > 1:
        yield STACKS
    if candidate.kappa is not None:
        yield DEPENDENCE
    if candidate.las is not None:
        yield LOCALITY


def _stacked(draws: Draws | None, base: Candidate, num_steps: int) -> Iterator[Candidate | LeftOut]:
    """Identical batches, k of them sampled at once."""
    if base.kind == "cuda":
        yield LeftOut(name=STACKS, why="stacks are not priced where ranks are GPUs")
        return
    pilot = "nothing was drawn of this graph" if draws is None else draws.bulk(base.num_ranks)
    if isinstance(pilot, str):
        yield LeftOut(name=STACKS, why=pilot)
        return
    sizes = sorted({min(k, num_steps) for k in BULKS})
    if sizes[-1] < 2:
        yield LeftOut(name=STACKS, why="an epoch is a single step")
        return
    for k in sizes:
        if k > 1:
            need = stack_bytes(pilot, k, base.prefetch_depth)
            yield replace(base, bulk=k, bulk_bytes=need)


def _dependent(
    settings: PlanSettings, draws: Draws | None, base: Candidate
) -> Iterator[Candidate | LeftOut]:
    """Batches that share random numbers, behind the base's placement and behind caches."""
    known = PARAMETERS.get(settings.sampler, {})
    if "kappa" not in known:
        yield LeftOut(
            name=DEPENDENCE, why=f"sampler {settings.sampler} draws each batch afresh (labor, "
            "ladies and pladies need not)",
        )  # fmt: skip
        return
    if base.kind == "cuda":
        yield LeftOut(name=DEPENDENCE, why="only a cache that fills itself gains, none is on GPUs")
        return
    if "kappa" in settings.sampler_parameters:
        yield LeftOut(name=DEPENDENCE, why="kappa is the user's own")
        return
    for kappa in KAPPAS:
        dependent = replace(base, kappa=kappa)
        why = _forbidden(settings, dependent)
        if not why:
            found = "nothing was drawn" if draws is None else draws.batches(base.num_ranks, kappa)
            why = found if isinstance(found, str) else ""
        if why:
            yield LeftOut(name=DEPENDENCE, why=why)
            return
        for policy in dict.fromkeys((base.policy, *DYNAMIC)):
            yield replace(dependent, policy=policy)


def _local(
    settings: PlanSettings, draws: Draws | None, base: Candidate
) -> Iterator[Candidate | LeftOut]:
    """Neighbours whose rows a rank holds are preferred; says nothing where none are held."""
    if settings.sampler not in ("las", "neighbor") or "factor" in settings.sampler_parameters:
        why = "the factor is the user's own" if settings.sampler == "las" else (
            f"sampler {settings.sampler} has no form that prefers local neighbours"
        )  # fmt: skip
        yield LeftOut(name=LOCALITY, why=why)
        return
    if settings.sampler == "neighbor" and settings.sampler_parameters:
        yield LeftOut(name=LOCALITY, why="the sampler's parameters are the user's own")
        return
    why = _forbidden(settings, replace(base, las=FACTORS[0]))
    if why or draws is None or base.kind == "cuda":
        reason = "not priced where ranks are GPUs" if base.kind == "cuda" else "nothing was drawn"
        yield LeftOut(name=LOCALITY, why=why or reason)
        return
    if base.policy == "none" or base.cache is not None:
        yield LeftOut(name=LOCALITY, why="no fast candidate keeps rows of its own")
        return
    for factor in FACTORS:
        yield replace(base, las=factor)


def _forbidden(settings: PlanSettings, candidate: Candidate) -> str:
    """Why the user's --allow does not permit a candidate; empty where it does."""
    found, allowed = statistics_of(settings, candidate), StatisticsClass(settings.workload.allow)
    if allowed.allows(found):
        return ""
    return f"statistics would be {found.value}, --allow is {allowed.value}"
