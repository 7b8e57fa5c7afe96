"""Memory of ranks and hosts, added up by hand."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from gnnplan.planner.cost.backends.cooperative import exchange_parts
from gnnplan.planner.cost.graph_memory import (
    block_bytes,
    draw_bytes,
    host_parts,
    node_parts,
    sampling_bytes,
    step_parts,
)
from gnnplan.planner.cost.memory import (
    BatchTail,
    batch_bytes,
    model_bytes,
    tail,
)
from gnnplan.planner.cost.model import predict
from gnnplan.planner.cost.request import Part, Request as PlanningRequest
from gnnplan.planner.pipeline import graph_ref
from gnnplan.planner.workload import BatchProfile, Spread
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.cache import CachedFeatureStore
from gnnplan.runtime.features.location import LocationTable, encode
from gnnplan.runtime.features.store import FeatureStore
from gnnplan.runtime.features.tier import Dense
from gnnplan.runtime.graph.dataset import Graph, GraphTypes, types_of
from gnnplan.runtime.graph.generate import generate_typed
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.weights import count_degrees, fill_weights
from gnnplan.runtime.plan.schema import Sampler, Source
from gnnplan.runtime.sampling.build import build_sampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.sampling.exclusion import ExcludingSampler
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request
from gnnplan.runtime.sampling.typed import TypedSampler
from tests.planner.cost.by_hand import BATCH, GRAPH, NODES, candidate, price, request, rows
from tests.support.inprocess import run_in_process
from tests.support.plans import make_plan
from tests.support.profiles import batch_profile, exactly


def test_memory_parts_add_up_by_hand() -> None:
    found = price(candidate(), rows(host=1e4)).memory_bytes
    parts = found["rank0"].parts
    assert parts == {
        "context": 200_000_000,
        "model and optimizer": 160_000,  # 10000 x 4 B x 4
        "activations": 1_000_000,
        # 4,000 rows, and with fan-out 10 of the last 3,000 up to 35,000 edges and 34,000 nodes.
        "sampling": 4 * NODES + 8 * (5_001 + 42_580) + 4 * 43_830 + 12 * 64,
        "batches": 10_000 * 408 + 8 * 4_001 + 4 * 20_000,
        "blocks by source": 8 * (4_001 + 5_000) + 8 * 4_000,  # of the inner: wide layers sum first
        "location table": 4 * NODES,
        "seeds": 8 * (3 * 10_000 + 2**14),
        "gather": 33 * 12_500,
        "own rows": 0,
    }
    host = found["host0"]
    assert host.parts["features"] == NODES * 400
    assert host.parts["topology"] == 8 * (NODES + 1) + 4 * 1_000_000
    assert host.parts["ranks"] == found["rank0"].total
    assert host.headroom == host.capacity - host.total


def test_what_starts_the_ranks_is_in_the_sum_of_the_host() -> None:
    without = price(candidate(), rows(host=1e4)).memory_bytes["host0"]
    asked = request()
    assert asked.profile.process is not None
    process = replace(asked.profile.process, launcher_bytes=70_000_000)
    asked = replace(asked, profile=replace(asked.profile, process=process))
    found = predict(asked, candidate(), rows(host=1e4)).memory_bytes["host0"]
    assert found.parts["launcher"] == 70_000_000
    assert found.total == without.total + 70_000_000


def test_rows_of_peers_pass_through_buffers_of_both_sides() -> None:
    without = price(candidate(ranks=2), rows(2, host=1e4)).memory_bytes["rank0"].parts
    assert "rows of peers" not in without
    asked = price(candidate(ranks=2), rows(2, own=5e3, peer=5e3)).memory_bytes["rank0"].parts
    # Of each batch's 5000 vertices half are read of the other rank, which reads as many of this.
    assert asked["rows of peers"] == 2 * 5_000 // 2 * 400
    assert {k: v for k, v in asked.items() if k != "rows of peers"} == without


def test_prefetched_batches_need_their_buffers() -> None:
    inline, ahead = (
        price(candidate(loaders=n), rows(host=1e4)).memory_bytes["rank0"].parts["batches"]
        for n in (0, 1)
    )
    assert ahead == 3 * inline  # the one in use, and two ahead of it


def test_no_more_batches_are_alive_than_an_epoch_has() -> None:
    def batches(num_train: int, loaders: int) -> int:
        short = replace(request(), graph=replace(GRAPH, num_train=num_train))
        found = predict(short, candidate(loaders=loaders), rows(host=1e4))
        return found.memory_bytes["rank0"].parts["batches"]

    alone = batches(10_000, 0)
    # Two ahead and the one in use; an epoch of two steps never has three, and one of one only one.
    alive = [batches(num_train, 1) for num_train in (10_000, 3 * BATCH, 2 * BATCH, BATCH)]
    assert alive == pytest.approx([3 * alone, 3 * alone, 2 * alone, alone], abs=2)


def typed_request(graph: Graph) -> PlanningRequest:
    """A request for a typed graph, whose profile says how many types it has."""
    types = types_of(graph)
    asked = request()
    batches = [
        replace(batch, edge_types=[1.0] * len(types.edge_types), node_types=[0.5, 0.5])
        for batch in asked.profile.batches
    ]
    return replace(
        asked, graph=graph_ref(graph), workload=replace(asked.workload, model="rgcn"),
        profile=replace(asked.profile, batches=batches),
    )  # fmt: skip


def test_a_typed_graphs_lists_are_sorted_once_for_a_hosts_ranks_and_counted_so(
    tmp_path: Path,
) -> None:
    graph, folder = generate_typed(tmp_path / "g", num_papers=300, num_authors=150), tmp_path / "p"
    make_plan(graph, folder, ranks=2, model="rgcn", fanouts=[3, 2], batch_size=20)

    def rank(comm: Communicator) -> tuple[int, int]:
        loader = PlannedLoader(folder, graph, rank=comm.rank, size=2, comm=comm)
        lists = loader.sorted_lists()
        assert lists is not None
        assert lists.order.size == 0
        comm.barrier()
        if comm.rank == 0:  # what one rank writes the other reads
            lists.indices[:] = -lists.indices - 1
        comm.barrier()
        assert (lists.indices < 0).all()
        assert loader.sorted_lists() is lists
        loader.close()
        return lists.ends.nbytes + lists.indices.nbytes, loader.store.resident_bytes

    found = run_in_process(2, rank)
    parts = host_parts(typed_request(graph), candidate(ranks=2))
    assert {size for size, _ in found} == {parts["lists by type"]}
    assert sum(rows for _, rows in found) == parts["rows by type"]


def test_lists_of_pygs_batches_have_their_order_besides(tmp_path: Path) -> None:
    graph = generate_typed(tmp_path / "g", num_papers=300, num_authors=150)
    make_plan(graph, tmp_path / "p", model="rgcn", fanouts=[3, 2], batch_size=20)
    loader = PlannedLoader(tmp_path / "p", graph, blocks=False)
    lists = loader.sorted_lists()
    assert lists is not None
    assert lists.order.size == graph.num_edges
    assert loader.over(graph.val_idx).sorted_lists() is lists
    loader.close()


@pytest.mark.parametrize("name", ["fastgcn", "las"])
def test_what_a_sampler_keeps_by_node_is_counted_on_cores(name: str, small_graph: Graph) -> None:
    layers: dict[str, float | str] = {"sizes": "20,10"} if name == "fastgcn" else {}
    named = Sampler(name=name, dialect="every_hop", parameters=layers)
    asked = replace(request(), graph=graph_ref(small_graph), user_sampler=named)
    made: Any = build_sampler(named, small_graph.indptr, small_graph.indices, [20, 10], 0)
    if name == "fastgcn":
        row, sums = made.graph.fixed
        held = row.cols.nbytes + row.values.nbytes + sums.nbytes
    else:
        held = made.ring.nbytes
    parts = node_parts(asked, candidate())
    assert set(parts) == {"sampler tables"}
    assert 0.8 * parts["sampler tables"] <= held <= parts["sampler tables"]


def test_what_a_thread_draws_by_node_is_counted_on_cores(small_graph: Graph) -> None:
    named = Sampler(name="fastgcn", dialect="every_hop", parameters={"sizes": "20,10"})
    made: Any = build_sampler(named, small_graph.indptr, small_graph.indices, [20, 10], 0)
    ledger, requests = Ledger(), [Request(seeds=np.arange(9), epoch=0, step=0)]
    made.stack.sample(requests, made._make_table(), ledger)
    taken = max(scratch for _, scratch in ledger.moments)
    asked = replace(request(), graph=graph_ref(small_graph), user_sampler=named)
    for loaders in (0, 1, 2):
        more = draw_bytes(asked, candidate(loaders=loaders), batch_profile(9), on_gpu=False)
        assert 0.95 * more <= max(1, loaders) * taken <= max(1, loaders) * 1000 + more


HOPS = [("neighbor", {}), ("full", {}), ("neighbor", {"draws": "poisson"}), ("las", {"factor": 4})]
HOPS += [("labor", {}), ("labor", {"variant": 1}), ("labor", {"kappa": 4})]
LAYERS = ("ladies", "pladies", "fastgcn")
WIDE, NARROW = [70, 70], [8, 8]
DRAWN = [
    (Sampler(name=name, dialect=dialect, parameters=parameters), fanouts)
    for name, parameters in HOPS
    for dialect in ("first_seen", "every_hop")
    for fanouts in ([NARROW] if parameters or name == "labor" else [NARROW, WIDE])
]
DRAWN += [
    (Sampler(name=name, dialect="every_hop", parameters={"sizes": "900,1900"}), NARROW)
    for name in LAYERS
]


def profiled(drawn: MiniBatch, degree: int) -> BatchProfile:
    """A batch of a graph of one degree as a profile has it, all batches being like it."""
    vertices = np.cumsum(drawn.num_sampled_nodes)
    rows = vertices[:-1].sum() if drawn.dialect == "every_hop" else vertices[-2]
    return replace(
        batch_profile(drawn.num_seeds),
        vertices=[exactly(float(each)) for each in vertices],
        edges=[exactly(float(each)) for each in drawn.num_sampled_edges],
        block_edges=[exactly(float(block.num_edges)) for block in drawn.blocks],
        list_entries=float(degree * rows),
    )


def held_bytes(drawn: MiniBatch) -> int:
    """Bytes of a batch's ids and blocks; nested blocks are parts of the outermost."""
    blocks = drawn.blocks if drawn.dialect == "every_hop" else drawn.blocks[:1]
    arrays = [a for b in blocks for a in (b.indptr, b.indices, b.weight) if a is not None]
    return sum(a.nbytes for a in (drawn.n_id, *arrays))


