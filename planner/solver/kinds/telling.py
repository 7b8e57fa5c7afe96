"""What the kinds that a candidate takes say of it: its name, its sort, what must pay for itself."""

from collections.abc import Hashable

from planner.candidate import Candidate, plain_words
from planner.solver.kinds.registry import CHOICES, JOINS, PLACEMENTS, STARTS, kinds_of

TOLD = (*JOINS, *PLACEMENTS, *CHOICES, *STARTS)
"""The order of a name's words: over how many hosts its ranks are comes last."""


def name_of(candidate: Candidate) -> str:
    """What a reader sees, e.g. "2 ranks x (1 compute + 0 loader) threads, naive".

    >>> from runtime.plan import Threads
    >>> name_of(Candidate(num_ranks=1, threads=Threads(), prefetch_depth=2, policy="lru",
    ...     bulk=8, kappa=64))
    '1 rank x (1 compute + 0 loader) threads, lru cache, 8 batches sampled at once, \
64 batches hang together'
    """
    told = (kind.words(candidate) for kind in TOLD if kind.taken(candidate))
    return ", ".join([plain_words(candidate), *(words for words in told if words)])


def changes_of(candidate: Candidate) -> int:
    """Choices that are not the plain ones: they must pay for being there."""
    return sum(kind.changes(candidate) for kind in kinds_of(candidate))


def family_of(candidate: Candidate) -> tuple[Hashable, ...]:
    """The kinds it takes, and which sort of each: of every family the best is told of."""
    return tuple((kind.name, kind.sort(candidate)) for kind in kinds_of(candidate))


def idle_words(candidate: Candidate) -> str:
    """What stands against a candidate whose choices gain nothing; empty where nothing does."""
    told = (kind.idle(candidate) for kind in (*CHOICES, *PLACEMENTS) if kind.taken(candidate))
    return next((words for words in told if words), "")
