"""SAMPLE of layer-wise samplers on a GPU: the race, Poisson, and darts, over stacked rows.

The laws are `choose.layerwise`'s (a number per vertex) and `bulk.its`'s (darts); what is drawn
equals theirs, factors to the last places in which logarithms and sums differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnplan.runtime.sampling.bulk.its import PATIENCE
from gnnplan.runtime.sampling.choose.layerwise import Law, Method
from gnnplan.runtime.sampling.gpu.rng import StackStreams, unit
from gnnplan.runtime.sampling.gpu.segments import (
    NEVER,
    prefix_sums,
    segment_counts,
    segment_sums,
    smallest,
    upper_bounds,
    water_levels,
)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Probability rows side by side: one per batch, or one that all share."""

    ptr: Tensor
    """int64 [rows + 1]."""
    batch: Tensor
    """int64, the row of each candidate."""
    ids: Tensor
    """int64, its node."""
    values: Tensor
    """float64."""
    shared: bool

    def normalised(self) -> "Candidates":
        """Each row over its sum; empty rows stay."""
        total = segment_sums(self.ptr, self.values)
        total = torch.where(total > 0, total, 1.0)[self.batch]
        return Candidates(self.ptr, self.batch, self.ids, self.values / total, self.shared)

    @property
    def widest(self) -> int:
        """At least the longest row."""
        return self.ids.numel()

    def for_each(self, num_batches: int) -> "Candidates":
        """A row per batch: the shared row repeated, or itself."""
        if not self.shared:
            return self
        count = self.ids.numel()
        numbers = torch.arange(num_batches, device=self.ids.device)
        return Candidates(
            torch.arange(num_batches + 1, device=self.ids.device) * count,
            numbers.repeat_interleave(count),
            self.ids.repeat(num_batches),
            self.values.repeat(num_batches),
            shared=False,
        )


@dataclass(frozen=True, slots=True)
class Picked:
    """What was drawn: by batch, then by node."""

    batch: Tensor
    ids: Tensor
    factor: Tensor
    """float64, 1 / pi (with replacement: hits / (size p))."""


def draw_layers(found: Candidates, law: Law, streams: StackStreams, size: int) -> Picked:
    """Draw one layer of every batch.

    Args:
        found: normalised probabilities.
        law: how to draw.
        streams: of each batch at this hop.
        size: vertices per batch.
    """
    if law.uses_darts:
        marks, factor, rows = _by_darts(found, law, streams, size)
    else:
        rows = found
        words = streams.words(rows.batch, rows.ids)
        if law.method is Method.LADIES:
            marks, factor = _race(rows, -torch.log(1.0 - unit(words)), size)
        elif law.replace:
            marks, factor = _hits(rows, streams, words, size)
        else:
            marks, factor = _poisson(rows, words, size)
    places = torch.nonzero(marks).flatten()
    order = torch.argsort(rows.ids[places], stable=True)
    places = places[order]
    places = places[torch.argsort(rows.batch[places], stable=True)]
    return Picked(rows.batch[places], rows.ids[places], factor[places])


def _sizes(rows: Candidates, size: int) -> tuple[Tensor, Tensor]:
    """Positive candidates of each row, and which rows are taken whole."""
    able = segment_counts(rows.ptr, rows.values > 0)
    return able, able <= size