def uniform_graph(num_nodes: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists of as many neighbours each, drawn at random."""
    indices = np.random.default_rng(0).integers(0, num_nodes, num_nodes * degree)
    return np.arange(num_nodes + 1) * degree, indices.astype(np.int32)


@pytest.mark.parametrize(("named", "fanouts"), DRAWN, ids=str)
@pytest.mark.parametrize(("num_nodes", "degree"), [(60_000, 8), (12_000, 200)])
def test_cores_draw_in_the_bytes_that_are_counted(
    named: Sampler, fanouts: list[int], num_nodes: int, degree: int
) -> None:
    lists, seeds = uniform_graph(num_nodes, degree), np.arange(300)
    for few in (seeds[:1], seeds):  # the first compiles
        made: Any = build_sampler(named, *lists, fanouts, 0, steps_per_epoch=9)
        if named.name == "fastgcn":
            made.sample(seeds[:1], epoch=0, step=0)  # makes the law of all batches
        tracemalloc.start()
        drawn = made.sample(few, epoch=0, step=3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    found = profiled(drawn, degree)
    graph = replace(GRAPH, num_nodes=num_nodes, num_edges=num_nodes * degree)
    asked = replace(
        request(), graph=graph, user_sampler=named, every_hop=named.dialect == "every_hop",
        workload=replace(request().workload, fanouts=fanouts),
    )  # fmt: skip
    size = sampling_bytes(asked, candidate(), found)
    taken = peak - held_bytes(drawn)
    assert taken <= size + 20_000  # scratch of a fixed size
    assert size <= 2 * taken or named.name == "fastgcn"
    if named.name in ("neighbor", "full") and not named.parameters:
        assert size == pytest.approx(made._workspace().nbytes, abs=200)
    for loaders in (0, 2):
        many = sampling_bytes(asked, candidate(loaders=loaders), found)
        assert many == max(1, loaders) * size


@pytest.mark.parametrize("dialect", ["first_seen", "every_hop"])
def test_workspaces_of_typed_graphs_and_links_are_counted(
    dialect: Literal["first_seen", "every_hop"],
) -> None:
    lists, seeds, workload = uniform_graph(20_000, 30), np.arange(300), request().workload
    kinds = np.arange(lists[1].size) % 3
    typed = TypedSampler(*lists, kinds, [[5, 4], [5, 4], [-1, 2]], dialect=Dialect(dialect))
    linked = ExcludingSampler(*lists, [5, 4], dialect=Dialect(dialect))
    graph = replace(GRAPH, num_nodes=20_000, num_edges=lists[1].size)
    several = replace(workload, fanouts=[5, 4], type_fanouts={"a": [-1, 2]})
    for made, changes, types in ((typed, {}, 3), (linked, {"task": "link"}, 0)):
        found = profiled(made.sample(seeds, epoch=0, step=0), 30)
        found = replace(found, edge_types=[1 / 3] * types)
        asked = replace(
            request(), graph=replace(graph, **changes), every_hop=dialect == "every_hop",
            workload=several,
        )  # fmt: skip
        size = sampling_bytes(asked, candidate(), found)
        assert size == pytest.approx(made._workspace().nbytes, abs=200)


MODELS = [("sage", {}), ("gcn", {}), ("gat", {}), ("sage", {"hidden": 64}), ("rgcn", {})]


@pytest.mark.parametrize("dialect", ["first_seen", "every_hop"])
@pytest.mark.parametrize(("model", "changes"), MODELS, ids=str)
def test_blocks_are_counted_as_loaders_and_steps_on_cores_hold_them(
    model: str, changes: dict[str, Any], dialect: Literal["first_seen", "every_hop"]
) -> None:
    lists, seeds, dim = uniform_graph(20_000, 30), np.arange(2000), 40
    options: dict[str, Any] = {"model": model, "hidden": 16, "fanouts": [6, 5], **changes}
    workload = replace(request().workload, **options)
    named = Sampler(name="neighbor" if model == "gat" else "labor", dialect=dialect)
    made: Any = build_sampler(named, *lists, [6, 5], 0)
    if model == "rgcn":
        named, kinds = Sampler(dialect=dialect), np.arange(lists[1].size) % 3
        made = TypedSampler(*lists, kinds, [[3, 2]] * 3, dialect=Dialect(dialect))
    batch = made.sample(seeds, epoch=0, step=0)
    found = replace(profiled(batch, 30), edge_types=[1 / 3] * 3 * (model == "rgcn"))
    batch = fill_weights(batch, workload, count_degrees(*lists)[0])
    graph = replace(GRAPH, num_nodes=20_000, feature_dim=dim, num_classes=7)
    asked = replace(
        request(), graph=graph, workload=workload, user_sampler=named,
        every_hop=dialect == "every_hop",
    )  # fmt: skip
    apart = batch.blocks if model == "gcn" or asked.every_hop else batch.blocks[:1]
    names = ("indptr", "indices", "weight", "relation_ptr")
    held = [getattr(block, name) for block in apart for name in names]
    held_size = sum(each.nbytes for each in held if each is not None)
    # Of a row whose drawn neighbours are itself one edge goes for the self-loop that comes.
    assert block_bytes(asked, candidate(), found) == pytest.approx(held_size, rel=0.001)
    types = GraphTypes(edge_types=["a", "b", "c"], node_types=["v"], widths=[dim])
    module: Any = build_model(workload, dim, 7, "multiclass", types=types)
    x, peak = torch.rand(len(batch.n_id), dim), 0
    for _ in range(2):  # the first compiles
        blocks = torch_blocks(batch)
        tracemalloc.start()
        module(x, blocks).sum().backward()
        peak = tracemalloc.get_traced_memory()[1]  # of numpy's arrays, not torch's
        tracemalloc.stop()
    assert step_parts(asked, found)["blocks by source"] == pytest.approx(peak, abs=20_000)


@pytest.mark.parametrize("dialect", ["first_seen", "every_hop"])
def test_tables_of_shared_batches_are_counted(dialect: Literal["first_seen", "every_hop"]) -> None:
    nodes, seeds = 60_000, np.arange(600)
    lists, owners = uniform_graph(nodes, 20), Owners(2, num_nodes=nodes)

    def rank(comm: Communicator) -> tuple[MiniBatch, int]:
        named = Sampler(dialect=dialect)
        made = CooperativeSampler(named, *lists, [8, 8], 0, owners=owners, comm=comm)
        batch = made.sample(seeds[owners.of(seeds) == comm.rank], epoch=0, step=0)
        numbered = (made._frontier._own, made._frontier._remote)
        spaces = [each._space for each in numbered] + [hop._workspace() for hop in made._hops]
        return batch, sum(space.nbytes for space in spaces)

    batch, held = run_in_process(2, rank)[0]
    own = [float(n) for n in np.cumsum(batch.num_sampled_nodes)]
    remote = [float(each.num_remote) for each in reversed(batch.exchanges)]
    asked = remote if dialect == "every_hop" else [remote[0], remote[1] - remote[0]]
    edges = [float(n) for n in batch.num_sampled_edges]
    drawn = [min(e, n + m) for e, n, m in zip(edges, own[1:], remote, strict=True)]
    part = Part(own=own, edges=edges, remote=remote, asked=asked, drawn=drawn, expanded=own[:-1])
    found = replace(profiled(batch, 20), vertices=[exactly(n) for n in own])
    work = replace(request().workload, fanouts=[8, 8])
    graph = replace(GRAPH, num_nodes=nodes)
    asking = replace(request(), graph=graph, workload=work, every_hop=dialect == "every_hop")
    ids = sum(24 * (n + m) for n, m in zip(own[1:], remote, strict=True))
    size = sampling_bytes(asking, candidate(), found) + exchange_parts(part, 0, nodes)["exchange"]
    assert held <= size - ids <= 1.2 * held


def test_a_cache_decides_in_bytes_that_are_counted() -> None:
    cached = candidate().with_policy("lru")
    most = round(BatchTail.of(request().profile.batch(BATCH)).vertices)
    ids, out = np.arange(most), np.empty((most, 100), np.float32)
    location = LocationTable(
        encode(np.zeros(NODES, np.int64), np.arange(NODES)), [Source(kind="host")]
    )
    dense = {0: Dense("host", np.zeros((NODES, 100), np.float32), private=False)}
    below = FeatureStore(location, dense, [], 100)
    store = CachedFeatureStore(below, location, rank=0, policy="lru", num_slots=1000)
    for first in (0, 0, 500):  # the first read compiles, and makes what is kept
        tracemalloc.start()
        store.read(ids + first, out)
        decided = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    found = price(cached, rows(host=1e4)).memory_bytes["rank0"].parts["cache directory"]
    assert found == pytest.approx(4 * NODES + 1.25 * most * 400 + decided, abs=12_000)


def test_gcns_degrees_are_counted_on_cores() -> None:
    asked = replace(request(), workload=replace(request().workload, model="gcn"))
    found = predict(asked, candidate(), rows(host=1e4)).memory_bytes["rank0"].parts
    assert found["degrees"] == 12 * NODES


class TestMemory:
    """[A10] of docs/formulas.md 8.10 and the sum that is shown."""

    def test_the_tail_of_a_thousand_batches(self) -> None:
        s = Spread(mean=100.0, std=10.0, p99=120.0, largest=121.0)
        assert tail(s, profiled=50, draws=1000) == pytest.approx(100 + 10 * 3.241, abs=0.05)
        assert tail(s, profiled=50, draws=8000) == pytest.approx(100 + 10 * 3.80, abs=0.2)

    def test_a_seen_batch_always_fits(self) -> None:
        s = Spread(mean=100.0, std=1.0, p99=150.0, largest=190.0)
        assert tail(s, profiled=50, draws=10) == 190.0

    def test_a_skewed_tail_reaches_farther_when_much_was_seen(self) -> None:
        s = Spread(mean=100.0, std=5.0, p99=150.0, largest=151.0)
        assert tail(s, profiled=500, draws=1000) > tail(s, profiled=50, draws=1000)

    def test_parts(self) -> None:
        assert model_bytes(1000) == 16_000
        assert batch_bytes(100.0, 4000.0, 400, 3) == 3 * (100 * 408 + 4000)
