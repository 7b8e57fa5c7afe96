"""A rank's own seconds per epoch for any p and way of drawing, from the cases that were timed.

p = 1 is timed itself. Below, each quantity q is linear in p through its two anchors a < b:
    q(p) = q(a) + (p - a) / (b - a) (q(b) - q(a)), never below 0
A first layer that is computed once takes away what it took away at p = 1, by the edges that are
left: (E_in + p E_halo) / (E_in + E_halo), and its draw.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.cost.full_graph import PartSizes
from planner.fullgraph.profile import ANCHORS, CutProfile
from planner.fullgraph.request import CaseSeconds
from runtime.plan import FullGraph


def rank_seconds(profile: CutProfile, settings: FullGraph) -> list[CaseSeconds]:
    """Seconds of every rank of a cut.

    Args:
        profile: with the cases that the settings need.
        settings: p, draws, rounding, first layer.

    Raises:
        KeyError: such draws were not timed.
    """
    if settings.keep >= 1:
        whole = FullGraph(precompute_first_layer=settings.precompute_first_layer)
        return _timed(profile, whole)
    plain = replace(settings, rounding="bernoulli", precompute_first_layer=False)
    low, high = (_timed(profile, replace(plain, keep=a)) for a in ANCHORS)
    found = [_between(a, b, settings.keep) for a, b in zip(low, high, strict=True)]
    if settings.rounding == "stochastic":
        rounded = [
            _timed(profile, replace(plain, keep=a, rounding="stochastic"), draws_only=True)
            for a in ANCHORS
        ]
        drawn = [_between(a, b, settings.keep).sample for a, b in zip(*rounded, strict=True)]
        found = [replace(f, sample=s) for f, s in zip(found, drawn, strict=True)]
    if settings.precompute_first_layer:
        found = _without_first(profile, settings, found)
    return found


def _timed(
    profile: CutProfile, settings: FullGraph, *, draws_only: bool = False
) -> list[CaseSeconds]:
    """What was measured of a case, by rank."""
    for place, case in enumerate(profile.cases):
        if case.settings == settings and case.draws_only == draws_only:
            return [answer.cases[place] for answer in profile.ranks]
    raise KeyError(f"{profile.cut.name}: {settings} was not timed")


def _between(low: CaseSeconds, high: CaseSeconds, keep: float) -> CaseSeconds:
    share = (keep - ANCHORS[0]) / (ANCHORS[1] - ANCHORS[0])

    def line(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    return CaseSeconds(
        sample=line(low.sample, high.sample),
        forward_backward=line(low.forward_backward, high.forward_backward),
        packing=line(low.packing, high.packing),
        windows=[line(a, b) for a, b in zip(low.windows, high.windows, strict=True)],
        spread=max(low.spread, high.spread),
    )


def _without_first(
    profile: CutProfile, settings: FullGraph, found: list[CaseSeconds]
) -> list[CaseSeconds]:
    """Less what the first layer's sums and its exchange take."""
    layers = len(profile.widths) - 1
    whole, known = (
        _timed(profile, FullGraph()),
        _timed(profile, FullGraph(precompute_first_layer=True)),
    )
    # A draw per layer is one less; a shared one is drawn once in either case.
    drawn = 1.0 if settings.draws == "shared" else (layers - 1) / layers
    left: list[CaseSeconds] = []
    for now, all_, less, sizes in zip(found, whole, known, profile.sizes, strict=True):
        share = edges_left(sizes, settings.keep)

        def reduced(
            pick: Callable[[CaseSeconds], float],
            now: CaseSeconds = now, all_: CaseSeconds = all_, less: CaseSeconds = less,
            share: float = share,
        ) -> float:  # fmt: skip
            return max(0.0, pick(now) - share * max(0.0, pick(all_) - pick(less)))

        left.append(
            replace(
                now,
                sample=now.sample * drawn,
                forward_backward=reduced(lambda c: c.forward_backward),
                packing=reduced(lambda c: c.packing),
                windows=now.windows[1:],
            )
        )
    return left


def edges_left(sizes: PartSizes, keep: float) -> float:
    """Share of a part's edges that an epoch aggregates over.

    >>> edges_left(PartSizes(inner=1, halo=1, sent=1, inner_edges=30, halo_edges=10), 0.2)
    0.8
    """
    whole = sizes.inner_edges + sizes.halo_edges
    return 1.0 if whole == 0 else (sizes.inner_edges + keep * sizes.halo_edges) / whole
