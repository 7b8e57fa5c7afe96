"""Locality-aware sampling (LAS): neighbours whose features are near are drawn more often.

The weight of a source in the local set of its hop is multiplied by a factor f >= 1 (formulas 1.6,
after Song and Jiang, ICS 2022). Loc^0, of the hop next to the input features, is what this device
holds; Loc^(h+1) = Loc^h united with N(Loc^h) is for the hop nearer to the seeds: a vertex drawn
there has local vertices near it. As Loc only grows, `ring[v]`, the smallest h with v in Loc^h, says
it all. Uncorrected, a mean over the neighbours is biased towards local ones; see `Correction`.
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
from gnnplan.runtime.sampling.neighbor import Boost, WeightedSampler
from gnnplan.runtime.sampling.statistics import Draws, Estimator

FAR = 255
"""Ring of a vertex in no local set."""


class Correction(StrEnum):
    """How edges are drawn and weighted, by boosted weights w that sum to W over a row's d edges."""

    NONE = "none"
    """k different neighbours by successive sampling, plain mean: the published code's, biased."""
    REPLACEMENT = "replacement"
    """k draws with replacement, each weighted W / (k d w): unbiased."""
    POISSON = "poisson"
    """Each neighbour with pi = min(1, c w), sum pi = k, weighted 1 / (d pi): unbiased."""
    HAJEK = "hajek"
    """Poisson's draws, weighted (1 / pi) / sum (1 / pi): bounded, a bias of order 1 / k."""

    @property
    def way(self) -> tuple[Draws, Estimator]:
        """Return the draws and the estimator, as `WeightedSampler` takes them."""
        return _WAYS[self]


_WAYS = {
    Correction.NONE: (Draws.WITHOUT_REPLACEMENT, Estimator.PLAIN),
    Correction.REPLACEMENT: (Draws.REPLACEMENT, Estimator.HORVITZ_THOMPSON),
    Correction.POISSON: (Draws.POISSON, Estimator.HORVITZ_THOMPSON),
    Correction.HAJEK: (Draws.POISSON, Estimator.HAJEK),
}


class LocalitySampler(WeightedSampler):
    """Samples neighbours with a preference for local vertices.

    Args (others as in `WeightedSampler`):
        local: Global ids of the vertices that are local (Loc^0): this device's or its clique's.
        factor: f, at least 1; validation samples with 1.
        correction: How the preference is corrected.
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
    """Return the factor as a float; it must be finite and at least 1."""
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
    """Return the smallest h < num_hops with v in Loc^h, else `FAR`; uint8 [N], read-only.

    N(Loc) are the in-neighbours of Loc's vertices. `local` are the global ids of Loc^0; ids out of
    range are refused.
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
"""Factor at which the published schedule stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorSchedule:
    """The published schedule of f: doubled while data movement is a large part of an iteration."""

    factor: float = 1.0
    remembered: float = 1.0
    """Factor before the last doubling."""
    frozen: bool = False

    def after_epoch(self, movement_seconds: float, iteration_seconds: float) -> "FactorSchedule":
        """Return the schedule for the next epoch.

        With r = movement / iteration: frozen once f >= 8; r >= 0.2 remembers f and doubles it; r <
        0.15 goes half-way back to the factor remembered, unless f is 1; else frozen.
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
