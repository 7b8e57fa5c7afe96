"""From a plan's `strategy.sampler` to the sampler; modules of others are not imported."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runtime.plan import Sampler
from runtime.sampling.minibatch import MiniBatch
from runtime.sampling.sampler_request import (
    SamplerRequest,
    labor_settings,
    layer_settings,
    local_layer_settings,
    sampler_request,
)
from runtime.sampling.statistics import Draws, Estimator


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
    return _MAKERS[sampler.name](request)


def _make_full(r: SamplerRequest) -> BatchSampler:
    from runtime.sampling.full import full_sampler

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
