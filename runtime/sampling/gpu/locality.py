"""Neighbours by weight and locality-aware sampling on a GPU: `WeightedSampler`'s batches.

A hop's rows are laid out with the law of every edge, A_e (f if the source is local else 1); then
each way of drawing is a few passes over rows (`gpu.segments`). What is drawn equals the CPU's
edge for edge, its weights to float32's last place (logarithms and sums differ in theirs).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.sampling.dependent import StreamPolicy
from gnnplan.runtime.sampling.gpu.choose import row_ends
from gnnplan.runtime.sampling.gpu.hops import AbstractDeviceHops, Drawn, HopDraws
from gnnplan.runtime.sampling.gpu.rng import draw, plain_words, unit
from gnnplan.runtime.sampling.gpu.segments import (
    NEVER,
    WholeRows,
    prefix_sums,
    segment_counts,
    segment_sums,
    smallest,
    upper_bounds,
    water_levels,
    whole_rows,
)
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.locality import Correction, check_factor
from gnnplan.runtime.sampling.neighbor import Boost
from gnnplan.runtime.sampling.rng import Purpose
from gnnplan.runtime.sampling.statistics import Draws, Estimator

_Chosen = tuple[Tensor, Tensor, Tensor]
"""Row ends [n + 1], and of each edge drawn its place among the laid out ones and 1 / (d pi)."""


class DeviceWeightedSampler(AbstractDeviceHops):
    """Draws `WeightedSampler`'s batches; arguments are its and `AbstractDeviceHops`'s."""

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        *,
        device: torch.device,
        edge_weight: NDArray[np.floating] | None = None,
        draws: Draws = Draws.WITHOUT_REPLACEMENT,
        estimator: Estimator = Estimator.PLAIN,
        boost: Boost | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        streams = StreamPolicy(seed=seed, purpose=Purpose.NEIGHBOR)
        super().__init__(topology, fanouts, device=device, streams=streams, **settings)
        self.draws, self.estimator = Draws(draws), Estimator(estimator)
        self.factor = 1.0 if boost is None else boost.factor
        self._ring = None if boost is None else torch.from_numpy(np.array(boost.ring)).to(device)
        self._weight = topology.hold_weights(edge_weight, device)

    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        del known
        fanout, stream = self.fanouts[draws.hop], int(draws.streams.first[draws.hop])
        whole = whole_rows(self.topology, rows, draws.stream)
        row_ptr, places, weight = self._choose(whole, rows, draws.hop, fanout, stream)
        drawn = Drawn(row_ptr, whole.positions[places], whole.values[places])
        if self.estimator is Estimator.PLAIN:
            return drawn
        if self.estimator is Estimator.HAJEK:
            weight = weight / segment_sums(row_ptr, weight)[whole.row_of[places]]
        drawn.weight = weight.to(torch.float32)
        return drawn

    def _choose(
        self, whole: WholeRows, rows: Tensor, hop: int, fanout: int, stream: int
    ) -> _Chosen:
        replacement = self.draws is Draws.REPLACEMENT and fanout > 0
        if replacement and self._weight is None and (self._ring is None or self.factor == 1):
            return _uniform_draws(whole, rows, fanout, stream)
        law = self._law(whole, hop)
        able = segment_counts(whole.ptr, law > 0)
        if replacement:
            return _draws_by_law(whole, rows, law, able, fanout, stream)
        everything = torch.full_like(able, fanout < 0, dtype=torch.bool) | (able <= fanout)
        in_whole = everything[whole.row_of]
        kept, weight = law > 0, 1.0 / able.to(torch.float64)[whole.row_of]
        if fanout > 0:
            offset = whole.positions - whole.rows.starts[whole.row_of]
            uniform = unit(plain_words(stream, rows[whole.row_of], offset))
            way = _race if self.draws is Draws.WITHOUT_REPLACEMENT else _poisson
            marks, found = way(whole, law, able, everything, uniform, fanout)
            kept, weight = kept & (in_whole | marks), torch.where(in_whole, weight, found)
        places = torch.nonzero(kept).flatten()
        return row_ends(segment_counts(whole.ptr, kept)), places, weight[places]

    def _law(self, whole: WholeRows, hop: int) -> Tensor:
        boost = torch.ones(whole.values.shape, dtype=torch.float64, device=self.device)
        if self._ring is not None:
            boost.masked_fill_(self._ring[whole.values] <= self.num_hops - 1 - hop, self.factor)
        if self._weight is None:
            return boost
        return self._weight[whole.positions].to(torch.float64) * boost


class DeviceLocalitySampler(DeviceWeightedSampler):
    """Samples neighbours with a preference for local vertices, as `LocalitySampler`.

    `ring` is that of `locality.rings`, None where no vertex is local; others as in
    `DeviceWeightedSampler`.
    """

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        *,
        device: torch.device,
        ring: NDArray[np.uint8] | None = None,
        factor: int | float = 1,
        correction: Correction = Correction.REPLACEMENT,
        **settings: Any,
    ) -> None:
        draws, estimator = Correction(correction).way
        factor = check_factor(factor)
        boost = None if ring is None else Boost(ring, factor)
        super().__init__(
            topology, fanouts, device=device, draws=draws, estimator=estimator, boost=boost,
            **settings,
        )  # fmt: skip


def _uniform_draws(whole: WholeRows, rows: Tensor, fanout: int, stream: int) -> _Chosen:
    """Draw independently, k per row, among edges that are all alike."""
    taken = torch.nonzero(whole.rows.degrees > 0).flatten()
    numbers = taken.repeat_interleave(fanout)
    turns = torch.arange(fanout, device=rows.device).repeat(taken.numel())
    degrees = whole.rows.degrees[numbers]
    _, offset = draw(stream, rows[numbers], turns, degrees)
    counts = torch.where(whole.rows.degrees > 0, fanout, 0)
    places = whole.ptr[numbers] + offset
    share = torch.full(places.shape, 1.0 / fanout, dtype=torch.float64, device=rows.device)
    return row_ends(counts), places, share


def _draws_by_law(
    whole: WholeRows, rows: Tensor, law: Tensor, able: Tensor, fanout: int, stream: int
) -> _Chosen:
    """Draw independently, k per row of law w / W, by inverse transform on the running sums."""
    sums = prefix_sums(whole.ptr, law, whole.widest)
    taken = torch.nonzero(able > 0).flatten()
    numbers = taken.repeat_interleave(fanout)
    turns = torch.arange(fanout, device=rows.device).repeat(taken.numel())
    low, end = whole.ptr[numbers], whole.ptr[numbers + 1]
    total = sums[end - 1]
    places = upper_bounds(sums, low, end, unit(plain_words(stream, rows[numbers], turns)) * total)
    # Rounding may carry a goal past the last edge that can be drawn.
    numbered = torch.arange(law.numel(), device=law.device)
    last = torch.zeros_like(able).scatter_reduce_(
        0, whole.row_of, torch.where(law > 0, numbered, 0), "amax"
    )
    places = torch.minimum(places, last[numbers])
    weight = total / (able.to(torch.float64)[numbers] * fanout * law[places])
    return row_ends(torch.where(able > 0, fanout, 0)), places, weight


def _race(
    whole: WholeRows, law: Tensor, able: Tensor, everything: Tensor, uniform: Tensor, fanout: int
) -> tuple[Tensor, Tensor]:
    """Mark the k first arrivals of exponential times with rates `law`; return their weights too."""
    row_of = whole.row_of
    # 1 - u is exact, so this is -log1p(-u).
    times = -torch.log(1.0 - uniform) / law
    keys = torch.where(law > 0, times.abs().view(torch.int64), NEVER)
    marks, next_key = smallest(
        whole.ptr, row_of, keys, torch.where(everything, 0, fanout + 1), whole.widest
    )
    # The last of them is not taken: it says what the others beat.
    marks &= _not_last(whole, keys, marks, next_key)
    beaten = next_key.view(torch.float64)[row_of]
    return marks, 1.0 / (-torch.expm1(-law * beaten) * able.to(torch.float64)[row_of])


def _not_last(whole: WholeRows, keys: Tensor, marks: Tensor, limit: Tensor) -> Tensor:
    """Clear the one marked edge of each row that comes last by (key, place)."""
    numbered = torch.arange(keys.numel(), device=keys.device)
    equal = marks & (keys == limit[whole.row_of])
    last = torch.full_like(limit, -1).scatter_reduce_(
        0, whole.row_of, torch.where(equal, numbered, -1), "amax"
    )
    return numbered != last[whole.row_of]


def _poisson(
    whole: WholeRows, law: Tensor, able: Tensor, everything: Tensor, uniform: Tensor, fanout: int
) -> tuple[Tensor, Tensor]:
    """Mark each edge by itself with probability min(1, c w); return the weights too."""
    row_of = whole.row_of
    sizes = torch.where(everything, 0, max(fanout, 0))
    level = water_levels(whole.ptr, law, sizes, whole.widest)
    pi = torch.clamp(level[row_of] * law, max=1.0)
    return uniform < pi, 1.0 / (pi * able.to(torch.float64)[row_of])
