"""From a plan's `strategy.sampler` to its form on a GPU, with `build_sampler`'s batches."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.errors import SamplerError
from runtime.plan.schema import Sampler
from runtime.sampling.build import (
    SamplerRequest,
    labor_settings,
    layer_settings,
    local_layer_settings,
    sampler_request,
)
from runtime.sampling.gpu.hops import DeviceBatch
from runtime.sampling.gpu.topology import DeviceTopology
from runtime.sampling.locality import Correction, check_factor, rings
from runtime.sampling.statistics import Draws, Estimator


@runtime_checkable
class DeviceSampler(Protocol):
    """What every sampler on a device offers."""

    topology: DeviceTopology

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> DeviceBatch:
        """Sample the blocks of one batch."""
        ...


def build_device_sampler(
    sampler: Sampler,
    topology: DeviceTopology,
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seed: int,
    *,
    device: torch.device,
    edge_ids: bool = False,
    edge_weight: NDArray[np.floating] | None = None,
    local: NDArray[np.integer] | None = None,
    steps_per_epoch: int | None = None,
) -> DeviceSampler:
    """The device's form of the sampler that a plan names.

    Args:
        sampler: from the plan.
        topology: the graph as the device reads it.
        indptr: the graph on the host, for the local sets of `las`.
        indices: likewise.
        fanouts: neighbours per hop, as in `build_sampler`, as all that follow.
        seed: the run's seed.
        device: where the kernels run.
        edge_ids: fill each block's `e_id`.
        edge_weight: the graph's, float [E], or None; copied to the device where it is used.
        local: global ids of the vertices whose rows this rank holds, for `las`.
        steps_per_epoch: lets dependent batches run on over the ends of epochs.

    Raises:
        SamplerError: an unknown name or parameter, or a value that cannot be used.
    """
    request = sampler_request(
        sampler, indptr, indices, fanouts, seed, edge_ids=edge_ids, edge_weight=edge_weight,
        local=local, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    common: dict[str, Any] = {"device": device, "edge_ids": edge_ids}
    if not has_device_form(sampler.name):
        raise SamplerError(
            f"sampler {sampler.name}: expected one with a form on a GPU ({', '.join(_MAKERS)}), "
            "found none; choose one of these, or plan for a machine without a GPU"
        )
    return _MAKERS[sampler.name](request, topology, common)


def has_device_form(sampler: str) -> bool:
    """Whether a GPU can draw this sampler's batches itself."""
    return sampler in _MAKERS


def _make_full(r: SamplerRequest, topology: DeviceTopology, common: dict[str, Any]) -> Any:
    from runtime.sampling.gpu.neighbor import DeviceNeighborSampler

    fanouts = [-1] * len(r.fanouts)
    return DeviceNeighborSampler(topology, fanouts, dialect=r.dialect, seed=r.seed, **common)


def _make_neighbor(r: SamplerRequest, topology: DeviceTopology, common: dict[str, Any]) -> Any:
    from runtime.sampling.gpu.locality import DeviceWeightedSampler
    from runtime.sampling.gpu.neighbor import DeviceNeighborSampler

    draws, estimator = r.choice(Draws, "draws"), r.choice(Estimator, "estimator")
    common |= {"dialect": r.dialect, "seed": r.seed}
    if r.edge_weight is None and draws is Draws.WITHOUT_REPLACEMENT:
        return DeviceNeighborSampler(topology, r.fanouts, **common)
    return DeviceWeightedSampler(
        topology, r.fanouts, edge_weight=r.edge_weight, draws=draws, estimator=estimator, **common
    )


def _make_las(r: SamplerRequest, topology: DeviceTopology, common: dict[str, Any]) -> Any:
    from runtime.sampling.gpu.locality import DeviceLocalitySampler

    if r.over_ladies():
        return _make_layerwise(r, topology, common)
    return DeviceLocalitySampler(
        topology,
        r.fanouts,
        ring=rings(r.indptr, r.indices, r.local, len(r.fanouts)),
        factor=check_factor(r.number("factor")),
        correction=r.choice(Correction, "correction"),
        dialect=r.dialect,
        edge_weight=r.edge_weight,
        seed=r.seed,
        **common,
    )


def _make_labor(r: SamplerRequest, topology: DeviceTopology, common: dict[str, Any]) -> Any:
    from runtime.sampling.gpu.labor import DeviceLaborSampler

    return DeviceLaborSampler(topology, r.fanouts, **labor_settings(r), **common)


def _make_layerwise(r: SamplerRequest, topology: DeviceTopology, common: dict[str, Any]) -> Any:
    from runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler

    settings = local_layer_settings(r) if r.name == "las" else layer_settings(r)
    return DeviceLayerwiseSampler(topology, **settings, **common)


_Maker = Callable[[SamplerRequest, DeviceTopology, dict[str, Any]], Any]
_MAKERS: dict[str, _Maker] = {
    "full": _make_full,
    "neighbor": _make_neighbor,
    "labor": _make_labor,
    "ladies": _make_layerwise,
    "pladies": _make_layerwise,
    "fastgcn": _make_layerwise,
    "las": _make_las,
}
