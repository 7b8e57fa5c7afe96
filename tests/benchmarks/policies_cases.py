"""Placement problems of the policies benchmark: graphs, who draws what, machines, budgets.

Hotness is drawn by the runtime's sampler, 64 batches of 256 seeds, fan-outs 25 and 10. `global`
batches are drawn from all training nodes, so that all GPUs share one law; `sharded` ones from the
clique's part of an edge cut (Legion's hierarchical partition), so that cliques have laws of their
own. Parts are kept between runs, since they only depend on the graph.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.partition.partition import hierarchical_parts, partition
from gnnplan.planner.placement.costs import DISK, HOST, PLACES, ReadNetwork
from gnnplan.planner.placement.placement import Placement, find_places
from gnnplan.planner.placement.policies.policy import Knowledge
from gnnplan.planner.placement.problem import ItemKind, PlacementProblem
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.plan.schema import Threads
from gnnplan.runtime.sampling.locality import FAR, rings
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.seeds import SeedSchedule
from tests.benchmarks.common import bench_graph, bench_seeds, cache_folder
from tests.support.candidates import candidate_of_ranks
from tests.support.gpu_networks import Access, gpu_network

FANOUTS, SEEDS, BATCHES = (25, 10), 256, 64
ROW_BYTES = 512
"""128 floats per node, whatever a pack holds: so that graphs differ in their edges alone."""
DISK_BYTES_PER_SECOND = 3e9
LIST_READ_BYTES = 64
"""One transaction per neighbour read (formulas 2.4)."""

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """A graph's edges and training nodes."""

    name: str
    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    training: Ids

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.indptr) - 1

    @functools.cached_property
    def in_degree(self) -> NDArray[np.int64]:
        """Lengths of the lists, shape [N]."""
        return np.diff(self.indptr).astype(np.int64)

    @functools.cached_property
    def out_degree(self) -> NDArray[np.int64]:
        """Lists each node stands in, shape [N]."""
        return np.bincount(self.indices, minlength=self.num_nodes)


@functools.lru_cache(maxsize=1)
def topology(name: str) -> Topology | None:
    """A pack or an R-MAT (a tenth of its nodes in training); None: no such pack here."""
    if name.startswith("rmat-"):
        graph = bench_graph(name)
        seeds = np.sort(bench_seeds(graph, fraction=0.1))
        return Topology(name=name, indptr=graph.indptr, indices=graph.indices, training=seeds)
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("GNNPLAN_TEST_DATA") or beside) / f"{name}.npz"
    if not path.exists():
        return None
    with np.load(path) as pack:
        training = np.flatnonzero(pack["train_mask"])
        return Topology(
            name=name, indptr=pack["indptr"], indices=pack["indices"], training=training
        )


