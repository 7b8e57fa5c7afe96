"""Parameters of every sampler a plan may name, and the statistics class they give it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from runtime.errors import SamplerError
from runtime.plan.schema import Sampler
from runtime.sampling.statistics import (
    Draws,
    Estimator,
    Layer,
    StatisticsClass,
    statistics_class,
)

Value = int | float | str
E = TypeVar("E", bound=StrEnum)

_KAPPA: dict[str, Value] = {"kappa": 1, "dependence": "smooth", "layer_dependent": 0}

LAYERWISE = ("ladies", "pladies", "fastgcn")
"""Samplers that draw a layer for all vertices so far: the dialect every_hop."""

PARAMETERS: dict[str, dict[str, Value]] = {
    "full": {},
    "neighbor": {"draws": "without-replacement", "estimator": "plain", "weights": "none"},
    "labor": {
        "variant": 0, "form": "poisson", "tolerance": 1e-4, "estimator": "hajek", "weights": "none",
        **_KAPPA,
    },
    "ladies": {
        "sizes": "", "norm": "fro", "draws": "without-replacement",
        "estimator": "horvitz-thompson", "weights": "none", **_KAPPA,
    },
    "pladies": {
        "sizes": "", "norm": "fro", "draws": "poisson", "estimator": "horvitz-thompson",
        "weights": "none", **_KAPPA,
    },
    "fastgcn": {
        "sizes": "", "draws": "replacement", "estimator": "horvitz-thompson", "weights": "none"
    },
    "las": {
        "factor": 1, "schedule": "fixed", "correction": "replacement", "over": "neighbor",
        "sizes": "", "weights": "none",
    },
}  # fmt: skip
"""Parameters of each sampler with their defaults.

draws          without-replacement | replacement | poisson (`statistics.Draws`)
estimator      plain | horvitz-thompson | hajek
weights        none | graph: draw by the graph's edge_weight
variant        LABOR: 0, a number of passes, or star;  form: poisson | exact_k
tolerance      LABOR-*: it ends with the pass that gains less, relative to the expected new vertices
sizes          layer-wise: vertices per layer, next to the seeds first, as in "512,256"; empty takes
               the fan-outs;  norm: fro | count2
kappa          batches that hang together, or "inf";  dependence: smooth | frozen;  layer_dependent
               1: all hops draw alike
factor         LAS: preference for local vertices;  over: neighbor | ladies (with sizes)
schedule       LAS: fixed, or measured: the factor starts there and follows the share of data
               movement in each epoch (`locality_factor.FactorSchedule`)
correction     LAS: none | replacement | poisson | hajek; over LADIES, poisson and hajek draw as
               PLADIES does
"""


def parameters_of(sampler: Sampler) -> dict[str, Value]:
    """A plan's parameters with the defaults of the others.

    Raises:
        SamplerError: an unknown name or parameter.
    """
    if sampler.name not in PARAMETERS:
        raise SamplerError(
            f"expected a sampler among {', '.join(PARAMETERS)}, found {sampler.name!r}; choose one"
        )
    known = PARAMETERS[sampler.name]
    for key in sampler.parameters:
        if key not in known:
            raise SamplerError(
                f"sampler {sampler.name}: expected parameters among {', '.join(known) or 'none'}, "
                f"found {key!r}; drop it"
            )
    return known | sampler.parameters


def choice(name: str, values: Mapping[str, Value], kind: type[E], key: str) -> E:
    """A parameter of sampler `name` that is one of an enumeration.

    Raises:
        SamplerError: it is none of them.
    """
    value = str(values[key])
    if value not in list(kind):
        raise SamplerError(
            f"sampler {name}: expected {key} to be one of {', '.join(kind)}, found {value!r}; "
            "choose one"
        )
    return kind(value)


def number(name: str, values: Mapping[str, Value], key: str) -> float:
    """A parameter of sampler `name` that is a number, "inf" included.

    Raises:
        SamplerError: it is none.
    """
    try:
        return float(values[key])
    except ValueError:
        raise SamplerError(
            f"sampler {name}: expected {key} to be a number, found {values[key]!r}; correct it"
        ) from None


def class_of(sampler: Sampler, layer: Layer) -> StatisticsClass:
    """Statistics class of a plan's sampler under what its model's layers do.

    Raises:
        SamplerError: as `parameters_of`, or a value that cannot be used.
    """
    values = parameters_of(sampler)
    kappa = number(sampler.name, values, "kappa") if "kappa" in values else 1.0
    draws, estimator, unequal = _draws_and_weights(sampler.name, values)
    return statistics_class(
        sampler.name, estimator, layer, draws=draws, unequal=unequal, kappa=kappa
    )


def is_weighted(sampler: Sampler) -> bool:
    """Whether the blocks of a plan's sampler hold an estimator's edge weights.

    Raises:
        SamplerError: as `class_of`.
    """
    estimator = _draws_and_weights(sampler.name, parameters_of(sampler))[1]
    return sampler.name != "full" and estimator is not Estimator.PLAIN


def _draws_and_weights(
    name: str, values: Mapping[str, Value]
) -> tuple[Draws | None, Estimator, bool]:
    """How a sampler draws, how it weighs what is drawn, and whether chances in a row differ."""
    draws, estimator = None, Estimator.PLAIN
    unequal = values.get("weights", "none") != "none"
    if "estimator" in values:
        estimator = choice(name, values, Estimator, "estimator")
    if "draws" in values:
        draws = choice(name, values, Draws, "draws")
    if name == "las":
        from runtime.sampling.locality import Correction

        draws, estimator = choice(name, values, Correction, "correction").way
    if name == "labor":
        draws = Draws.POISSON if values["form"] == "poisson" else Draws.WITHOUT_REPLACEMENT
        unequal = unequal or values["variant"] != 0
    if name == "neighbor" and draws is Draws.WITHOUT_REPLACEMENT and not unequal:
        estimator = Estimator.PLAIN  # all weights are 1 / k, and the sampler gives none
    return draws, estimator, unequal
