"""All kinds, in the order in which the search asks them.

    starts      made from nothing: on GPUs, or on the cores of one host or several
    joins       made from every start: ranks that do more together than sum gradients
    placements  tried on the fastest of those: where rows lie
    choices     tried on the fastest of all: what the sampler does

A new kind is a module of this package and its place here.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.candidate import Candidate, plain_words
from planner.search.dimensions.caches import Caches
from planner.search.dimensions.dependence import Dependence
from planner.search.dimensions.dimension import Ask, Kind, LeftOut
from planner.search.dimensions.grids import Grids
from planner.search.dimensions.locality import LocalNeighbours
from planner.search.dimensions.ranks import Cores, Gpus
from planner.search.dimensions.rows import FixedRows, OwnedRows
from planner.search.dimensions.shared_batch import SharedBatch
from planner.search.dimensions.stacks import Stacks

STARTS: tuple[Kind, ...] = (Gpus(), Cores())
JOINS: tuple[Kind, ...] = (SharedBatch(), Grids())
PLACEMENTS: tuple[Kind, ...] = (FixedRows(), Caches(), OwnedRows())
CHOICES: tuple[Kind, ...] = (Stacks(), Dependence(), LocalNeighbours())
KINDS = (*STARTS, *JOINS, *PLACEMENTS, *CHOICES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposed:
    """Candidates to price, and the kinds that none of them takes."""

    candidates: list[Candidate]
    left_out: list[LeftOut]


def kinds_of(candidate: Candidate) -> Iterator[Kind]:
    """The kinds that a candidate takes, in the registry's order."""
    return (kind for kind in KINDS if kind.taken(candidate))


def first_candidates(ask: Ask) -> Proposed:
    """Every way to run the workload: the starts, then what joins their ranks."""
    starts = proposed(STARTS, ask, [None])
    joined = [proposed([kind], ask, starts.candidates) for kind in JOINS]
    every = [starts, *joined]
    return Proposed(
        candidates=[c for each in every for c in each.candidates],
        left_out=[reason for each in every for reason in each.left_out],
    )


def more_choices(ask: Ask, bases: Iterable[Candidate]) -> Proposed:
    """What the sampler may do otherwise, on those of some candidates whose ranks work alone."""
    alone = [
        b
        for b in bases
        if b.batching == "independent" and b.topology.policy != "partitioned" and b.hosts == 1
    ]
    return proposed(CHOICES, ask, alone)


def proposed(kinds: Sequence[Kind], ask: Ask, bases: Iterable[Candidate | None]) -> Proposed:
    """What some kinds make of each base, base by base; of equal candidates the first."""
    found: dict[Candidate, None] = {}
    left_out: dict[str, LeftOut] = {}
    for base in bases:
        for kind in kinds:
            for each in kind.propose(ask, base):
                if isinstance(each, LeftOut):
                    left_out.setdefault(each.name, each)
                else:
                    found.setdefault(each)
    tried = {kind.name for kind in kinds if any(kind.taken(c) for c in found)}
    return Proposed(
        candidates=list(found), left_out=[r for name, r in left_out.items() if name not in tried]
    )


TOLD = (*JOINS, *PLACEMENTS, *CHOICES, *STARTS)
"""The order of a name's words: over how many hosts its ranks are comes last."""


def name_of(candidate: Candidate) -> str:
    """What a reader sees, e.g. "2 ranks x (1 compute + 0 loader) threads, naive".

    >>> from planner.candidate import list_cores, make_candidate
    >>> drawn = Sampler(parameters={"kappa": 64.0})
    >>> lru = make_candidate(list_cores(1), policy="lru", sampler=drawn)
    >>> name_of(replace(lru, bulk_batches=8))
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