def draw(graph: Topology, seeds: Ids) -> tuple[Rows, Rows]:
    """Feature rows and neighbour reads per batch by node, both [N], of batches of these seeds."""
    sampler = NeighborSampler(graph.indptr, graph.indices, FANOUTS)
    schedule = SeedSchedule(seeds, min(SEEDS, len(seeds)), seed=0, drop_last=True)
    rows, lists = np.zeros(graph.num_nodes, np.float32), np.zeros(graph.num_nodes, np.float32)
    steps = max(1, len(seeds) // min(SEEDS, len(seeds)))
    for i in range(BATCHES):
        epoch, step = divmod(i, steps)
        batch = sampler.sample(schedule.share(epoch, step)[0], epoch=epoch, step=step)
        rows[batch.n_id] += 1
        block = batch.blocks[0]
        lists[batch.n_id[: block.num_dst]] += np.diff(block.indptr[: block.num_dst + 1])
    return rows / np.float32(BATCHES), lists / np.float32(BATCHES)


@functools.lru_cache(maxsize=4)
def global_law(name: str) -> tuple[Rows, Rows]:
    """What any GPU's batches read where all draw from all training nodes."""
    graph = found(name)
    return draw(graph, graph.training)


def found(name: str) -> Topology:
    """The graph, which is there."""
    graph = topology(name)
    assert graph is not None
    return graph


def kept(key: str, make: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
    """An array made once and kept between runs."""
    path = cache_folder() / "policies" / f"{key}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npy")
        np.save(part, make())
        part.rename(path)
    return np.load(path)


def parts_of(graph: Topology, partitioner: str, num: int) -> NDArray[np.int32]:
    """Part of each node, [N]."""
    if num == 1:
        return np.zeros(graph.num_nodes, np.int32)
    return kept(
        f"{graph.name}-{partitioner}-{num}",
        lambda: partition(
            graph.indptr, graph.indices, parts=num, name=partitioner, training=graph.training
        ),
    )


def shards_of(graph: Topology, cliques: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """GPU of each node under Legion's hierarchical partition, [N]."""
    sizes = "+".join(str(len(c)) for c in cliques)
    return kept(
        f"{graph.name}-hierarchical-{sizes}",
        lambda: hierarchical_parts(
            graph.indptr, graph.indices, cliques=cliques, training=graph.training
        ),
    )


@functools.lru_cache(maxsize=4)
def clique_laws(name: str, cliques: tuple[tuple[int, ...], ...]) -> tuple[Rows, Rows]:
    """Reads by clique, both [C, N], where each draws from its own part."""
    graph = found(name)
    shard = shards_of(graph, cliques)[graph.training]
    laws = [draw(graph, graph.training[np.isin(shard, clique)]) for clique in cliques]
    return np.stack([rows for rows, _ in laws]), np.stack([lists for _, lists in laws])


def reached(graph: Topology, parts: NDArray[np.int32], num: int) -> NDArray[np.bool_]:
    """Nodes within the sampled hops of each part's training nodes, [num, N]."""
    mine = parts[graph.training]
    return np.stack(
        [
            rings(graph.indptr, graph.indices, graph.training[mine == g], len(FANOUTS) + 1) != FAR
            for g in range(num)
        ]
    )


@functools.lru_cache(maxsize=8)
def knowledge(name: str, num: int) -> Knowledge:
    """Degrees, parts and reach for the policies that look at them."""
    graph = found(name)
    names = {"metis": "kaminpar", "pagraph": "pagraph"}

    @functools.cache
    def parts(partitioner: str) -> NDArray[np.int32]:
        return parts_of(graph, names[partitioner], num)

    return Knowledge(
        out_degree=graph.out_degree,
        in_degree=graph.in_degree,
        parts=parts,
        reach=functools.cache(lambda name: reached(graph, parts(name), num)),
    )


def all_gpus(preset: str, num: int | None = None) -> Candidate:
    """The first `num` (or all) GPUs of a preset in its best cover."""
    machine = load_preset(preset)
    names = tuple(gpu.name for gpu in machine.gpus)[:num]
    rank = {name: r for r, name in enumerate(names)}
    cliques = [tuple(rank[g] for g in clique if g in rank) for clique in machine.cliques]
    return candidate_of_ranks(
        num_ranks=len(names),
        threads=Threads(compute=1, sample=0, gather=1),
        prefetch_depth=0,
        policy="",
        gpus=names,
        cliques=tuple(c for c in cliques if c),
    )


def make_instance(
    preset: str,
    candidate: Candidate,
    rows: Rows,
    laws: tuple[int, ...],
    device_bytes: int,
    *,
    lists: tuple[Rows, NDArray[np.int64]] | None = None,
    host_bytes: int | None = None,
) -> PlacementProblem:
    """Feature rows, and lists (their reads and the in-degrees), on a preset's GPUs.

    Args:
        preset: machine.
        candidate: GPUs and cliques.
        rows: reads by law, [D, N].
        laws: of each GPU.
        device_bytes: of each GPU.
        lists: reads of lists by law, [D, N], and in-degrees; None: lists stay on the host.
        host_bytes: of the host, the rest lies on a disk; None: it has everything.
    """
    kinds = [ItemKind(name="features", heat=rows, laws=laws, size=ROW_BYTES, read_bytes=ROW_BYTES)]
    accesses = [Access(bytes=ROW_BYTES, counted=ROW_BYTES)]
    if lists is not None:
        heat, degree = lists
        kinds.append(
            ItemKind(
                name="topology",
                heat=heat,
                laws=laws,
                size=8 + 4 * degree,
                read_bytes=LIST_READ_BYTES,
            )
        )
        accesses.append(Access(bytes=4, counted=LIST_READ_BYTES))
    network = gpu_network(load_preset(preset), candidate, accesses)
    return PlacementProblem(
        kinds=tuple(kinds),
        cliques=candidate.cliques,
        device_bytes=(device_bytes,) * candidate.num_ranks,
        host_bytes=host_bytes,
        network=network if host_bytes is None else with_disk(network),
    )


def with_disk(network: ReadNetwork) -> ReadNetwork:
    """The network with a disk behind the host, which all GPUs share and no preset has."""
    loads = np.concatenate([network.loads, np.zeros_like(network.loads[:, :1])], axis=1)
    loads[..., DISK] = loads[..., HOST]
    loads[:, -1, :, DISK] = 1 / DISK_BYTES_PER_SECOND
    alone = network.alone.copy()
    alone[..., DISK] = loads[..., DISK].max(axis=1)
    return replace(network, links=(*network.links, "disk"), loads=loads, alone=alone)


def recount(instance: PlacementProblem, layout: Placement) -> NDArray[np.float64]:
    """Bytes by kind, GPU and place, [T, G, 5], counted without the evaluator."""
    out = np.zeros((len(instance.kinds), instance.num_devices, len(PLACES)))
    clique_of = {g: c for c, clique in enumerate(layout.cliques) for g in clique}
    for t, (kind, held) in enumerate(zip(instance.kinds, layout.items, strict=True)):
        elsewhere = find_places(instance, layout, t)
        for g in range(instance.num_devices):
            place = elsewhere[clique_of[g]].copy()
            place[held.own[g]] = 0
            heat = kind.heat[kind.laws[g]].astype(np.float64)
            out[t, g] = kind.read_bytes * np.bincount(place, heat, minlength=len(PLACES))
    return out
