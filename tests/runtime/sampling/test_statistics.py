"""The statistics class, case by case."""

import math

import pytest

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.statistics import (
    Draws,
    Estimator,
    Layer,
    StatisticsClass,
    is_correlated,
    layer_of_model,
    statistics_class,
)

EXACT, UNBIASED, APPROXIMATE = StatisticsClass
PLAIN, HT, HAJEK = Estimator
MEAN, SUM, OTHER = Layer
WITHOUT, REPLACEMENT, POISSON = Draws


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


# Sampler, draws, unequal probabilities, estimator -> class for a mean and for a weighted sum.
# After docs/formulas.md 1.6 and 5.1 to 5.4.
CASES = [
    # k independent uniform draws have the right mean, but are not the user's sampling.
    ("neighbor", REPLACEMENT, False, PLAIN, UNBIASED, UNBIASED),
    ("neighbor", REPLACEMENT, False, HT, UNBIASED, UNBIASED),
    ("neighbor", REPLACEMENT, False, HAJEK, UNBIASED, APPROXIMATE),
    # Weighted: the plain mean estimates sum q x, weights W/(k d w) correct it.
    ("neighbor", REPLACEMENT, True, PLAIN, APPROXIMATE, APPROXIMATE),
    ("neighbor", REPLACEMENT, True, HT, UNBIASED, UNBIASED),
    ("neighbor", REPLACEMENT, True, HAJEK, APPROXIMATE, APPROXIMATE),
    ("neighbor", WITHOUT, True, PLAIN, APPROXIMATE, APPROXIMATE),
    # Rank conditioning: each weight is exact given all the other ranks.
    ("neighbor", WITHOUT, True, HT, UNBIASED, UNBIASED),
    ("neighbor", WITHOUT, True, HAJEK, APPROXIMATE, APPROXIMATE),
    ("neighbor", POISSON, True, HT, UNBIASED, UNBIASED),
    ("neighbor", POISSON, False, HT, UNBIASED, UNBIASED),
    ("neighbor", POISSON, False, PLAIN, APPROXIMATE, APPROXIMATE),
    # A mean over the edges that Poisson LABOR kept divides by their varying number: Hajek.
    ("labor", POISSON, False, HT, UNBIASED, UNBIASED),
    ("labor", POISSON, False, PLAIN, APPROXIMATE, APPROXIMATE),
    ("labor", POISSON, False, HAJEK, APPROXIMATE, APPROXIMATE),
    ("labor", POISSON, True, HT, UNBIASED, UNBIASED),
    # Exact-k: uniform gives a plain mean, unequal pi only approximate inclusion probabilities.
    ("labor", WITHOUT, False, PLAIN, UNBIASED, UNBIASED),
    ("labor", WITHOUT, True, PLAIN, APPROXIMATE, APPROXIMATE),
    ("labor", WITHOUT, True, HT, APPROXIMATE, APPROXIMATE),
    ("labor", WITHOUT, True, HAJEK, APPROXIMATE, APPROXIMATE),
    ("ladies", REPLACEMENT, False, HT, UNBIASED, UNBIASED),
    ("ladies", REPLACEMENT, False, HAJEK, APPROXIMATE, APPROXIMATE),
    ("ladies", WITHOUT, False, HT, APPROXIMATE, APPROXIMATE),
    ("ladies", WITHOUT, False, HAJEK, APPROXIMATE, APPROXIMATE),
    ("pladies", POISSON, False, HT, UNBIASED, UNBIASED),
    ("pladies", POISSON, False, HAJEK, APPROXIMATE, APPROXIMATE),
    ("pladies", POISSON, False, PLAIN, APPROXIMATE, APPROXIMATE),
    ("fastgcn", REPLACEMENT, False, HT, UNBIASED, UNBIASED),
    ("fastgcn", REPLACEMENT, False, HAJEK, APPROXIMATE, APPROXIMATE),
    ("fastgcn", WITHOUT, False, HT, APPROXIMATE, APPROXIMATE),
    # Locality-aware: uncorrected is the published reference code's way.
    ("las", WITHOUT, False, PLAIN, APPROXIMATE, APPROXIMATE),
    ("las", REPLACEMENT, False, HT, UNBIASED, UNBIASED),
    ("las", REPLACEMENT, False, PLAIN, APPROXIMATE, APPROXIMATE),
    ("las", POISSON, False, HT, UNBIASED, UNBIASED),
    ("las", POISSON, False, HAJEK, APPROXIMATE, APPROXIMATE),
]


@pytest.mark.parametrize(("sampler", "draws", "unequal", "estimator", "mean", "total"), CASES)
def test_class_of_each_sampler_and_estimator(
    sampler: str,
    draws: Draws,
    unequal: bool,
    estimator: Estimator,
    mean: StatisticsClass,
    total: StatisticsClass,
) -> None:
    found = [
        statistics_class(sampler, estimator, layer, draws=draws, unequal=unequal) for layer in Layer
    ]
    # Attention over sampled edges is approximate for all but the user's own sampling.
    assert found == [mean, total, APPROXIMATE]


@pytest.mark.parametrize(
    ("sampler", "estimator", "expected"),
    [
        ("labor", HT, UNBIASED),
        ("ladies", HT, APPROXIMATE),
        ("pladies", HT, UNBIASED),
        ("fastgcn", HT, UNBIASED),
        ("las", PLAIN, APPROXIMATE),
    ],
)
def test_each_sampler_has_its_own_way_of_drawing(
    sampler: str, estimator: Estimator, expected: StatisticsClass
) -> None:
    assert statistics_class(sampler, estimator, MEAN) is expected


def test_dependent_batches_are_unbiased_at_best_and_flagged() -> None:
    assert statistics_class("neighbor", PLAIN, MEAN, kappa=1) is EXACT
    assert statistics_class("neighbor", PLAIN, MEAN, kappa=16) is UNBIASED
    assert statistics_class("labor", HT, MEAN, kappa=16) is UNBIASED
    assert statistics_class("labor", HAJEK, MEAN, kappa=16) is APPROXIMATE
    assert [is_correlated(kappa) for kappa in (1, 2, math.inf)] == [False, True, True]


def test_frozen_samples_are_approximate_unless_nothing_is_drawn() -> None:
    assert statistics_class("neighbor", PLAIN, MEAN, kappa=math.inf) is APPROXIMATE
    assert statistics_class("labor", HT, MEAN, kappa=math.inf) is APPROXIMATE
    assert statistics_class("full", PLAIN, MEAN, kappa=math.inf) is EXACT


@pytest.mark.parametrize("kappa", [0.5, 0, -1, math.nan])
def test_kappa_below_one_is_refused(kappa: int | float) -> None:
    with pytest.raises(SamplerError, match="kappa of at least 1") as caught:
        statistics_class("labor", HT, MEAN, kappa=kappa)
    assert "\n" not in str(caught.value)
