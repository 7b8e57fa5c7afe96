"""The sampler of a plan on a GPU, and whether there is one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.graph.dataset import Graph
from runtime.loader_typed import is_typed
from runtime.plan import Plan, load_array
from runtime.sampling.dependent import Dependence
from runtime.sampling.minibatch import Dialect
from runtime.sampling.parameters import Value, choice, number, parameters_of
from runtime.sampling.statistics import Estimator

SAMPLERS = ("neighbor", "full", "labor")
"""Names of samplers that have a GPU form, as far as their parameters go."""


def refusal(plan: Plan, graph: Graph) -> str:
    """Why the device cannot draw this plan's batches; empty where it can."""
    strategy, sampler = plan.strategy, plan.strategy.sampler
    if graph.task == "link":
        return "link prediction is sampled by the host"
    if is_typed(plan.workload):
        return "typed graphs are sampled by the host"
    if strategy.batching != "independent":
        return "cooperative batches are sampled by the host"
    if strategy.bulk_batches > 1:
        return "bulk batches are sampled by the host"
    if strategy.topology.policy == "partitioned":
        return "partitioned topology is sampled by the host"
    if sampler.name not in SAMPLERS:
        return f"sampler {sampler.name} is the host's"
    values = parameters_of(sampler)
    if values.get("weights", "none") != "none":
        return "draws by edge weight are the host's"
    if sampler.name == "neighbor" and values["draws"] != "without-replacement":
        return f"draws {values['draws']} are the host's"
    return ""


def open_device_sampler(
    plan: Plan,
    folder: Path,
    graph: Graph,
    rank: int,
    device: torch.device,
    *,
    edge_ids: bool,
    num_steps: int,
) -> Any:
    """The plan's sampler over the graph where the plan places it.

    Topology `host` lies in page-locked memory, `replicated` in the device's, `cached` with the
    rank's own lists there and the others on the host.

    Args:
        plan: one that `refusal` lets through.
        folder: its folder, for the rank's own lists.
        graph: the dataset.
        rank: this rank.
        device: where the kernels run.
        edge_ids: fill each block's `e_id`.
        num_steps: steps of an epoch, for dependent batches.

    Raises:
        SamplerError: a parameter cannot be used.
        RuntimeError: the host refuses to page-lock the topology.
    """
    from runtime.sampling.neighbor_triton import DeviceNeighborSampler, DeviceTopology

    policy, sampler, workload = plan.strategy.topology.policy, plan.strategy.sampler, plan.workload
    hot = None
    if policy == "cached":
        hot = np.asarray(load_array(plan, folder, f"topology_own_ids_{rank}"), np.int64)
    topology = DeviceTopology.load(
        graph.indptr, graph.indices, device, pinned=policy != "replicated", hot=hot
    )
    values = parameters_of(sampler)
    common: dict[str, Any] = {
        "device": device,
        "dialect": Dialect(sampler.dialect),
        "seed": workload.seed,
        "edge_ids": edge_ids,
    }
    if sampler.name == "labor":
        from runtime.sampling.labor_device import DeviceLaborSampler

        return DeviceLaborSampler(
            topology,
            workload.fanouts,
            variant="star" if values["variant"] == "star" else _passes(values),
            form=str(values["form"]),
            tolerance=number("labor", values, "tolerance"),
            estimator=choice("labor", values, Estimator, "estimator"),
            kappa=number("labor", values, "kappa"),
            dependence=choice("labor", values, Dependence, "dependence"),
            layer_dependent=bool(number("labor", values, "layer_dependent")),
            steps_per_epoch=num_steps,
            **common,
        )
    fanouts = [-1] * len(workload.fanouts) if sampler.name == "full" else workload.fanouts
    return DeviceNeighborSampler(topology, fanouts, **common)


def _passes(values: Mapping[str, Value]) -> int | float:
    """LABOR's variant; what is no whole number is left for the sampler to refuse."""
    passes = number("labor", values, "variant")
    return int(passes) if passes.is_integer() else passes
