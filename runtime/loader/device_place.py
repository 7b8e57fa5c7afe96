"""Choice of the stages that the device carries out, and fallback to the host where it cannot.

It follows from the plan: the rank's device, its sampler, the places of topology and rows. Sparse
features stay with the host's stages, as does all where Triton or page-locked memory is missing,
with one warning. Batches and losses are the same either way.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.device import has_triton
from gnnplan.runtime.errors import SamplerError, warn_once
from gnnplan.runtime.features.device_rows import HostShare, PinError
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.features.tier import AbstractFeatureStore
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.loader.bulk import open_shard
from gnnplan.runtime.loader.stages import AbstractStage
from gnnplan.runtime.loader.topology import FIRST_PEER, LocatedLists, read_lists, sort_lists
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan, StepShapes, Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.exclusion import Candidates, Exclude
from gnnplan.runtime.sampling.memory import Envelope
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.registry import find_sampler, why_on_host
from gnnplan.runtime.sampling.typed import check_type_fanouts, type_fanouts
from gnnplan.runtime.stages import Stage


def refusal(plan: Plan, graph: Graph) -> str:
    """Return why the device does not draw this plan's batches; empty where it does."""
    links, types = graph.task == "link", is_typed(plan.workload)
    return why_on_host(plan.strategy.sampler, links=links, types=types)


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
    comm: Communicator | None = None,
    lent: Any = None,
) -> Any:
    """Open the plan's sampler over the graph where the plan places it, or over `lent` lists.

    Topology `host` lies in page-locked memory, `replicated` in the device's, `cached` with the
    rank's own lists there, others in its peers' memory and the rest on the host, `partitioned` in
    parts on all devices. `share` is this rank's number of seeds in a whole batch, for plans that
    sample by a CUDA graph. The ranks of a host keep page-locked lists once: collective where the
    job has several. A host that refuses to page-lock raises PinError.
    """
    from gnnplan.runtime.sampling.build import build_device_sampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    policy, named = plan.strategy.topology.policy, plan.strategy.sampler
    if policy == "partitioned":
        topology = _open_in_parts(plan, graph, device, comm, edge_ids=edge_ids)
        return build_device_sampler(
            named, topology, graph.indptr, graph.indices, plan.workload.fanouts,
            plan.workload.seed, device=device, edge_ids=edge_ids, edge_weight=graph.edge_weight,
            steps_per_epoch=num_steps,
        )  # fmt: skip
    hot = peers = local = None
    if policy == "cached" and lent is None:
        lists = read_lists(plan, folder, graph.num_nodes, rank)
        hot, peers = lists.held[rank], _peer_lists(plan, lists, rank, comm)
    if find_sampler(named.name).prefers_local:
        local = np.asarray(load_array(plan, folder, f"feature_own_ids_{rank}"), np.int64)
    typed, in_host = is_typed(plan.workload), None if lent else HostShare.of(plan, rank, comm)
    indptr, indices, order = graph.indptr, graph.indices, None
    if typed and (edge_ids or not lent):
        lists = sort_lists(graph, in_host, keep_order=edge_ids)
        indptr, indices, order = lists.ends, lists.indices, lists.order
    topology = lent or DeviceTopology.load(
        indptr, indices, device, pinned=policy != "replicated", hot=hot, share=in_host, peers=peers
    )
    if typed or graph.task == "link":
        settings = {
            "device": device, "dialect": Dialect(named.dialect), "seed": plan.workload.seed,
            "edge_ids": edge_ids,
        }  # fmt: skip
        if graph.task == "link":
            return device_link_sampler(plan.workload, topology, settings)
        return device_typed_sampler(graph, plan.workload, topology, order, settings)
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
    if plan.strategy.threads.capture and plan.strategy.bulk_batches == 1 and lent is None:
        return _captured(made, share)
    return made


def device_typed_sampler(
    graph: Graph,
    workload: Workload,
    topology: Any,
    order: NDArray[np.int64] | None,
    settings: dict[str, Any],
) -> Any:
    """Make `typed_sampler`'s form on a GPU, over a topology of `sort_lists`.

    `settings` are those of `AbstractDeviceHops`, and the seed.
    """
    from gnnplan.runtime.sampling.gpu.tasks import DeviceTypedSampler

    return DeviceTypedSampler(
        topology,
        check_type_fanouts(type_fanouts(graph, workload)),
        order=order if settings["edge_ids"] else None,
        node_type=graph.node_type if graph.x_by_type else None,
        **settings,
    )


