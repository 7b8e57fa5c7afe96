"""The statistics class, case by case."""

import pytest

from runtime.errors import SamplerError
from runtime.sampling.statistics import (
    Estimator,
    Layer,
    StatisticsClass,
    layer_of_model,
    statistics_class,
)

EXACT, UNBIASED, APPROXIMATE = StatisticsClass
PLAIN, HT, HAJEK = Estimator
MEAN, SUM, OTHER = Layer


@pytest.mark.parametrize(
    ("estimator", "layer", "expected"),
    [
        (PLAIN, MEAN, EXACT),
        (PLAIN, SUM, EXACT),
        (PLAIN, OTHER, EXACT),
        # (1/d)(d/k) = 1/k: the plain mean.
        (HT, MEAN, EXACT),
        (HAJEK, MEAN, EXACT),
        (HT, SUM, UNBIASED),
        # A ratio of two estimates.
        (HAJEK, SUM, APPROXIMATE),
        # The softmax of weighted terms is not the weighted softmax.
        (HT, OTHER, APPROXIMATE),
        (HAJEK, OTHER, APPROXIMATE),
    ],
)
def test_class_of_uniform_neighbour_sampling(
    estimator: Estimator, layer: Layer, expected: StatisticsClass
) -> None:
    assert statistics_class("neighbor", estimator, layer) is expected


@pytest.mark.parametrize("estimator", list(Estimator))
@pytest.mark.parametrize("layer", list(Layer))
def test_full_neighbourhoods_are_exact(estimator: Estimator, layer: Layer) -> None:
    assert statistics_class("full", estimator, layer) is EXACT


def test_unknown_samplers_are_refused() -> None:
    with pytest.raises(SamplerError, match="found 'labour'"):
        statistics_class("labour", PLAIN, MEAN)


def test_models_are_known_by_what_their_layers_do() -> None:
    found = [layer_of_model(model) for model in ("sage", "rgcn", "gcn", "gat", "mine:make")]
    assert found == [MEAN, MEAN, SUM, OTHER, OTHER]


def test_a_looser_class_allows_the_stricter_ones() -> None:
    assert UNBIASED.allows(EXACT)
    assert UNBIASED.allows(UNBIASED)
    assert not UNBIASED.allows(APPROXIMATE)
