"""Stages and forms of link prediction, and the sampler and fan-outs of typed graphs.

Links' stages look at the whole global batch: in-batch negatives come from all its destinations, and
all its links are left out of the graph. The number of ranks so changes neither a link's negatives
nor a vertex's neighbours.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.features.device_rows import HostMemory, HostShare
from gnnplan.runtime.graph.dataset import Graph, is_typed, types_of
from gnnplan.runtime.loader.stages import AbstractStage
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.exclusion import (
    Candidates,
    Exclude,
    ExcludingSampler,
    NegativeSampler,
)
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.seeds import LinkSchedule, link_seeds
from gnnplan.runtime.sampling.typed import (
    Fill,
    SortedByType,
    TypedSampler,
    check_type_fanouts,
    hold_alone,
)
from gnnplan.runtime.stages import Stage


def link_stages(
    graph: Graph, workload: Workload, schedule: LinkSchedule, settings: dict[str, Any]
) -> tuple[AbstractStage, AbstractStage]:
    """Make the stages `seeds` and `sample`; `settings` are the neighbour sampler's."""
    links = workload.links
    negatives = NegativeSampler(
        graph.indptr,
        graph.indices,
        links.num_negatives,
        candidates=Candidates(links.negatives),
        seed=workload.seed,
    )
    sampler = ExcludingSampler(graph.indptr, graph.indices, workload.fanouts, **settings)
    sample = LinkSampleStage(sampler, schedule, Exclude(links.exclude))
    return LinkSeedsStage(schedule, negatives), sample


class LinkShareStage(AbstractStage):
    """Stage that chooses this rank's share of the step's links, for a GPU that draws the rest."""

    name = Stage.SEEDS

    def __init__(self, schedule: LinkSchedule) -> None:
        self._schedule = schedule

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `links` with pairs of nodes, and their global ids; a share may be empty."""
        del index
        share = self._schedule.share(batch.epoch, batch.step)
        batch.links, batch.input_id, batch.global_num_seeds = share
        return batch


class LinkSeedsStage(AbstractStage):
    """Stage that chooses this rank's share of the step's links and draws their negatives."""

    name = Stage.SEEDS

    def __init__(self, schedule: LinkSchedule, negatives: NegativeSampler) -> None:
        self._schedule = schedule
        self._negatives = negatives

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `links`, and their distinct nodes as seeds; a share may be empty."""
        del index
        epoch, step = batch.epoch, batch.step
        pairs, ids, batch.global_num_seeds = self._schedule.share(epoch, step)
        everyone = None
        if self._negatives.candidates is Candidates.IN_BATCH:
            everyone = self._schedule.step_pairs(epoch, step)[:, 1]
        negatives = self._negatives.draw(
            pairs, ids, epoch=epoch, step=step, batch_destinations=everyone
        )
        batch.seeds, batch.links = link_seeds(pairs, negatives)
        batch.n_id, batch.input_id = batch.seeds, ids
        return batch


