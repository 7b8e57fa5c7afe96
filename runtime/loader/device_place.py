"""Which stages of a plan the device carries out, and what happens where it cannot.

Which stages the device takes over follows from the plan: the rank's own kind, its sampler, where
topology and rows lie. What the device does not do (link prediction, typed graphs, cooperative
batches, sparse features) stays with the host's stages, and so does everything where a kernel's
compiler or page-locked memory is lacking, with one warning. Batches and losses are the same either
way.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.fallback import has_triton, warn_once
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.features.host_memory import PinError
from gnnplan.runtime.features.tier import AbstractFeatureStore
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.registry import find_sampler, parameters_of


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
    if parameters_of(sampler).get("schedule", "fixed") != "fixed":
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
    from gnnplan.runtime.sampling.build import build_device_sampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    policy, named = plan.strategy.topology.policy, plan.strategy.sampler
    hot = local = None
    if policy == "cached":
        hot = np.asarray(load_array(plan, folder, f"topology_own_ids_{rank}"), np.int64)
    if find_sampler(named.name).prefers_local:
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
    from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler

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


_interpreter = threading.Lock()
"""Triton's interpreter changes its language while a kernel runs: one thread at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlace:
    """What the device does itself."""

    device: torch.device
    gathers: bool = False
    samples: bool = False


def device_place(
    plan: Plan, graph: Graph, device: torch.device, *, asked: bool | None
) -> DevicePlace:
    """Which of a plan's stages run on the device.

    Args:
        plan: the plan.
        graph: its dataset.
        device: where the model runs.
        asked: True and False decide, as far as the device can; None: wherever it is a GPU.
    """
    if not (processor_of(device).is_gpu if asked is None else asked):
        return DevicePlace(device=device)
    if not has_triton():
        warn_once(
            "triton",
            "batches are drawn and gathered by the host's processor, because Triton is not "
            "installed; pip install 'gnnplan[gpu]' (gnnplan doctor says more)",
        )
        return DevicePlace(device=device)
    dense = graph.x is not None and not graph.x_by_type
    gathers = dense and plan.strategy.batching == "independent"
    samples = gathers and not refusal(plan, graph) and _has_form(plan.strategy.sampler.name)
    return DevicePlace(device=device, gathers=gathers, samples=samples)


def _has_form(sampler: str) -> bool:
    """Whether the plan's sampler can draw on a device; a warning says where it cannot."""
    found = bool(find_sampler(sampler).gpu)
    if not found:
        warn_once(
            f"sampler {sampler}",
            f"batches are drawn by the host's processor, because sampler {sampler} has no form on "
            "a GPU; plan with another --sampler, or add one "
            "(runtime/sampling/HOWTO_add_a_sampler.md)",
        )
    return found


def try_device_store(
    place: DevicePlace,
    graph: Graph,
    plan: Plan,
    folder: Path,
    rank: int,
    comm: Communicator | None,
) -> DeviceFeatureStore | None:
    """The plan's store on the device; None, with a warning, where memory cannot be page-locked.

    Every rank comes to the same answer, because with peers in the plan reads are collective.
    """
    from gnnplan.runtime.features.device_open import open_device_store

    store, why = None, ""
    try:
        store = open_device_store(
            graph, plan, folder, rank, place.device, comm=comm,
            threads=plan.strategy.threads.gather,
        )  # fmt: skip
    except PinError as error:
        why = str(error)
    if any(source.kind in ("peer", "remote") for source in plan.strategy.features.sources):
        everyone = (Communicator() if comm is None else comm).all_gather_objects(why)
        why = next((each for each in everyone if each), "")
    if not why:
        return store
    if store is not None:
        store.close()
    warn_once("pinned rows", f"rows are gathered by the host's processor and copied, because {why}")
    return None


def say_host_samples(error: BaseException) -> None:
    """Warn that the host draws the batches, because the device was refused the topology."""
    warn_once(
        "pinned topology",
        "batches are drawn by the host's processor, because the topology finds no place for the "
        f"GPU to read ({' '.join(str(error).split())}); raise the limit on locked memory (ulimit "
        "-l unlimited, docker --ulimit memlock=-1), or plan again",
    )


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Held while kernels are launched: by any number of threads on a GPU, by one elsewhere."""
    return nullcontext() if processor_of(device).is_gpu else _interpreter


def may_pin() -> bool:
    """Whether buffers of a batch's size can be page-locked; copies wait for each other if not."""
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warn_once(
            "pinned buffers",
            "rows are copied to the GPU from ordinary memory, which is slower, because none can "
            f"be page-locked ({' '.join(str(error).split())}); raise the limit on locked memory",
        )
        return False
    return True


def threads_ahead(
    plan: Plan, store: AbstractFeatureStore, comm: Communicator | None, size: int
) -> int:
    """Prefetch threads of a plan; none, with a warning, where NCCL would serve two at once.

    Two communicators of NCCL in use at once may wait for each other for ever: rows that come by it
    are then exchanged on the training thread, in line with the gradients.

    Args:
        plan: its threads and sources.
        store: where rows are read.
        comm: the plan's ranks; None: the default group.
        size: number of ranks.
    """
    threads = plan.strategy.threads.sample
    kinds = {source.kind for source in plan.strategy.features.sources}
    if isinstance(store, DeviceFeatureStore):
        meets = "remote" in kinds or store.exchanges
    else:
        meets = bool(kinds & {"peer", "remote"})
    by_nccl = processor_of((Communicator() if comm is None else comm).device).is_gpu
    if not (threads and size > 1 and meets and by_nccl):
        return threads
    warn_once(
        "exchanges in line",
        "batches are made in line, because rows of other GPUs come by NCCL, which the gradients "
        "use too; plan again with GPUs that can map each other's memory",
    )
    return 0
