"""The sampler of a plan on a GPU, and whether there is one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.errors import SamplerError
from runtime.fallback import warn_once
from runtime.graph.dataset import Graph
from runtime.loader_typed import is_typed
from runtime.plan import Plan, load_array
from runtime.sampling.parameters import parameters_of


def refusal(plan: Plan, graph: Graph) -> str:
    """Why the device does not draw this plan's batches; empty where it does."""
    strategy, sampler = plan.strategy, plan.strategy.sampler
    if graph.task == "link":
        return "link prediction is sampled by the host"
    if is_typed(plan.workload):
        return "typed graphs are sampled by the host"
    if strategy.batching != "independent":
        return "cooperative batches are sampled by the host"
    if strategy.topology.policy == "partitioned":
        return "partitioned topology is sampled by the host"
    if sampler.name == "las" and parameters_of(sampler)["schedule"] != "fixed":
        return "a locality factor that changes while training is the host's"
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
    share: int = 0,
) -> Any:
    """The plan's sampler over the graph where the plan places it.

    Topology `host` lies in page-locked memory, `replicated` in the device's, `cached` with the
    rank's own lists there and the others on the host.

    Args:
        plan: one that `refusal` lets through.
        folder: its folder, for the rank's own lists and rows.
        graph: the dataset.
        rank: this rank.
        device: where the kernels run.
        edge_ids: fill each block's `e_id`.
        num_steps: steps of an epoch, for dependent batches.
        share: seeds of this rank in a whole batch, for plans that sample by a graph.

    Raises:
        SamplerError: a parameter cannot be used.
        RuntimeError: the host refuses to page-lock the topology.
    """
    from runtime.sampling.build_device import build_device_sampler
    from runtime.sampling.device_topology import DeviceTopology

    policy, named = plan.strategy.topology.policy, plan.strategy.sampler
    hot = local = None
    if policy == "cached":
        hot = np.asarray(load_array(plan, folder, f"topology_own_ids_{rank}"), np.int64)
    if named.name == "las":
        local = np.asarray(load_array(plan, folder, f"feature_own_ids_{rank}"), np.int64)
    topology = DeviceTopology.load(
        graph.indptr, graph.indices, device, pinned=policy != "replicated", hot=hot
    )
    made = build_device_sampler(
        named,
        topology,
        graph.indptr,
        graph.indices,
        plan.workload.fanouts,
        plan.workload.seed,
        device=device,
        edge_ids=edge_ids,
        edge_weight=graph.edge_weight,
        local=local,
        steps_per_epoch=num_steps,
    )
    if plan.strategy.threads.capture and plan.strategy.bulk_batches == 1:
        return _captured(made, share)
    return made


def _captured(sampler: Any, share: int) -> Any:
    """The sampler as one CUDA graph; itself, with a warning, where that cannot be."""
    from runtime.sampling.neighbor_captured import CapturedNeighborSampler

    try:
        found = CapturedNeighborSampler.of(sampler, share)
        found.prepare()
        return found
    except (SamplerError, RuntimeError) as error:  # torch's own: no room, or nothing to capture
        warn_once(
            "captured sampling",
            "batches are sampled kernel by kernel, because they cannot be by one CUDA graph "
            f"({' '.join(str(error).split())}); plan again on this machine",
        )
    return sampler
