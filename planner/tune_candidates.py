"""Which candidates are worth measuring, and in which order."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.candidate import Candidate
from planner.settings import PlanSettings
from planner.solver.choose import Priced
from planner.solver.sampling import plan_sampler
from runtime import codec


def shortlist(
    priced: Sequence[Priced], model_choice: Priced, top: int, *, apart: PlanSettings | None = None
) -> list[Priced]:
    """At most `top` candidates that fit and run differently, the model's choice first.

    Args:
        priced: all candidates.
        model_choice: the one that the planner would take; it is always measured.
        top: how many, at least 1.
        apart: settings of the request, where candidates with other statistics are to be held
            against each other: the best of each comes before the second best of any.
    """
    fitting = sorted((p for p in priced if not p.overflow), key=lambda p: p.seconds)
    found = distinct([model_choice, *fitting])
    if apart is not None:
        first: dict[str, Priced] = {}
        for each in found:
            first.setdefault(statistics_key(apart, each.candidate), each)
        found = distinct([*first.values(), *found])
    return found[:top]


def distinct(priced: Sequence[Priced]) -> list[Priced]:
    """The first of those that run alike: the same choices, and rows in the same places.

    Policies may agree on where every row lives; measuring both would be measuring one twice.
    """
    kept: dict[tuple[Candidate, bytes], Priced] = {}
    for each in priced:
        kept.setdefault(_shape(each), each)
    return list(kept.values())


def _shape(priced: Priced) -> tuple[Candidate, bytes]:
    """All that decides how a candidate runs; the name of a placement does not, its rows do."""
    candidate, placement = priced.candidate, priced.placed.placement
    rows = hashlib.sha256()
    for own in placement.own:
        rows.update(np.sort(own).tobytes() + b"|")
    if placement.on_host is not None:
        rows.update(placement.on_host.tobytes())
    depth = candidate.prefetch_depth if candidate.threads.sample else 0
    return replace(candidate, policy=candidate.cache or "", prefetch_depth=depth), rows.digest()


def statistics_key(settings: PlanSettings, candidate: Candidate) -> str:
    """Equal for candidates whose batches follow the same law: as many steps to an accuracy."""
    return codec.content_hash(plan_sampler(settings, candidate))[:12]


def turns(names: Sequence[int], rounds: int, *, seed: int) -> list[list[int]]:
    """Who is measured when: every round has each once, in an order of its own.

    A drift of the machine then meets all alike, and none always follows the same other.

    >>> turns([0, 1, 2], 2, seed=0)
    [[2, 0, 1], [2, 1, 0]]
    """
    rng = np.random.default_rng(seed)
    return [[names[i] for i in rng.permutation(len(names))] for _ in range(rounds)]