def device_link_sampler(workload: Workload, topology: Any, settings: dict[str, Any]) -> Any:
    """Make the sampler of links on a GPU; `settings` as in `device_typed_sampler`."""
    from gnnplan.runtime.sampling.gpu.tasks import (
        DeviceExcludingSampler,
        DeviceLinkSampler,
        DeviceNegatives,
    )

    links = workload.links
    return DeviceLinkSampler(
        DeviceExcludingSampler(topology, workload.fanouts, **settings),
        DeviceNegatives(
            topology, links.num_negatives, candidates=Candidates(links.negatives),
            seed=workload.seed,
        ),
        Exclude(links.exclude),
    )  # fmt: skip


def _peer_lists(plan: Plan, lists: LocatedLists, rank: int, comm: Communicator | None) -> Any:
    """Return the `PeerLists` that a rank reads; None where the plan has none or ranks are apart."""
    from gnnplan.runtime.sampling.gpu.topology import PeerLists

    if not plan.strategy.topology.peers or comm is None or comm.size != plan.num_ranks:
        return None
    rank_of = np.where(
        lists.numbers < FIRST_PEER, np.int16(-1), lists.numbers - np.int16(FIRST_PEER)
    )
    held = {each: ids for each, ids in lists.held.items() if each != rank}
    return PeerLists(held, rank_of.astype(np.int16), comm)


def _open_in_parts(
    plan: Plan, graph: Graph, device: torch.device, comm: Communicator | None, *, edge_ids: bool
) -> Any:
    """Open the topology whose lists the ranks of a grid hold in parts; collective."""
    from gnnplan.runtime.sampling.gpu.stack import GridTopology

    grid, shard = open_shard(plan, graph, comm)
    return GridTopology.open(shard, grid, device, edge_ids=edge_ids)


def _captured(sampler: Any, share: int) -> Any:
    """Capture the sampler as one CUDA graph; return it unchanged, with a warning, else."""
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
"""Lock of Triton's interpreter, which serves one thread at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlace:
    """Stages that the device carries out itself."""

    device: torch.device
    gathers: bool = False
    samples: bool = False


def say_cores(plan: Plan, rank: int, device: torch.device) -> None:
    """Warn that a rank which is planned on a GPU was given another device."""
    planned = plan.strategy.devices[rank]
    if planned.needs_gpu and not processor_of(device).is_gpu:
        warn_once(
            "device",
            f"rank {rank}: cores draw and gather all batches, and hold the rows that are planned "
            f"for GPU {planned.index}, because PlannedLoader was given device {device}; give it "
            f"the rank's GPU, as in device='cuda:{planned.index}', and move the model there",
        )


def device_place(
    plan: Plan, graph: Graph, device: torch.device, *, asked: bool | None
) -> DevicePlace:
    """Choose the plan's stages that run on the device; `asked` None means wherever it is a GPU."""
    if not (processor_of(device).is_gpu if asked is None else asked):
        return DevicePlace(device=device)
    if not has_triton():
        warn_once(
            "triton",
            "batches are drawn and gathered by the host's processor, because Triton is not "
            "installed; pip install 'gnnplan[gpu]' (gnnplan doctor says more)",
        )
        return DevicePlace(device=device)
    gathers = graph.x is not None or bool(graph.x_by_type)
    samples = gathers and not refusal(plan, graph) and _has_form(plan.strategy.sampler.name)
    return DevicePlace(device=device, gathers=gathers, samples=samples)


def _has_form(sampler: str) -> bool:
    """Return whether the plan's sampler can draw on a device; warn where it cannot."""
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
    place: DevicePlace, graph: Graph, plan: Plan, folder: Path, rank: int, comm: Communicator | None
) -> DeviceFeatureStore | None:
    """Open the plan's store on the device; return None, with a warning, without page-locking.

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
        everyone = (Communicator(device=place.device) if comm is None else comm).all_gather_objects(
            why
        )
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


def lock_launches(device: torch.device) -> AbstractContextManager[object]:
    """Lock the launch of kernels: for any number of threads on a GPU, for one elsewhere."""
    return nullcontext() if processor_of(device).is_gpu else _interpreter


def may_pin() -> bool:
    """Return whether buffers of a batch's size can be page-locked; warn if not."""
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
    plan: Plan, store: AbstractFeatureStore, comm: Communicator | None, device: torch.device
) -> int:
    """Return the plan's number of prefetch threads; 0, with a warning, where none may exchange.

    NCCL wants one order of all that a GPU sends. Where training is a script's own, what it sends is
    not known here: rows that come by NCCL are then exchanged on the script's thread.
    """
    threads, shared = plan.strategy.threads.sample, plan.strategy.batching == "cooperative"
    by_nccl = (Communicator(device=device) if comm is None else comm).between_gpus
    if shared and (isinstance(store, DeviceFeatureStore) or by_nccl):
        return 0  # ids, rows and hidden rows go one after the other
    kinds = {source.kind for source in plan.strategy.features.sources}
    if isinstance(store, DeviceFeatureStore):
        meets = "remote" in kinds or store.exchanges
    else:
        meets = bool(kinds & {"peer", "remote"})
    meets = meets or plan.strategy.topology.policy == "partitioned"
    if comm is not None or not (threads and meets and by_nccl):
        return threads
    warn_once(
        "exchanges on the script's thread",
        "batches are made when the script asks for them, because rows of other GPUs come by NCCL, "
        "which its own training uses too; train with gnnplan train, or plan with GPUs that can map "
        "each other's memory",
    )
    return 0


