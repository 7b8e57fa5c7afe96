"""From a plan's `strategy.sampler` to the sampler; modules of others are not imported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.errors import SamplerError
from runtime.plan.schema import Sampler
from runtime.sampling.minibatch import Dialect, MiniBatch
from runtime.sampling.parameters import Value, choice, number, parameters_of
from runtime.sampling.statistics import Draws, Estimator

E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SamplerRequest:
    """All that a sampler may be made of, on the host or on a device (`build_device`)."""

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]
    fanouts: Sequence[int]
    seed: int
    dialect: Dialect
    edge_ids: bool
    edge_weight: NDArray[np.floating] | None
    local: NDArray[np.integer]
    steps_per_epoch: int | None
    name: str
    values: dict[str, Value]

    def choice(self, kind: type[E], key: str) -> E:
        """A parameter that is one of an enumeration."""
        return choice(self.name, self.values, kind, key)

    def number(self, key: str) -> float:
        """A parameter that is a number."""
        return number(self.name, self.values, key)

    def sizes(self) -> list[int]:
        """Vertices per layer; the fan-outs where the plan names none."""
        text = str(self.values["sizes"])
        try:
            sizes = [int(part) for part in text.split(",")] if text else list(self.fanouts)
        except ValueError:
            raise SamplerError(
                f"sampler {self.name}: expected sizes as in '512,256', found {text!r}; correct them"
            ) from None
        if len(sizes) != len(self.fanouts):
            raise SamplerError(
                f"sampler {self.name}: expected {len(self.fanouts)} sizes (one per layer), found "
                f"{text!r}; correct them"
            )
        return sizes

    def over_ladies(self) -> bool:
        """Whether `las` draws layers, not neighbours."""
        if self.values["over"] not in ("neighbor", "ladies"):
            raise SamplerError(
                f"sampler las: expected over to be neighbor or ladies, found "
                f"{self.values['over']!r}; choose one"
            )
        return self.values["over"] == "ladies"

    def variant(self) -> int | float | str:
        """LABOR's; what is no whole number is left for the sampler to refuse."""
        if self.values["variant"] == "star":
            return "star"
        passes = self.number("variant")
        return int(passes) if passes.is_integer() else passes


def sampler_request(
    sampler: Sampler,
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seed: int,
    *,
    edge_ids: bool,
    edge_weight: NDArray[np.floating] | None,
    local: NDArray[np.integer] | None,
    steps_per_epoch: int | None,
) -> SamplerRequest:
    """What a plan asks for, checked; arguments and errors as in `build_sampler`."""
    values = parameters_of(sampler)
    weighted = values.get("weights", "none") != "none"
    if weighted and (values["weights"] != "graph" or edge_weight is None):
        raise SamplerError(
            f"sampler {sampler.name}: expected weights none, or graph with a graph that has "
            f"edge_weight, found {values['weights']!r}; correct it or import the weights"
        )
    return SamplerRequest(
        indptr=indptr,
        indices=indices,
        fanouts=fanouts,
        seed=seed,
        dialect=Dialect(sampler.dialect),
        edge_ids=edge_ids,
        edge_weight=edge_weight if weighted else None,
        local=np.zeros(0, dtype=np.int64) if local is None else local,
        steps_per_epoch=steps_per_epoch,
        name=sampler.name,
        values=values,
    )


def check_every_hop(r: SamplerRequest) -> None:
    """Refuse the first_seen dialect for layers.

    Raises:
        SamplerError: it is asked for.
    """
    if r.dialect is not Dialect.EVERY_HOP:
        raise SamplerError(
            f"sampler {r.name}: expected dialect every_hop (a layer is drawn for all vertices so "
            f"far), found {r.dialect.value}; plan with every_hop"
        )


def labor_settings(r: SamplerRequest) -> dict[str, Any]:
    """Of `LaborSampler`, beside the graph and its edge ids."""
    from runtime.sampling.dependent import Dependence
    from runtime.sampling.labor import Form

    return {
        "variant": r.variant(),
        "form": r.choice(Form, "form"),
        "tolerance": r.number("tolerance"),
        "estimator": r.choice(Estimator, "estimator"),
        "dialect": r.dialect,
        "seed": r.seed,
        "kappa": r.number("kappa"),
        "dependence": r.choice(Dependence, "dependence"),
        "layer_dependent": bool(r.number("layer_dependent")),
        "steps_per_epoch": r.steps_per_epoch,
        "edge_weight": r.edge_weight,
    }


def layer_settings(r: SamplerRequest) -> dict[str, Any]:
    """Of `LayerwiseSampler` for ladies, pladies and fastgcn, beside the graph and its edge ids.

    Raises:
        SamplerError: the first_seen dialect, or sizes that cannot be used.
    """
    from runtime.sampling.dependent import Dependence, StreamPolicy

    check_every_hop(r)
    policy = None
    if "kappa" in r.values and (r.number("kappa") != 1 or r.number("layer_dependent")):
        policy = StreamPolicy(
            seed=r.seed,
            kappa=r.number("kappa"),
            dependence=r.choice(Dependence, "dependence"),
            layer_dependent=bool(r.number("layer_dependent")),
            steps_per_epoch=r.steps_per_epoch,
        )
    return {
        "sizes": r.sizes(),
        "method": r.name,
        "norm": str(r.values.get("norm", "fro")),
        "replace": r.choice(Draws, "draws") is Draws.REPLACEMENT,
        "estimator": r.choice(Estimator, "estimator"),
        "edge_weight": r.edge_weight,
        "seed": r.seed,
        "policy": policy,
    }