class LinkSampleStage(AbstractStage):
    """Stage that draws neighbours in the graph without the step's own links."""

    name = Stage.SAMPLE

    def __init__(self, sampler: ExcludingSampler, schedule: LinkSchedule, exclude: Exclude) -> None:
        self._sampler = sampler
        self._schedule = schedule
        self._exclude = exclude

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Replace the seed batch by the sampled one."""
        del index
        sampled = self._sampler.sample_without(
            self._schedule.step_pairs(batch.epoch, batch.step),
            self._exclude,
            batch.seeds,
            epoch=batch.epoch,
            step=batch.step,
            input_id=batch.input_id,
            global_num_seeds=batch.global_num_seeds,
        )
        sampled.links = batch.links
        return sampled


def link_form(
    neg_sampling: Any, neg_sampling_ratio: float | None, workload: Workload
) -> Literal["triplet", "binary"]:
    """Return in which of PyG's forms links are handed out.

    Raises TypeError for another number of negatives than the plan's.
    """
    if neg_sampling_ratio is not None:
        neg_sampling = {"mode": "binary", "amount": neg_sampling_ratio}
    if neg_sampling is None:
        return "triplet"
    if isinstance(neg_sampling, str):
        neg_sampling = {"mode": neg_sampling}
    if not isinstance(neg_sampling, Mapping):  # PyG's NegativeSampling
        neg_sampling = vars(neg_sampling)
    if any(neg_sampling.get(name) is not None for name in ("src_weight", "dst_weight")):
        raise TypeError(
            "PlannedLoader: neg_sampling: expected no weights of nodes, found some: the plan draws "
            "all negatives alike; leave them out"
        )
    mode = neg_sampling["mode"]
    mode, planned = str(getattr(mode, "value", mode)), workload.links.num_negatives
    amount = neg_sampling.get("amount", planned)
    if mode not in ("triplet", "binary") or amount != planned:
        raise TypeError(
            f"PlannedLoader: neg_sampling: expected triplet or binary with {planned} negatives per "
            f"link, as the plan draws them, found {mode} with {amount}; plan again (gnnplan plan "
            "--num-negatives)"
        )
    return "binary" if mode == "binary" else "triplet"


def type_fanouts(
    graph: Graph, workload: Workload, fanouts: list[int] | None = None
) -> list[list[int]]:
    """Return the fan-outs of every edge type, by its number; arguments as in `typed_sampler`."""
    names = types_of(graph).edge_types
    unknown = sorted(set(workload.type_fanouts) - set(names))
    if unknown:
        raise InputError(
            f"type_fanouts: expected edge types among {', '.join(names)}, found {unknown[0]!r}"
        )
    return [
        fanouts if fanouts is not None else workload.type_fanouts.get(name, workload.fanouts)
        for name in names
    ]


def fanouts_by_type(graph: Graph, workload: Workload) -> dict[str, list[int]]:
    """Return the fan-outs of every edge type by its name; of a graph without types by ""."""
    if not is_typed(workload):
        return {"": list(workload.fanouts)}
    names = types_of(graph).edge_types
    return dict(zip(names, map(list, type_fanouts(graph, workload)), strict=True))


def read_fanouts(graph: Graph, workload: Workload, num_neighbors: Any) -> dict[str, Any]:
    """Return the fields of a workload for which PyG's `num_neighbors` stands.

    That is a list for all edges, a mapping by edge type, or PyG's NumNeighbors. InputError says
    what does not fit the graph.
    """
    by_type, default = dict[str, list[int]](), None
    if hasattr(num_neighbors, "get_mapped_values"):  # a NumNeighbors
        num_neighbors, default = num_neighbors.values, num_neighbors.default
    if isinstance(num_neighbors, Mapping):
        if not is_typed(workload):
            raise InputError(
                "num_neighbors: expected a list of fan-outs for a graph without types, found a "
                "mapping; give one number per hop"
            )
        names = types_of(graph).edge_types
        by_type = {name: list(default) for name in names if default is not None}
        for key, fanouts in num_neighbors.items():
            ends = (key[0], "to", key[1]) if len(key) == 2 else key  # PyG's usual relation
            by_type[key if isinstance(key, str) else "__".join(ends)] = [int(k) for k in fanouts]
        missing = sorted(set(names) - by_type.keys())
        if missing:
            raise InputError(
                f"num_neighbors: expected fan-outs of every edge type, found none of {missing[0]}; "
                "add them"
            )
        num_neighbors = next(iter(by_type.values()))
    numbers = num_neighbors if isinstance(num_neighbors, Iterable) else []
    fanouts = [int(k) for k in numbers]
    if not fanouts or min(fanouts) < -1:
        raise InputError(
            "num_neighbors: expected a number per hop, at least -1, found "
            f"{num_neighbors!r:.100}; correct them"
        )
    return {"fanouts": fanouts, "type_fanouts": by_type, "num_layers": len(fanouts)}


def typed_sampler(
    graph: Graph,
    workload: Workload,
    fanouts: list[int] | None = None,
    *,
    lists: SortedByType | None = None,
    **settings: Any,
) -> TypedSampler:
    """Make the sampler of a typed graph, over `lists` that are sorted already or its own.

    `fanouts` replaces the workload's for all types, in evaluation. InputError names an edge type
    that the dataset does not have.
    """
    by_type = type_fanouts(graph, workload, fanouts)
    assert graph.edge_type is not None
    return TypedSampler(
        graph.indptr,
        graph.indices,
        graph.edge_type,
        by_type,
        node_type=graph.node_type if graph.x_by_type else None,
        lists=lists,
        seed=workload.seed,
        **settings,
    )


def sort_lists(graph: Graph, share: HostShare | None = None, *, keep_order: bool) -> SortedByType:
    """Sort a typed graph's lists by type, once per host where its ranks share.

    Collective over the ranks that share.
    """
    num_types = len(types_of(graph).edge_types)
    assert graph.edge_type is not None

    def hold(num_bytes: int, fill: Fill) -> NDArray[np.uint8]:
        def fill_shared(room: HostMemory) -> None:
            fill(np.frombuffer(room, np.uint8))

        room = None if share is None else share.map(num_bytes, fill_shared, used=True)
        return hold_alone(num_bytes, fill) if room is None else np.frombuffer(room, np.uint8)

    return SortedByType.of(
        graph.indptr, graph.indices, graph.edge_type, num_types, keep_order=keep_order, hold=hold
    )


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
