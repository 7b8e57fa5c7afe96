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

import torch

from runtime.comm.collectives import Communicator
from runtime.fallback import has_triton, warn_once
from runtime.features.abstract import AbstractFeatureStore
from runtime.features.device_store import DeviceFeatureStore
from runtime.features.host_memory import PinError
from runtime.graph.dataset import Graph
from runtime.loader_device_sampler import refusal
from runtime.plan import Plan

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
    if not (device.type == "cuda" if asked is None else asked):
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
    return DevicePlace(device=device, gathers=gathers, samples=gathers and not refusal(plan, graph))


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
    from runtime.features.device_open import open_device_store

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
    return nullcontext() if device.type == "cuda" else _interpreter


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
    by_nccl = (Communicator() if comm is None else comm).device.type == "cuda"
    if not (threads and size > 1 and meets and by_nccl):
        return threads
    warn_once(
        "exchanges in line",
        "batches are made in line, because rows of other GPUs come by NCCL, which the gradients "
        "use too; plan again with GPUs that can map each other's memory",
    )
    return 0
