"""Say how far a way of sampling may change training statistics: exact, unbiased or approximate.

The class belongs to the triple (sampler, estimator, consuming layer) and is computed here alone.

- exact: each seed's sampled tree has the marginal law of uniform neighbour sampling with the user's
  fan-outs, and the layer sees it as the user's own sampler would show it.
- unbiased: every layer's aggregation is unbiased given its inputs; of the gradient nothing is said.
- approximate: all else.
"""

import math
from enum import StrEnum

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import FullGraph, Sampler
from gnnplan.runtime.sampling.registry import (
    Draws,
    Estimator,
    SamplerSpec,
    find_sampler,
    law_of,
    number,
    parameters_of,
)


class StatisticsClass(StrEnum):
    """Classes of statistics, from the strictest to the loosest."""

    EXACT = "exact"
    UNBIASED = "unbiased"
    APPROXIMATE = "approximate"

    def allows(self, other: "StatisticsClass") -> bool:
        """Tell whether a user who allows this class may be given `other`."""
        order = list(StatisticsClass)
        return order.index(other) <= order.index(self)


class Layer(StrEnum):
    """Kinds of layers that consume a block."""

    MEAN = "mean"
    """A mean over in-neighbours: SAGE, and R-GCN per relation."""
    WEIGHTED_SUM = "weighted-sum"
    """A sum with weights fixed by the graph: GCN with full-graph degrees."""
    OTHER = "other"
    """Not linear in the neighbours: attention, max, normalisation by sampled degrees."""


_LAYERS = {"sage": Layer.MEAN, "rgcn": Layer.MEAN, "gcn": Layer.WEIGHTED_SUM, "gat": Layer.OTHER}


def layer_of_model(model: str) -> Layer:
    """Return the kind of layer of a workload's model; a user's own model counts as not linear."""
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
    """Return the class of a sampler whose estimate a layer consumes.

    Uniform neighbour sampling draws every edge of a row with probability k/d, so for a mean its
    Horvitz-Thompson weight (1/d)(d/k) and its Hajek weight are both 1/k, the plain mean.

    `draws` are the sampler's own without them; exact-k LABOR draws without replacement. `unequal`
    tells that chances within a row differ, by edge weights or LABOR's iterations. `kappa` is the
    number of batches over which draws move to fresh ones: 1 is independent, infinite is frozen.
    Locality-aware sampling over LADIES has LADIES' class.
    """
    spec = find_sampler(sampler)
    correlated = is_correlated(kappa)
    draws = spec.draws if draws is None else Draws(draws)
    unequal = unequal or spec.unequal
    if spec.takes_all:
        return StatisticsClass.EXACT
    if math.isinf(kappa):
        return StatisticsClass.APPROXIMATE
    if spec.is_baseline and draws is Draws.WITHOUT_REPLACEMENT and not unequal:
        found = _uniform(estimator, layer)
    elif _is_unbiased(spec, estimator, layer, draws, unequal):
        found = StatisticsClass.UNBIASED
    else:
        found = StatisticsClass.APPROXIMATE
    if correlated and found is StatisticsClass.EXACT:
        return StatisticsClass.UNBIASED
    return found


def class_of(sampler: Sampler, layer: Layer) -> StatisticsClass:
    """Return the class of a plan's sampler under what its model's layers do."""
    values, law = parameters_of(sampler), law_of(sampler)
    kappa = number(sampler.name, values, "kappa") if "kappa" in values else 1.0
    return statistics_class(
        sampler.name, law.estimator, layer, draws=law.draws, unequal=law.unequal, kappa=kappa
    )


def is_weighted(sampler: Sampler) -> bool:
    """Tell whether the blocks of a plan's sampler hold an estimator's edge weights."""
    return law_of(sampler).estimator is not Estimator.PLAIN


def is_correlated(kappa: int | float) -> bool:
    """Tell whether successive batches share draws: kappa above 1; below it is refused."""
    if not kappa >= 1:
        raise SamplerError(
            f"expected kappa of at least 1 (1: independent batches), found {kappa}; raise it"
        )
    return kappa > 1


def _uniform(estimator: Estimator, layer: Layer) -> StatisticsClass:
    """Return the class of the user's own sampling, exact where weights equal the plain mean."""
    if estimator is Estimator.PLAIN or layer is Layer.MEAN:
        return StatisticsClass.EXACT
    if estimator is Estimator.HORVITZ_THOMPSON and layer is Layer.WEIGHTED_SUM:
        return StatisticsClass.UNBIASED
    return StatisticsClass.APPROXIMATE


def _is_unbiased(
    spec: SamplerSpec, estimator: Estimator, layer: Layer, draws: Draws, unequal: bool
) -> bool:
    """Tell whether a linear layer's aggregation over the drawn edges is right on average."""
    if layer is Layer.OTHER:
        return False
    if estimator is Estimator.HORVITZ_THOMPSON:
        # A fixed number without replacement has no simple inclusion probability to divide by.
        known = not unequal or draws is not Draws.WITHOUT_REPLACEMENT
        return known or spec.exact_weights
    # Of equal probabilities and a fixed number all weights are 1/k; else they are a ratio.
    fixed = draws is not Draws.POISSON and not unequal
    return fixed and (estimator is Estimator.PLAIN or layer is Layer.MEAN)


SAFE_SHARED_LAYERS = 2
"""Exchanging layers up to which one shared draw is unbiased for a linear net: from three on the
path v -> u -> v -> u uses the draw of v twice [C11]."""


def full_graph_class(settings: FullGraph, model: str, num_layers: int) -> StatisticsClass:
    """Return the class of the aggregations of a model's layers in full-graph training.

    exact: nothing is dropped. unbiased: 1/p with draws of each layer's own, or a shared one over at
    most two exchanging layers, of DropEdge over one: a path may pass a self-loop twice.
    approximate: all else, also p = 0 and attention, whose softmax renormalises what is left.
    """
    if settings.keep >= 1:
        return StatisticsClass.EXACT
    if settings.keep <= 0 or model not in ("sage", "gcn"):
        return StatisticsClass.APPROXIMATE
    exchanging = num_layers - (1 if settings.precompute_first_layer else 0)
    safe = 1 if settings.drop == "edges" else SAFE_SHARED_LAYERS
    if settings.draws == "shared" and exchanging > safe:
        return StatisticsClass.APPROXIMATE
    return StatisticsClass.UNBIASED
