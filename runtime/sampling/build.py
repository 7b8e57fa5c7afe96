"""Make the sampler that a plan's `strategy.sampler` names, on cores or on a GPU.

Modules of other samplers are not imported, nor torch where cores draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.device import require_triton
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.registry import (
    SAMPLERS,
    Draws,
    Estimator,
    Value,
    choice,
    layer_sizes,
    load_function,
    number,
    parameters_of,
)

E = TypeVar("E", bound=StrEnum)


@runtime_checkable
class BatchSampler(Protocol):
    """A sampler on cores."""

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> MiniBatch:
        """Sample the blocks of one batch, on any thread; see `minibatch.RequestSampler`."""
        ...


@runtime_checkable
class DeviceSampler(Protocol):
    """A sampler on a GPU."""

    topology: Any

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> Any:
        """Sample the blocks of one batch as a `DeviceBatch`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SamplerRequest:
    """All that a sampler may be made of; fields as in `make_request`."""

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
    topology: Any = None
    device: Any = None

    def make(self, cpu: str, gpu: str, sizes: Sequence[int], **settings: Any) -> Any:
        """Make one of two "module:class" of equal settings: on cores, or on a GPU."""
        if self.topology is None:
            made = load_function(cpu)
            return made(self.indptr, self.indices, sizes, edge_ids=self.edge_ids, **settings)
        made = load_function(gpu)
        return made(self.topology, sizes, device=self.device, edge_ids=self.edge_ids, **settings)

    def choice(self, kind: type[E], key: str) -> E:
        """Return a parameter that is a member of an enumeration."""
        return choice(self.name, self.values, kind, key)

    def number(self, key: str) -> float:
        """Return a parameter that is a number."""
        return number(self.name, self.values, key)

    def sizes(self) -> list[int]:
        """Return the vertices per layer; the fan-outs where the plan names none."""
        return layer_sizes(self.name, self.values, self.fanouts)

    def over_ladies(self) -> bool:
        """Tell whether `las` draws layers rather than neighbours."""
        if self.values["over"] not in ("neighbor", "ladies"):
            raise SamplerError(
                f"sampler las: expected over to be neighbor or ladies, found "
                f"{self.values['over']!r}; choose one"
            )
        return self.values["over"] == "ladies"

    def variant(self) -> int | float | str:
        """Return LABOR's variant; the sampler refuses a number that is not whole."""
        if self.values["variant"] == "star":
            return "star"
        passes = self.number("variant")
        return int(passes) if passes.is_integer() else passes


def build_sampler(
    sampler: Sampler,
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seed: int,
    **settings: Any,
) -> BatchSampler:
    """Make the sampler that a plan names, on cores; arguments and errors as in `make_request`."""
    request = make_request(sampler, indptr, indices, fanouts, seed, **settings)
    return load_function(SAMPLERS[sampler.name].cpu)(request)


def build_device_sampler(
    sampler: Sampler,
    topology: Any,
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seed: int,
    **settings: Any,
) -> DeviceSampler:
    """Make the sampler that a plan names, on a GPU: it draws the batches of `build_sampler`'s.

    Arguments and errors are `make_request`'s; a sampler without a form on a GPU is refused, and
    InputError says that Triton is missing. The graph on the host serves the local sets of `las`.
    """
    request = make_request(sampler, indptr, indices, fanouts, seed, topology=topology, **settings)
    path = SAMPLERS[sampler.name].gpu
    if not path:
        able = ", ".join(spec.name for spec in SAMPLERS.values() if spec.gpu)
        raise SamplerError(
            f"sampler {sampler.name}: expected one with a form on a GPU ({able}), found none; "
            "choose one of these, or plan for a machine without a GPU"
        )
    require_triton("samplers on a GPU")
    return load_function(path)(request)


def make_request(
    sampler: Sampler,
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seed: int,
    *,
    topology: Any = None,
    device: Any = None,
    edge_ids: bool = False,
    edge_weight: NDArray[np.floating] | None = None,
    local: NDArray[np.integer] | None = None,
    steps_per_epoch: int | None = None,
) -> SamplerRequest:
    """Check a plan's sampler and collect what it is made of.

    Args:
        sampler: Name, dialect and parameters (`registry.SAMPLERS`).
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        fanouts: Neighbours per hop, next to the seeds first; `full` uses their number alone.
        seed: Run's seed.
        topology: Graph as a GPU reads it, a `DeviceTopology`; None: cores draw.
        device: GPU that draws, a `torch.device`.
        edge_ids: Fill each block's `e_id`.
        edge_weight: Graph's weights, float [E], or None.
        local: Global ids of the vertices whose rows this rank holds, for `las`.
        steps_per_epoch: Steps of an epoch, so that dependent batches go on beyond its end.

    Raises:
        SamplerError: unknown name or parameter, or weights that the graph lacks.
    """
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
        topology=topology,
        device=device,
    )


def _check_every_hop(r: SamplerRequest) -> None:
    if r.dialect is not Dialect.EVERY_HOP:
        raise SamplerError(
            f"sampler {r.name}: expected dialect every_hop (a layer is drawn for all vertices so "
            f"far), found {r.dialect.value}; plan with every_hop"
        )


