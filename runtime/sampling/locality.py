"""Locality-aware sampling (LAS): neighbours whose features are near are drawn more often.

The weight of a source in the local set of its hop is multiplied by a factor f >= 1 (formulas 1.6,
after Song and Jiang, ICS 2022). Loc^0, of the hop next to the input features, is what this device
holds; Loc^(h+1) = Loc^h united with N(Loc^h), for the hop nearer to the seeds: a vertex drawn there
has local vertices near it. As Loc only grows, one byte per node says it all: `ring[v]` is the
smallest h with v in Loc^h.

Drawn uncorrected, a mean over the neighbours becomes biased towards the local ones; `Correction`
says what is done about it. Validation always samples with f = 1 (`for_validation`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.checks import read_only
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.statistics import Draws, Estimator
from gnnplan.runtime.sampling.weighted import Boost, WeightedSampler

FAR = 255
"""Ring of a vertex in no local set."""


class Correction(StrEnum):
    """How draws are made and weighted, given the boosted weights w and W = sum w over a row."""

    NONE = "none"
    """k different neighbours by successive sampling, plain mean: the published code's, biased."""
    REPLACEMENT = "replacement"
    """k draws with replacement, each weighted W / (k d w): unbiased."""
    POISSON = "poisson"
    """Each neighbour with pi = min(1, c w), sum pi = k, weighted 1 / (d pi): unbiased."""
    HAJEK = "hajek"
    """The same draws, weighted (1 / pi) / sum (1 / pi): bounded, a bias of order 1 / k."""

    @property
    def way(self) -> tuple[Draws, Estimator]:
        """The draws and the estimator, as `statistics_class` and `WeightedSampler` name them."""
        return _WAYS[self]


_WAYS = {
    Correction.NONE: (Draws.WITHOUT_REPLACEMENT, Estimator.PLAIN),
    Correction.REPLACEMENT: (Draws.REPLACEMENT, Estimator.HORVITZ_THOMPSON),
    Correction.POISSON: (Draws.POISSON, Estimator.HORVITZ_THOMPSON),
    Correction.HAJEK: (Draws.POISSON, Estimator.HAJEK),
}


class LocalitySampler(WeightedSampler):
    """Neighbour sampling with a preference for local vertices.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        fanouts: Neighbours per hop, the hop next to the seeds first; -1 takes all.
        local: Global ids of the vertices that are local (Loc^0): this device's or its clique's.
        factor: f, at least 1.
        correction: How the preference is corrected.
        edge_weight: float [E], what the factor multiplies; None: 1.
        dialect: Which vertices a hop expands.
        seed: The run's seed.
        edge_ids: Fill each block's `e_id`.
        purpose: Stream of the draws.
        relabel_budget_bytes: As in `NeighborSampler`.

    Raises:
        SamplerError: a factor below 1, local ids out of range, or as `WeightedSampler`.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        local: NDArray[np.integer],
        factor: int | float = 1,
        correction: Correction = Correction.REPLACEMENT,
        **settings: Any,
    ) -> None:
        self.correction, self.factor = Correction(correction), check_factor(factor)
        draws, estimator = self.correction.way
        super().__init__(indptr, indices, fanouts, draws=draws, estimator=estimator, **settings)
        self.ring = rings(self.indptr, self.indices, local, self.num_hops)
        self.boost = Boost(self.ring, self.factor)


def check_factor(factor: int | float) -> float:
    """The factor as a float.

    Raises:
        SamplerError: below 1, infinite or no number.
    """
    if not (factor >= 1 and math.isfinite(factor)):
        raise SamplerError(
            f"expected a locality factor of at least 1 (1: no preference), found {factor}; raise it"
        )
    return float(factor)


def rings(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    local: NDArray[np.integer],
    num_hops: int,
) -> NDArray[np.uint8]:
    """The smallest h < num_hops with v in Loc^h, or `FAR`; uint8 [N], read-only.

    N(Loc) are the in-neighbours of Loc's vertices, those it aggregates from.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        local: Global ids of Loc^0, in any order.
        num_hops: Hops that need a set; one pass over the edges of the newest vertices per hop.

    Raises:
        SamplerError: a local id is out of range.
    """
    num_nodes = int(indptr.shape[0]) - 1
    local = np.asarray(local, dtype=np.int64)
    if local.size and not 0 <= int(local.min()) <= int(local.max()) < num_nodes:
        raise SamplerError(
            f"expected local vertices between 0 and {num_nodes - 1}, found {int(local.min())} to "
            f"{int(local.max())}; plan again for this graph"
        )
    ring = np.full(num_nodes, FAR, dtype=np.uint8)
    ring[local] = 0
    for h in range(1, min(num_hops, FAR)):
        _spread(indptr, indices, ring, h)
    return read_only(ring)


@kernel
@no_type_check
def _spread(indptr, indices, ring, h):
    """Put the in-neighbours of ring h - 1 that are in no ring yet into ring h."""
    for v in range(ring.shape[0]):
        if ring[v] == h - 1:
            for e in range(indptr[v], indptr[v + 1]):
                u = indices[e]
                if ring[u] > h:
                    ring[u] = h


LARGEST = 8.0
"""The published schedule stops here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorSchedule:
    """The published schedule of f: doubled while data movement is a large part of an iteration.

    Rank 0 measures an epoch, calls `after_epoch`, and gives the factor to all ranks; validation
    does not use it.
    """

    factor: float = 1.0
    remembered: float = 1.0
    """The factor before the last doubling."""
    frozen: bool = False

    def after_epoch(self, movement_seconds: float, iteration_seconds: float) -> "FactorSchedule":
        """The schedule for the next epoch.

        With r = movement / iteration: frozen once f >= 8; r >= 0.2 remembers f and doubles it;
        r < 0.15 goes half-way back to the factor remembered, unless f is 1; else frozen.
        """
        if self.frozen or self.factor >= LARGEST:
            return FactorSchedule(factor=self.factor, remembered=self.remembered, frozen=True)
        ratio = movement_seconds / iteration_seconds if iteration_seconds > 0 else 0.0
        if ratio >= 0.2:
            return FactorSchedule(factor=2 * self.factor, remembered=self.factor)
        if ratio < 0.15 and self.factor != 1:
            middle = (self.factor + self.remembered) / 2
            return FactorSchedule(factor=middle, remembered=self.remembered)
        return FactorSchedule(factor=self.factor, remembered=self.remembered, frozen=True)
