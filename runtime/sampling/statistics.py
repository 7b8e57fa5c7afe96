"""How far a way of sampling may change training statistics: exact, unbiased or approximate.

The class belongs to the triple (sampler, estimator, consuming layer) and is computed here alone.

- exact: each seed's sampled tree has the marginal law of uniform neighbour sampling with the user's
  fan-outs, and the layer sees it as the user's own sampler would show it.
- unbiased: every layer's aggregation is unbiased given its inputs; of the gradient nothing is said.
- approximate: all else.
"""

import math
from enum import StrEnum

from runtime.errors import SamplerError
from runtime.plan.schema import FullGraph


class StatisticsClass(StrEnum):
    """From the strictest to the loosest."""

    EXACT = "exact"
    UNBIASED = "unbiased"
    APPROXIMATE = "approximate"

    def allows(self, other: "StatisticsClass") -> bool:
        """Whether a user who allows this class may be given `other`."""
        order = list(StatisticsClass)
        return order.index(other) <= order.index(self)


class Estimator(StrEnum):
    """How the edges that were drawn stand for those that were not."""

    PLAIN = "plain"
    """The layer's own aggregation over the drawn edges (plain mean, attention, GCN's weights)."""
    HORVITZ_THOMPSON = "horvitz-thompson"
    """Edge weight A / pi, pi the probability that the edge is drawn (k q for k draws of law q)."""
    HAJEK = "hajek"
    """Horvitz-Thompson weights divided by their sum over the row."""


class Draws(StrEnum):
    """How the edges of a row, or the vertices of a layer, are drawn."""

    WITHOUT_REPLACEMENT = "without-replacement"
    """A fixed number of different ones."""
    REPLACEMENT = "replacement"
    """A fixed number of independent draws; the same one may come twice."""
    POISSON = "poisson"
    """Each by itself with its own probability; the number varies."""


class Layer(StrEnum):
    """What consumes a block, by what matters here."""

    MEAN = "mean"
    """A mean over in-neighbours: SAGE, and R-GCN per relation."""
    WEIGHTED_SUM = "weighted-sum"
    """A sum with weights fixed by the graph: GCN with full-graph degrees."""
    OTHER = "other"
    """Not linear in the neighbours: attention, max, normalisation by sampled degrees."""


_LAYERS = {"sage": Layer.MEAN, "rgcn": Layer.MEAN, "gcn": Layer.WEIGHTED_SUM, "gat": Layer.OTHER}

DEFAULT_DRAWS = {
    "full": Draws.WITHOUT_REPLACEMENT,
    "neighbor": Draws.WITHOUT_REPLACEMENT,
    "labor": Draws.POISSON,
    "ladies": Draws.WITHOUT_REPLACEMENT,
    "pladies": Draws.POISSON,
    "fastgcn": Draws.REPLACEMENT,
    "las": Draws.WITHOUT_REPLACEMENT,
}
"""How each sampler draws where nothing else is said."""

_UNEQUAL = ("ladies", "pladies", "fastgcn", "las")
"""Samplers that draw some neighbours more often than others by their nature."""

_RANK_CONDITIONED = ("neighbor", "las")
"""Samplers whose Horvitz-Thompson weights without replacement are exact (see `weighted`)."""


def layer_of_model(model: str) -> Layer:
    """The kind of layer of a workload's model; a user's own model counts as not linear."""
    return _LAYERS.get(model, Layer.OTHER)