def make_full(r: SamplerRequest) -> Any:
    """Make the sampler that takes all neighbours."""
    return _make_uniform(r, [-1] * len(r.fanouts))


def make_neighbor(r: SamplerRequest) -> Any:
    """Make uniform or weighted neighbour sampling."""
    draws, estimator = r.choice(Draws, "draws"), r.choice(Estimator, "estimator")
    if r.edge_weight is None and draws is Draws.WITHOUT_REPLACEMENT:
        # Of equal probabilities the weights of every estimator are those of the plain mean.
        return _make_uniform(r, r.fanouts)
    return r.make(
        "gnnplan.runtime.sampling.neighbor:WeightedSampler",
        "gnnplan.runtime.sampling.gpu.locality:DeviceWeightedSampler",
        r.fanouts,
        edge_weight=r.edge_weight,
        draws=draws,
        estimator=estimator,
        dialect=r.dialect,
        seed=r.seed,
    )


def _make_uniform(r: SamplerRequest, fanouts: Sequence[int]) -> Any:
    return r.make(
        "gnnplan.runtime.sampling.neighbor:NeighborSampler",
        "gnnplan.runtime.sampling.gpu.neighbor:DeviceNeighborSampler",
        fanouts,
        dialect=r.dialect,
        seed=r.seed,
    )


def make_las(r: SamplerRequest) -> Any:
    """Make neighbour sampling that prefers local vertices, or LADIES that does."""
    from gnnplan.runtime.sampling.locality import Correction, check_factor, rings

    if r.over_ladies():
        return _make_local_layers(r)
    where: dict[str, Any] = {"local": r.local}
    if r.topology is not None:
        where = {"ring": rings(r.indptr, r.indices, r.local, len(r.fanouts))}
    return r.make(
        "gnnplan.runtime.sampling.locality:LocalitySampler",
        "gnnplan.runtime.sampling.gpu.locality:DeviceLocalitySampler",
        r.fanouts,
        factor=check_factor(r.number("factor")),
        correction=r.choice(Correction, "correction"),
        dialect=r.dialect,
        edge_weight=r.edge_weight,
        seed=r.seed,
        **where,
    )


def make_labor(r: SamplerRequest) -> Any:
    """Make LABOR."""
    from gnnplan.runtime.sampling.dependent import Dependence
    from gnnplan.runtime.sampling.labor import Form

    return r.make(
        "gnnplan.runtime.sampling.labor:LaborSampler",
        "gnnplan.runtime.sampling.gpu.labor:DeviceLaborSampler",
        r.fanouts,
        variant=r.variant(),
        form=r.choice(Form, "form"),
        tolerance=r.number("tolerance"),
        estimator=r.choice(Estimator, "estimator"),
        dialect=r.dialect,
        seed=r.seed,
        kappa=r.number("kappa"),
        dependence=r.choice(Dependence, "dependence"),
        layer_dependent=bool(r.number("layer_dependent")),
        steps_per_epoch=r.steps_per_epoch,
        edge_weight=r.edge_weight,
    )


def make_layerwise(r: SamplerRequest) -> Any:
    """Make LADIES, PLADIES or FastGCN."""
    from gnnplan.runtime.sampling.dependent import Dependence, StreamPolicy

    _check_every_hop(r)
    policy = None
    if "kappa" in r.values and (r.number("kappa") != 1 or r.number("layer_dependent")):
        policy = StreamPolicy(
            seed=r.seed,
            kappa=r.number("kappa"),
            dependence=r.choice(Dependence, "dependence"),
            layer_dependent=bool(r.number("layer_dependent")),
            steps_per_epoch=r.steps_per_epoch,
        )
    return _make_layers(
        r,
        method=r.name,
        norm=str(r.values.get("norm", "fro")),
        replace=r.choice(Draws, "draws") is Draws.REPLACEMENT,
        estimator=r.choice(Estimator, "estimator"),
        policy=policy,
    )


def _make_local_layers(r: SamplerRequest) -> Any:
    from gnnplan.runtime.sampling.locality import Correction, check_factor, rings
    from gnnplan.runtime.sampling.neighbor import Boost

    _check_every_hop(r)
    draws, estimator = r.choice(Correction, "correction").way
    factor, sizes = check_factor(r.number("factor")), r.sizes()
    return _make_layers(
        r,
        method="pladies" if draws is Draws.POISSON else "ladies",
        replace=draws is Draws.REPLACEMENT,
        estimator=estimator,
        boost=Boost(rings(r.indptr, r.indices, r.local, len(sizes)), factor),
    )


def _make_layers(r: SamplerRequest, **settings: Any) -> Any:
    return r.make(
        "gnnplan.runtime.sampling.layerwise:LayerwiseSampler",
        "gnnplan.runtime.sampling.gpu.layerwise:DeviceLayerwiseSampler",
        r.sizes(),
        edge_weight=r.edge_weight,
        seed=r.seed,
        **settings,
    )
