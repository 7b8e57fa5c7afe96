"""How far a way of sampling may change training statistics: exact, unbiased or approximate.

The class belongs to the triple (sampler, estimator, consuming layer) and is computed here alone.

- exact: each seed's sampled tree has the marginal law of uniform neighbour sampling with the user's
  fan-outs, and the layer sees it as the user's own sampler would show it.
- unbiased: every layer's aggregation is unbiased given its inputs; of the gradient nothing is said.
- approximate: all else.
"""

from enum import StrEnum

from runtime.errors import SamplerError


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
    """Edge weight A / pi, pi the probability that the edge is drawn."""
    HAJEK = "hajek"
    """Horvitz-Thompson weights divided by their sum over the row."""


class Layer(StrEnum):
    """What consumes a block, by what matters here."""

    MEAN = "mean"
    """A mean over in-neighbours: SAGE, and R-GCN per relation."""
    WEIGHTED_SUM = "weighted-sum"
    """A sum with weights fixed by the graph: GCN with full-graph degrees."""
    OTHER = "other"
    """Not linear in the neighbours: attention, max, normalisation by sampled degrees."""


_LAYERS = {"sage": Layer.MEAN, "rgcn": Layer.MEAN, "gcn": Layer.WEIGHTED_SUM, "gat": Layer.OTHER}
_SAMPLERS = ("neighbor", "full")


def layer_of_model(model: str) -> Layer:
    """The kind of layer of a workload's model; a user's own model counts as not linear."""
    return _LAYERS.get(model, Layer.OTHER)


def statistics_class(sampler: str, estimator: Estimator, layer: Layer) -> StatisticsClass:
    """Class of a sampler whose estimate a layer consumes.

    Every edge of a row is drawn with the same probability k/d by uniform neighbour sampling, so for
    a mean its Horvitz-Thompson weight (1/d)(d/k) and its Hajek weight are both 1/k, the plain mean.

    Args:
        sampler: `neighbor` (uniform, without replacement) or `full` (all neighbours).
        estimator: How drawn edges are weighted.
        layer: What consumes the block.

    Raises:
        SamplerError: unknown sampler.
    """
    if sampler not in _SAMPLERS:
        raise SamplerError(
            f"expected a sampler among {', '.join(_SAMPLERS)}, found {sampler!r}; choose one"
        )
    if sampler == "full" or estimator is Estimator.PLAIN or layer is Layer.MEAN:
        return StatisticsClass.EXACT
    if estimator is Estimator.HORVITZ_THOMPSON and layer is Layer.WEIGHTED_SUM:
        return StatisticsClass.UNBIASED
    return StatisticsClass.APPROXIMATE
