"""Typed batches carry the right rows, fan-outs by type, and HeteroData PyG can use."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import HeteroConv, SAGEConv

from gnnplan.runtime.device import has_triton
from gnnplan.runtime.errors import DatasetError, InputError
from gnnplan.runtime.features.store import TypedFeatureStore
from gnnplan.runtime.graph.dataset import Graph, rows_within_types, types_of
from gnnplan.runtime.graph.generate import EDGE_TYPES, NODE_TYPES, generate_typed
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.schema import DynamicCache
from gnnplan.runtime.sampling.pyg import HeteroView
from gnnplan.runtime.sampling.typed import TypedSampler
from tests.support.plans import make_plan, with_half_tables


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate_typed(
        tmp_path_factory.mktemp("typed") / "g", num_papers=900, num_authors=300, num_classes=4
    )


def loader_of(graph: Graph, folder: Path, **settings: Any) -> PlannedLoader:
    asked = {key: settings.pop(key) for key in ("blocks", "row_dtype") if key in settings}
    make_plan(graph, folder, **({"model": "rgcn", "batch_size": 64, "fanouts": [3, 2]} | settings))
    return PlannedLoader(folder, graph, **asked)


def test_rows_are_each_types_own_and_counted_so(graph: Graph, tmp_path: Path) -> None:
    assert graph.node_type is not None
    rows = rows_within_types(graph.node_type, 2)
    for batch in loader_of(graph, tmp_path / "plan"):
        read = 0
        for number, name in enumerate(NODE_TYPES):
            own = graph.node_type[batch.n_id] == number
            table = graph.x_by_type[name]
            found = batch.x.numpy()[own]
            assert np.array_equal(found[:, : table.shape[1]], table[rows[batch.n_id[own]]])
            assert not found[:, table.shape[1] :].any()
            read += int(own.sum()) * table.shape[1] * 4
        assert batch.rows_by_source == {"host": len(batch.n_id)}
        assert batch.bytes_by_source == {"host": read}
        assert np.array_equal(batch.y.numpy(), np.asarray(graph.y)[batch.seeds])


@pytest.mark.parametrize("cache", [False, True])
def test_rows_may_lie_in_a_ranks_memory(graph: Graph, tmp_path: Path, cache: bool) -> None:
    placed = {"cache": DynamicCache(policy="lru", rows=[50])} if cache else {"own_rows": 300}
    plain = loader_of(graph, tmp_path / "plain").batches(3)
    kinds = set[str]()
    for found, expected in zip(
        loader_of(graph, tmp_path / "placed", **placed).batches(3), plain, strict=True
    ):
        assert torch.equal(found.x, expected.x)
        kinds |= {kind for kind, count in found.rows_by_source.items() if count}
    assert kinds == {"cache" if cache else "own", "host"}


PLACED: dict[str, dict[str, Any]] = {
    "host": {},
    "own": {"own_rows": 300},
    "cache": {"cache": DynamicCache(policy="lru", rows=[50])},
}


@pytest.mark.parametrize("placed", PLACED)
def test_tables_of_16_bits_are_read_as_they_are_stored(
    graph: Graph, tmp_path: Path, placed: str
) -> None:
    half = with_half_tables(graph, tmp_path / "half")
    settings = PLACED[placed] | {"precision": "float16"}
    plain = loader_of(graph, tmp_path / "plain").batches(3)
    wide = loader_of(half, tmp_path / "wide", **settings).batches(3)
    stored = loader_of(half, tmp_path / "stored", row_dtype=None, **settings).batches(3)
    for expected, found, narrow in zip(plain, wide, stored, strict=True):
        rounded = expected.x.half()
        assert torch.equal(found.x, rounded.float())
        assert torch.equal(narrow.x, rounded)
        if placed == "host":
            assert 2 * found.bytes_by_source["host"] == expected.bytes_by_source["host"]


@pytest.mark.skipif(not has_triton(), reason="no triton, whose interpreter gathers as a GPU does")
@pytest.mark.parametrize("placed", PLACED)
def test_so_they_are_by_a_device_which_keeps_them_on_the_host_in_16_bits(
    graph: Graph, tmp_path: Path, placed: str, kernel_device: torch.device
) -> None:
    half = with_half_tables(graph, tmp_path / "half")
    plain = loader_of(graph, tmp_path / "plain").batches(3)
    make_plan(
        half, tmp_path / "plan", model="rgcn", batch_size=64, fanouts=[3, 2], **PLACED[placed]
    )
    loader = PlannedLoader(tmp_path / "plan", half, device=kernel_device, on_device=True)
    sources = loader.store._table.sources.values()  # type: ignore[attr-defined]
    assert {source.kind for source in sources} >= {"host"}
    assert {source.table.dtype for source in sources} == {torch.float16}
    for expected, found in zip(plain, loader.batches(3), strict=True):
        assert torch.equal(found.x.cpu(), expected.x.half().float())
    loader.close()


def test_edge_types_may_have_fan_outs_of_their_own(graph: Graph, tmp_path: Path) -> None:
    own = {"author__writes__paper": [-1, 1]}
    (batch,) = loader_of(graph, tmp_path / "plan", type_fanouts=own, dialect="every_hop").batches(1)
    most = [np.diff(b.relation_ptr).reshape(-1, 3).max(0).tolist() for b in batch.blocks[::-1]]
    assert most[0][0] == 3
    assert most[0][1] > 3  # all authors of a paper: up to 5
    assert most[1] == [2, 1, 2]
    with pytest.raises(InputError, match="expected edge types among paper__cites__paper"):
        loader_of(graph, tmp_path / "other", type_fanouts={"cites": [1, 1]})


def test_a_hetero_view_has_the_graphs_edges_and_rows(graph: Graph, tmp_path: Path) -> None:
    assert graph.edge_type is not None
    assert graph.node_type is not None
    ids = [np.flatnonzero(graph.node_type == number) for number in range(2)]
    for data in loader_of(graph, tmp_path / "plan", blocks=False).batches(2):
        assert (data.node_types, data.edge_types) == (
            list(NODE_TYPES),
            [tuple(name.split("__")) for name in EDGE_TYPES],
        )
        paper = data["paper"]
        seeds = graph.train_idx[paper.input_id.numpy()]
        assert ids[0][paper.n_id[: paper.batch_size]].tolist() == seeds.tolist()
        for number, name in enumerate(NODE_TYPES):
            store = data[name]
            assert sum(store.num_sampled_nodes) == store.num_nodes == len(store.n_id)
            assert np.array_equal(store.x.numpy(), graph.x_by_type[name][store.n_id])
            assert np.array_equal(store.y.numpy(), np.asarray(graph.y)[ids[number][store.n_id]])
        for number, name in enumerate(EDGE_TYPES):
            source, _, destination = name.split("__")
            store = data[tuple(name.split("__"))]
            e_id = store.e_id.numpy()
            assert (graph.edge_type[e_id] == number).all()
            u = ids[NODE_TYPES.index(source)][data[source].n_id[store.edge_index[0]]]
            v = ids[NODE_TYPES.index(destination)][data[destination].n_id[store.edge_index[1]]]
            assert np.array_equal(u, graph.indices[e_id])
            assert np.array_equal(v, np.searchsorted(graph.indptr, e_id, side="right") - 1)
            assert sum(store.num_sampled_edges) == len(e_id)


def test_labels_by_type_are_handed_out_where_the_rows_lie(graph: Graph, tmp_path: Path) -> None:
    (batch,) = loader_of(graph, tmp_path / "plan").batches(1)
    data: Any = HeteroView(graph, types_of(graph))(batch, batch.x.to("meta"))
    for name in NODE_TYPES:
        assert data[name].y.device == data[name].x.device == torch.device("meta")


def test_pygs_hetero_layers_run_on_the_view(graph: Graph, tmp_path: Path) -> None:
    (data,) = loader_of(graph, tmp_path / "plan", blocks=False).batches(1)
    convs: Any = {tuple(name.split("__")): SAGEConv((-1, -1), 8) for name in EDGE_TYPES}
    layer: Any = HeteroConv(convs)
    out = layer(data.x_dict, data.edge_index_dict)
    assert out["paper"].shape == (data["paper"].num_nodes, 8)
    assert torch.isfinite(out["paper"]).all()


def test_what_cannot_be_loaded_is_refused(graph: Graph, small_graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="expected model rgcn for features by node type"):
        loader_of(graph, tmp_path / "a", model="sage")
    with pytest.raises(DatasetError, match="expected edge types"):
        loader_of(small_graph, tmp_path / "b")
    store = TypedFeatureStore(graph)
    with pytest.raises(IndexError, match="from 0 to 1199"):
        store.read(np.array([1200]), np.zeros((1, 32), np.float32))
    with pytest.raises(DatasetError, match="a feature table per node type"):
        TypedFeatureStore(small_graph)


def test_a_share_of_one_seed_or_of_none_has_a_view_of_its_own_types(tmp_path: Path) -> None:
    graph = generate_typed(tmp_path / "g", num_papers=60, num_authors=40, num_classes=2)
    assert graph.node_type is not None
    assert graph.edge_type is not None
    sampler = TypedSampler(
        graph.indptr, graph.indices, graph.edge_type, [[3, 2]] * 3, node_type=graph.node_type
    )
    view = HeteroView(graph, types_of(graph))
    next_to_it = set[tuple[int, int]]()
    for seed in range(graph.num_nodes):
        batch = sampler.sample(np.array([seed]), epoch=0, step=0, input_id=np.array([7]))
        data: Any = view(batch)
        own = int(graph.node_type[seed])
        seeds, others = (data[NODE_TYPES[number]] for number in (own, 1 - own))
        assert (seeds.batch_size, seeds.input_id.tolist()) == (1, [7])
        assert np.flatnonzero(graph.node_type == own)[seeds.n_id[0]] == seed
        assert "batch_size" not in others
        next_to_it |= {(own, int(kind)) for kind in graph.node_type[batch.n_id[1:2]]}
    assert {(0, 1), (1, 0)} & next_to_it  # the second node is often of the other type
    nothing: Any = view(sampler.sample(np.empty(0, np.int64), epoch=0, step=0))
    assert [nothing[name].num_nodes for name in NODE_TYPES] == [0, 0]
    assert all(nothing[tuple(name.split("__"))].edge_index.shape == (2, 0) for name in EDGE_TYPES)
    assert (nothing["paper"].batch_size, nothing["paper"].input_id.tolist()) == (0, [])
    assert "batch_size" not in nothing["author"]


def test_a_rank_without_seeds_is_told_so_of_their_type(graph: Graph, tmp_path: Path) -> None:
    """Its script asks for `batch["paper"].batch_size`, as on every rank and at every step."""
    make_plan(graph, tmp_path, model="rgcn", fanouts=[3, 2], ranks=2, batch_size=1)
    sizes = dict[str, list[int]]({"paper": [], "author": []})
    for rank in range(2):
        loader = PlannedLoader(tmp_path, graph, blocks=False, rank=rank, size=2)
        for name, seeds in (("paper", loader), ("author", loader.over(("author", [7])))):
            store = next(iter(seeds))[name]
            assert len(store.input_id) == store.batch_size
            sizes[name].append(store.batch_size)
    assert sizes == {"paper": [0, 1], "author": [0, 1]}