def _race(rows: Candidates, times: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` smallest of times / p, and 1 / (1 - exp(-p tau)), tau the next one."""
    return _first(rows, times / rows.values, size)


def _first(rows: Candidates, times: Tensor, size: int) -> tuple[Tensor, Tensor]:
    _, whole = _sizes(rows, size)
    keys = torch.where(rows.values > 0, times.abs().view(torch.int64), NEVER)
    wanted = torch.where(whole, 0, size + 1)
    _, tau = smallest(rows.ptr, rows.batch, keys, wanted, rows.widest)
    marks, _ = smallest(rows.ptr, rows.batch, keys, torch.where(whole, 0, size), rows.widest)
    in_whole = whole[rows.batch]
    beaten = tau.view(torch.float64)[rows.batch]
    factor = torch.where(in_whole, 1.0, -1.0 / torch.expm1(-rows.values * beaten))
    return (rows.values > 0) & (in_whole | marks), factor


def _poisson(rows: Candidates, words: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Each candidate by itself with min(1, c p)."""
    _, whole = _sizes(rows, size)
    level = water_levels(rows.ptr, rows.values, torch.where(whole, 0, size), rows.widest)
    pi = torch.clamp(level[rows.batch] * rows.values, max=1.0)
    pi = torch.where(whole[rows.batch], 1.0, pi)
    return (rows.values > 0) & (unit(words) < pi), 1.0 / pi


def _hits(
    rows: Candidates, streams: StackStreams, words: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Points of a Poisson process in [0, size p); waits once per round of points."""
    expected = size * rows.values
    now = -torch.log(1.0 - unit(words))
    hits = torch.zeros(now.shape, dtype=torch.int64, device=now.device)
    active = torch.nonzero((now < expected) & (rows.values > 0)).flatten()
    while active.numel():
        hits[active] += 1
        more = streams.words(rows.batch[active], rows.ids[active], hits[active])
        now[active] -= torch.log(1.0 - unit(more))
        active = active[now[active] < expected[active]]
    return hits > 0, hits.to(torch.float64) / expected


def _by_darts(
    found: Candidates, law: Law, streams: StackStreams, size: int
) -> tuple[Tensor, Tensor, Candidates]:
    """ITS: darts numbered per batch, all thrown at once, counted up to where the CPU stops."""
    device, num_batches = found.ids.device, streams.first.numel()
    rows = found.for_each(num_batches)
    able = segment_counts(rows.ptr, rows.values > 0)
    num_darts = size if law.replace else PATIENCE * size + 64
    thrown = torch.arange(num_darts, device=device)
    sums = prefix_sums(found.ptr, found.values, found.widest)
    sums = sums.repeat(num_batches) if found.shared else sums
    owner = torch.arange(num_batches, device=device).repeat_interleave(num_darts)
    darts = thrown.repeat(num_batches)
    goals = unit(streams.words(owner, torch.zeros_like(owner), 2 * darts))
    able_dart = able[owner] > 0
    owner, goals = owner[able_dart], goals[able_dart]
    low, end = rows.ptr[owner], rows.ptr[owner + 1]
    total = sums[end - 1]
    goals = torch.minimum(goals * total, torch.nextafter(total, torch.full_like(total, -1.0)))
    hit = upper_bounds(sums, low, end - 1, goals)
    if law.replace:
        counts = torch.bincount(hit, minlength=rows.ids.numel())
        return counts > 0, counts.to(torch.float64) / (size * rows.values), rows
    whole = able <= size
    arrivals = _arrivals(streams, num_darts)
    times = arrivals.flatten()[able_dart]
    now = torch.zeros(num_batches, dtype=torch.float64, device=device)
    number = torch.nonzero(able_dart).flatten()
    first = torch.full(rows.ids.shape, _LATE, dtype=torch.int64, device=device)
    first.scatter_reduce_(0, hit, number, "amin")
    is_first = first[hit] == number
    ends = row_ends_of(owner, num_batches)
    rank = segment_rank(ends, owner, is_first)
    enough = segment_counts(ends, is_first) > size
    taken = is_first & (rank <= size)
    last = is_first & (rank == size + 1)
    now[owner[last]] = times[last]
    marks = torch.zeros(rows.ids.shape, dtype=torch.bool, device=device)
    marks[hit[taken]] = True
    in_whole, patient = whole[rows.batch], enough[rows.batch]
    factor = -1.0 / torch.expm1(-rows.values * now[rows.batch])
    if bool((~enough & ~whole).any()):
        hits = (hit[is_first], times[is_first])
        raced, late = _race_on(rows, streams, arrivals[:, -1], hits, size)
        marks, factor = torch.where(patient, marks, raced), torch.where(patient, factor, late)
    marks = torch.where(in_whole, rows.values > 0, marks)
    return marks, torch.where(in_whole, 1.0, factor), rows


_LATE = (1 << 62) - 1


def _arrivals(streams: StackStreams, num_darts: int) -> Tensor:
    """When each dart of each batch arrives, at rate 1; float64 [k, darts]."""
    num_batches, device = streams.first.numel(), streams.first.device
    owner = torch.arange(num_batches, device=device).repeat_interleave(num_darts)
    darts = torch.arange(num_darts, device=device).repeat(num_batches)
    waits = unit(streams.words(owner, torch.zeros_like(owner), 2 * darts + 1))
    return torch.cumsum(-torch.log(1.0 - waits).view(num_batches, num_darts), 1)


def _race_on(
    rows: Candidates,
    streams: StackStreams,
    ended: Tensor,
    hits: tuple[Tensor, Tensor],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Rows of which the darts found too few: the columns not yet hit race on from the last dart.

    Args:
        rows: the candidates.
        streams: those of the darts.
        ended: float64 [k], when the last dart of each batch arrived.
        hits: candidates that darts hit, and when first.
        size: vertices per batch.
    """
    words = streams.mixed().words(rows.batch, rows.ids)
    times = ended[rows.batch] - torch.log(1.0 - unit(words)) / rows.values
    times[hits[0]] = hits[1]
    return _first(rows, times, size)


def row_ends_of(owner: Tensor, num_rows: int) -> Tensor:
    """Where the entries of each row end, of entries sorted by row; int64 [rows + 1]."""
    ends = torch.zeros(num_rows + 1, dtype=torch.int64, device=owner.device)
    torch.cumsum(torch.bincount(owner, minlength=num_rows), 0, out=ends[1:])
    return ends


def segment_rank(ends: Tensor, owner: Tensor, marks: Tensor) -> Tensor:
    """How many marks of its own row each entry has up to and with itself; int64."""
    before = torch.zeros(marks.numel() + 1, dtype=torch.int64, device=marks.device)
    torch.cumsum(marks, 0, out=before[1:])
    return before[1:] - before[ends[:-1]][owner]