def statistics_class(
    sampler: str,
    estimator: Estimator,
    layer: Layer,
    *,
    draws: Draws | None = None,
    unequal: bool = False,
    kappa: int | float = 1,
) -> StatisticsClass:
    """Class of a sampler whose estimate a layer consumes.

    Every edge of a row is drawn with the same probability k/d by uniform neighbour sampling, so for
    a mean its Horvitz-Thompson weight (1/d)(d/k) and its Hajek weight are both 1/k, the plain mean.

    Args:
        sampler: `neighbor`, `full` (all neighbours), `labor`, `ladies`, `pladies`, `fastgcn` or
            `las` (locality-aware neighbour sampling; over LADIES it has LADIES' class).
        estimator: How drawn edges are weighted.
        layer: What consumes the block.
        draws: How they are drawn; None is the sampler's own way (`DEFAULT_DRAWS`). Exact-k LABOR is
            without replacement.
        unequal: Probabilities within a row differ: edge weights, LABOR with iterations. LADIES,
            PLADIES, FastGCN and LAS always count as such.
        kappa: Batches over which draws move to fresh ones; 1 is independent, infinite is frozen.

    Raises:
        SamplerError: unknown sampler, or kappa below 1.
    """
    if sampler not in DEFAULT_DRAWS:
        raise SamplerError(
            f"expected a sampler among {', '.join(DEFAULT_DRAWS)}, found {sampler!r}; choose one"
        )
    correlated = is_correlated(kappa)
    draws = DEFAULT_DRAWS[sampler] if draws is None else Draws(draws)
    unequal = unequal or sampler in _UNEQUAL
    if sampler == "full":
        return StatisticsClass.EXACT
    if math.isinf(kappa):
        return StatisticsClass.APPROXIMATE
    if sampler == "neighbor" and draws is Draws.WITHOUT_REPLACEMENT and not unequal:
        found = _uniform(estimator, layer)
    elif _is_unbiased(sampler, estimator, layer, draws, unequal):
        found = StatisticsClass.UNBIASED
    else:
        found = StatisticsClass.APPROXIMATE
    if correlated and found is StatisticsClass.EXACT:
        return StatisticsClass.UNBIASED
    return found


def is_correlated(kappa: int | float) -> bool:
    """Whether successive batches share randomness: the flag beside the class of kappa > 1.

    Raises:
        SamplerError: kappa below 1 or no number.
    """
    if not kappa >= 1:
        raise SamplerError(
            f"expected kappa of at least 1 (1: independent batches), found {kappa}; raise it"
        )
    return kappa > 1


def _uniform(estimator: Estimator, layer: Layer) -> StatisticsClass:
    """The user's own sampling: exact as it is, and under weights that equal the plain mean."""
    if estimator is Estimator.PLAIN or layer is Layer.MEAN:
        return StatisticsClass.EXACT
    if estimator is Estimator.HORVITZ_THOMPSON and layer is Layer.WEIGHTED_SUM:
        return StatisticsClass.UNBIASED
    return StatisticsClass.APPROXIMATE


def _is_unbiased(
    sampler: str, estimator: Estimator, layer: Layer, draws: Draws, unequal: bool
) -> bool:
    """Whether a linear layer's aggregation over the drawn edges is right on average."""
    if layer is Layer.OTHER:
        return False
    if estimator is Estimator.HORVITZ_THOMPSON:
        # A fixed number without replacement has no simple inclusion probability to divide by.
        known = not unequal or draws is not Draws.WITHOUT_REPLACEMENT
        return known or sampler in _RANK_CONDITIONED
    # Of equal probabilities and a fixed number all weights are 1/k; else they are a ratio.
    fixed = draws is not Draws.POISSON and not unequal
    return fixed and (estimator is Estimator.PLAIN or layer is Layer.MEAN)


SAFE_SHARED_LAYERS = 2
"""Exchanging layers up to which one shared draw is unbiased, end to end, for a linear net: from
three on the path v -> u -> v -> u uses the draw of v twice [C11]."""


def full_graph_class(settings: FullGraph, model: str, num_layers: int) -> StatisticsClass:
    """Class of the aggregations of a model's layers.

    exact: nothing is dropped. unbiased: 1/p with draws of each layer's own, or a shared one over
    at most two exchanging layers. approximate: all else, also p = 0 and attention, whose softmax
    renormalises what is left.
    """
    if settings.keep >= 1:
        return StatisticsClass.EXACT
    if settings.keep <= 0 or model not in ("sage", "gcn"):
        return StatisticsClass.APPROXIMATE
    exchanging = num_layers - (1 if settings.precompute_first_layer else 0)
    if settings.draws == "shared" and exchanging > SAFE_SHARED_LAYERS:
        return StatisticsClass.APPROXIMATE
    return StatisticsClass.UNBIASED
