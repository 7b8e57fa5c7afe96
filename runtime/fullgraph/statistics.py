"""What the settings of full-graph training do to training statistics (docs/formulas.md 3.3)."""

from runtime.plan import FullGraph
from runtime.sampling.statistics import StatisticsClass

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
