"""List the dimensions of the search, in the order in which it asks them.

    starts      made from nothing: on GPUs, or on the cores of one host or several
    joins       made from every start: ranks that do more together than sum gradients
    lists       made from every start: hot lists that GPUs keep, where they have no room for all
    placements  tried on the fastest of those: where rows lie
    choices     tried on the fastest of all: what the sampler does

A new dimension is a module of this package and its place here.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate, plain_words
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.placement import MAX_DEVICES
from gnnplan.planner.search.dimensions.batches import Dependence, LocalNeighbours, Stacks
from gnnplan.planner.search.dimensions.dimension import (
    Dimension,
    Omission,
    ProposalInputs,
    RowsDimension,
)
from gnnplan.planner.search.dimensions.joined_ranks import (
    CachedLists,
    Grids,
    SharedBatch,
    keep_shared,
    no_grids,
)
from gnnplan.planner.search.dimensions.ranks import Cores, Gpus
from gnnplan.planner.search.dimensions.rows import Caches, FixedRows, OwnedRows

STARTS: tuple[Dimension, ...] = (Gpus(), Cores())
JOINS: tuple[Dimension, ...] = (SharedBatch(), Grids())
LISTS: tuple[Dimension, ...] = (CachedLists(),)
PLACEMENTS: tuple[RowsDimension, ...] = (FixedRows(), Caches(), OwnedRows())
CHOICES: tuple[Dimension, ...] = (Stacks(), Dependence(), LocalNeighbours())
DIMENSIONS = (*STARTS, *JOINS, *LISTS, *PLACEMENTS, *CHOICES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposals:
    """Candidates to price, and the dimensions that none of them takes."""

    candidates: list[Candidate]
    left_out: list[Omission]


def dimensions_of(candidate: Candidate) -> Iterator[Dimension]:
    """Yield the dimensions that a candidate takes, in the registry's order."""
    return (each for each in DIMENSIONS if each.applies(candidate))


def rows_of(candidate: Candidate) -> RowsDimension:
    """Return the dimension that places a candidate's rows."""
    return next(each for each in PLACEMENTS if each.applies(candidate))


def propose_first(asked: ProposalInputs) -> Proposals:
    """Propose every way to run the workload: the starts, then what joins their ranks.

    Where the user asks for copies of a topology in parts, such ways alone.
    """
    starts = _of_few_ranks(asked, propose_from(STARTS, asked, [None]))
    joined = [propose_from([each], asked, starts.candidates) for each in JOINS]
    every = [starts, *joined]
    candidates = [c for each in every for c in each.candidates]
    left_out = [reason for each in every for reason in each.left_out]
    if asked.settings.replication is not None:
        candidates = [c for c in candidates if c.topology.policy == "partitioned"]
        if not candidates:
            why = next((each.why for each in left_out if each.name == Grids.name), "")
            raise no_grids(asked.settings, starts.candidates, why)
    if asked.settings.batching == "cooperative" or asked.settings.owner != "hash":
        shared = keep_shared(candidates, left_out, asked)
        candidates = shared if asked.settings.batching == "cooperative" else candidates
    return Proposals(candidates=candidates, left_out=left_out)


def _of_few_ranks(asked: ProposalInputs, starts: Proposals) -> Proposals:
    """Return the starts without those of more ranks than the codes of rows tell apart.

    Raises:
        SettingsError: none is left, or hosts have no seed each.
    """
    few = [each for each in starts.candidates if each.num_ranks <= MAX_DEVICES]
    if not few:
        hosts, seeds = asked.settings.hosts, asked.settings.workload.batch_size
        least = min((each.num_ranks for each in starts.candidates), default=hosts)
        wanted = f"{MAX_DEVICES} devices, which a plan's table of rows tells apart"
        if not starts.candidates:
            wanted = f"{seeds} hosts (the seeds of a batch)"
        raise SettingsError(
            f"expected at most {wanted}, found {least}; ask for fewer --devices or --hosts"
        )
    return replace(starts, candidates=few)


def propose_more(asked: ProposalInputs, bases: Iterable[Candidate]) -> Proposals:
    """Propose the sampler's choices for the candidates whose ranks work alone."""
    if asked.fed_by_cores:
        why = "cores draw the GPUs' batches one by one"
        return Proposals(candidates=[], left_out=[each.omit(why) for each in CHOICES])
    alone = [
        b
        for b in bases
        if b.batching == "independent"
        and b.topology.policy not in ("partitioned", "cached")
        and b.hosts == 1
    ]
    return propose_from(CHOICES, asked, alone)


def propose_from(
    dimensions: Sequence[Dimension], asked: ProposalInputs, bases: Iterable[Candidate | None]
) -> Proposals:
    """Propose what some dimensions make of each base, base by base, without repetition."""
    found: dict[Candidate, None] = {}
    left_out: dict[str, Omission] = {}
    for base in bases:
        for dimension in dimensions:
            for each in dimension.propose(asked, base):
                if isinstance(each, Omission):
                    left_out.setdefault(each.name, each)
                else:
                    found.setdefault(each)
    tried = {each.name for each in dimensions if any(map(each.applies, found))}
    return Proposals(
        candidates=list(found), left_out=[r for name, r in left_out.items() if name not in tried]
    )


DESCRIBED = (*JOINS, *LISTS, *PLACEMENTS, *CHOICES, *STARTS)
"""Dimensions in the order of a name's words, which ends with the number of hosts."""


def name_of(candidate: Candidate) -> str:
    """Return the name that a reader sees.

    >>> from dataclasses import replace
    >>> from gnnplan.planner.candidate import list_cores, make_candidate
    >>> from gnnplan.runtime.plan import Sampler
    >>> drawn = Sampler(parameters={"kappa": 64.0})
    >>> lru = make_candidate(list_cores(1), policy="lru", sampler=drawn)
    >>> name_of(replace(lru, bulk_batches=8)).split(", ")[1:]
    ['lru cache', '8 batches sampled at once', '64 batches hang together']
    """
    described = (each.describe(candidate) for each in DESCRIBED if each.applies(candidate))
    return ", ".join([plain_words(candidate), *filter(None, described)])


def count_changes(candidate: Candidate) -> int:
    """Count the choices that are not the default: each must gain more than the noise."""
    return sum(each.count_changes(candidate) for each in dimensions_of(candidate))


def family_of(candidate: Candidate) -> tuple[Hashable, ...]:
    """Return the candidate's dimensions with their keys; a plan lists the best of each family."""
    return tuple((each.name, each.family(candidate)) for each in dimensions_of(candidate))


def explain_no_gain(candidate: Candidate) -> str:
    """Return what speaks against a candidate whose choices gain nothing; empty for nothing."""
    taken = (each for each in (*CHOICES, *PLACEMENTS) if each.applies(candidate))
    return next(filter(None, (each.no_gain_reason(candidate) for each in taken)), "")