def local_layer_settings(r: SamplerRequest) -> dict[str, Any]:
    """Of `LayerwiseSampler` for las over ladies, as `layer_settings`."""
    from runtime.sampling.locality import Correction, check_factor, rings
    from runtime.sampling.weighted import Boost

    check_every_hop(r)
    draws, estimator = r.choice(Correction, "correction").way
    factor, sizes = check_factor(r.number("factor")), r.sizes()
    return {
        "sizes": sizes,
        "method": "pladies" if draws is Draws.POISSON else "ladies",
        "replace": draws is Draws.REPLACEMENT,
        "estimator": estimator,
        "edge_weight": r.edge_weight,
        "seed": r.seed,
        "boost": Boost(rings(r.indptr, r.indices, r.local, len(sizes)), factor),
    }


@runtime_checkable
class BatchSampler(Protocol):
    """What every sampler offers."""

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> MiniBatch:
        """Sample the blocks of one batch; any thread may call it."""
        ...


def build_sampler(
    sampler: Sampler,
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seed: int,
    *,
    edge_ids: bool = False,
    edge_weight: NDArray[np.floating] | None = None,
    local: NDArray[np.integer] | None = None,
    steps_per_epoch: int | None = None,
) -> BatchSampler:
    """The sampler that a plan names.

    Args:
        sampler: From the plan: name, dialect, parameters (`parameters.PARAMETERS`).
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        fanouts: Neighbours per hop, next to the seeds first; `full` counts them only.
        seed: The run's seed.
        edge_ids: Fill each block's `e_id`.
        edge_weight: The graph's, float [E], or None.
        local: Global ids of the vertices whose rows this rank holds, for `las`; None: none.
        steps_per_epoch: Lets dependent batches run on over the ends of epochs.

    Raises:
        SamplerError: an unknown name or parameter, or a value that cannot be used.
    """
    request = sampler_request(
        sampler, indptr, indices, fanouts, seed, edge_ids=edge_ids, edge_weight=edge_weight,
        local=local, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    if sampler.name not in _MAKERS:
        raise SamplerError(
            f"expected a sampler among {', '.join(_MAKERS)}, found {sampler.name!r}; choose one, "
            "or add how it is made (runtime/sampling/HOWTO_add_a_sampler.md)"
        )
    return _MAKERS[sampler.name](request)


def _make_full(r: SamplerRequest) -> BatchSampler:
    from runtime.sampling.neighbor import full_sampler

    hops = len(r.fanouts)
    return full_sampler(r.indptr, r.indices, hops, dialect=r.dialect, edge_ids=r.edge_ids)


def _make_neighbor(r: SamplerRequest) -> BatchSampler:
    from runtime.sampling.neighbor import NeighborSampler
    from runtime.sampling.weighted import WeightedSampler

    draws, estimator = r.choice(Draws, "draws"), r.choice(Estimator, "estimator")
    graph = (r.indptr, r.indices, r.fanouts)
    if r.edge_weight is None and draws is Draws.WITHOUT_REPLACEMENT:
        # Of equal probabilities the weights of every estimator are those of the plain mean.
        return NeighborSampler(*graph, dialect=r.dialect, seed=r.seed, edge_ids=r.edge_ids)
    return WeightedSampler(
        *graph,
        edge_weight=r.edge_weight,
        draws=draws,
        estimator=estimator,
        dialect=r.dialect,
        seed=r.seed,
        edge_ids=r.edge_ids,
    )


def _make_las(r: SamplerRequest) -> BatchSampler:
    from runtime.sampling.locality import Correction, LocalitySampler

    if r.over_ladies():
        return _make_layerwise(r)
    return LocalitySampler(
        r.indptr,
        r.indices,
        r.fanouts,
        local=r.local,
        factor=r.number("factor"),
        correction=r.choice(Correction, "correction"),
        edge_weight=r.edge_weight,
        dialect=r.dialect,
        seed=r.seed,
        edge_ids=r.edge_ids,
    )


def _make_labor(r: SamplerRequest) -> BatchSampler:
    from runtime.sampling.labor import LaborSampler

    settings = labor_settings(r)
    return LaborSampler(r.indptr, r.indices, r.fanouts, edge_ids=r.edge_ids, **settings)


def _make_layerwise(r: SamplerRequest) -> BatchSampler:
    from runtime.sampling.layerwise import LayerwiseSampler

    settings = local_layer_settings(r) if r.name == "las" else layer_settings(r)
    return LayerwiseSampler(r.indptr, r.indices, edge_ids=r.edge_ids, **settings)


_MAKERS: dict[str, Callable[[SamplerRequest], BatchSampler]] = {
    "full": _make_full,
    "neighbor": _make_neighbor,
    "labor": _make_labor,
    "ladies": _make_layerwise,
    "pladies": _make_layerwise,
    "fastgcn": _make_layerwise,
    "las": _make_las,
}