class PaddedStep(MiniBatch):
    """Step whose batch the device draws as it is trained on; nothing is drawn before."""

    __slots__ = ("draws", "make", "meter_rows")

    draws: Any
    """`PaddedDraws` that draw the step's batch."""
    make: Callable[[], MiniBatch]
    """Function that makes the step's batch in its true sizes, where it did not fit."""
    meter_rows: Callable[[], None]
    """Function that meters the rows that were read so far; waits."""


class PaddedStage(AbstractStage):
    """Stage in place of all others, whose steps are drawn by the device as they are trained on."""

    name = Stage.SAMPLE

    def __init__(
        self, stages: Sequence[AbstractStage], draws: Any, store: Any, meter: StageMeter
    ) -> None:
        """Hand out steps of `draws`; `stages` make a batch that did not fit."""
        self._stages, self.draws, self._store, self._meter = list(stages), draws, store, meter
        self._last = 0

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Return the step of the batch's epoch and number."""
        self._last = max(self._last, index)
        step = PaddedStep(**{each.name: getattr(batch, each.name) for each in fields(batch)})
        step.draws, step.meter_rows = self.draws, self._meter_rows
        step.make = functools.partial(self._make, batch, index)
        return step

    def _make(self, batch: MiniBatch, index: int) -> MiniBatch:
        for stage in self._stages:
            batch = stage.wait(stage.submit(batch, index))
        return batch

    def _meter_rows(self) -> None:
        found = self._store.named(self.draws.take_row_counts())
        self._meter.count(self._last, found.rows, found.bytes)
        for stage in self._stages:
            stage.finish()


def padded_stage(
    stages: Sequence[AbstractStage],
    plan: Plan,
    graph: Graph,
    schedule: Any,
    meter: StageMeter,
    comm: Communicator | None,
) -> PaddedStage | None:
    """Return the stage of padded steps that replaces a plan's stages; None: they stay.

    The device draws and gathers all that a batch consists of, one step at a time, where the plan
    says so: on all ranks or on none, since captures send sums of their own. Collective there.
    """
    shapes = plan.strategy.shapes
    if shapes is None or not shapes.drawn:  # nothing of it is in the plan's price and memory
        return None
    found = _try_padded(stages, plan, graph, schedule, meter, shapes)
    why = found if isinstance(found, str) else ""
    reasons = [why] if comm is None else comm.all_gather_objects(why)
    rank = next((rank for rank, each in enumerate(reasons) if each), None)
    if rank is None:
        assert isinstance(found, PaddedStage)
        return found
    warn_once(
        "padded steps",
        "batches are copied into the captured step on all ranks, because rank "
        f"{rank} does not draw them within it ({reasons[rank]}); plan again on this machine",
    )
    return None


def _try_padded(
    stages: Sequence[AbstractStage],
    plan: Plan,
    graph: Graph,
    schedule: Any,
    meter: StageMeter,
    shapes: StepShapes,
) -> PaddedStage | str:
    """Return this rank's stage of padded steps, or why there is none."""
    from gnnplan.runtime.loader.device import (
        DeviceBatchStage,
        DeviceGatherStage,
        DeviceSampleStage,
        LinkDeviceSampleStage,
    )

    drawing = _only(stages, DeviceSampleStage, LinkDeviceSampleStage)
    gather, batch = _only(stages, DeviceGatherStage), _only(stages, DeviceBatchStage)
    if drawing is None or gather is None or batch is None:
        return "other stages than the GPU's plain ones make them"
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws, PaddedSampler

    if not isinstance(drawing.sampler, PaddedSampler):
        return f"{type(drawing.sampler).__name__} has no padded form"
    try:
        envelope = Envelope(tuple(shapes.rows), tuple(shapes.edges))
        draws = PaddedDraws(
            drawing.sampler, schedule, envelope, store=gather.store, labels=graph.y,
            row_dtype=gather.row_dtype,
            weights=batch.padded_weights(Dialect(plan.strategy.sampler.dialect)),
        )  # fmt: skip
    except SamplerError as error:  # rows that are not in place, or dependent batches
        return " ".join(str(error).split())
    return PaddedStage(stages, draws, gather.store, meter)


def _only(stages: Sequence[AbstractStage], *kinds: type[AbstractStage]) -> Any:
    """Return the stage of just these kinds; None where there is none."""
    return next((each for each in stages if type(each) in kinds), None)
