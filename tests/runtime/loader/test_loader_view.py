"""What a user's data keeps of edges is found by a batch's `e_id`, from the import to the batch."""

import copy
import logging
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.nn.models import GCN
from torch_geometric.transforms import ToUndirected

from gnnplan.runtime.errors import InputError, SlowerPathWarning, forget_warnings
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_links, generate_typed
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.identity import unused_weights
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.planned import planned
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Sampler, TopologyPlacement
from tests.support.plans import change_strategy, make_plan

NODES, EDGES = 200, 1500


def users_data(seed: int = 0, **fields: Any) -> Any:
    """A random multigraph in no order, with loops, and three numbers per edge that name it."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    edge_index = torch.cat([edge_index, edge_index[:, :50], edge_index[:, 50:90].flip(0)], dim=1)
    number = torch.arange(edge_index.shape[1]).float()
    return Data(
        edge_index=edge_index,
        x=torch.randn(NODES, 4, generator=generator),
        y=torch.randint(0, 3, (NODES,), generator=generator),
        edge_attr=torch.stack([number, *edge_index.float()], dim=1),
        **fields,
    )


def imported(data: Data, folder: Path, **options: Any) -> Graph:
    torch.save(data, folder / "saved.pt")
    return import_graph(folder / "saved.pt", folder / "graph", options=ImportOptions(**options))


def ends_of(batch: Any) -> Tensor:
    """The batch's edges by their nodes' own numbers."""
    return batch.n_id[batch.edge_index]


SAMPLERS: dict[str, dict[str, Any]] = {
    "neighbor": {},
    "all neighbours": {"sampler": Sampler(name="full"), "fanouts": [-1, -1]},
    "with replacement": {"sampler": Sampler(name="neighbor", parameters={"draws": "replacement"})},
    "ahead": {"sample_threads": 2},
    "own topology": {"topology": TopologyPlacement(policy="replicated")},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_edge_attr_by_e_id_are_the_rows_of_the_batchs_edges(name: str, tmp_path: Path) -> None:
    data = users_data()
    graph = imported(data, tmp_path)
    settings: dict[str, Any] = {"fanouts": [4, 3], "batch_size": 32, **SAMPLERS[name]}
    make_plan(graph, tmp_path / "plan", **settings)
    loader = PlannedLoader(tmp_path / "plan", graph, blocks=False)
    seen = 0
    for batch in loader:
        assert torch.equal(data.edge_index[:, batch.e_id], ends_of(batch))
        rows = data.edge_attr[batch.e_id]
        assert torch.equal(rows[:, 1:].long().t(), ends_of(batch))
        seen += len(batch.e_id)
    assert seen > 500
    loader.close()


@pytest.mark.parametrize(
    "options",
    [
        {"symmetrise": True},
        {"deduplicate": True},
        {"self_loops": "remove"},
        {"symmetrise": True, "deduplicate": True, "self_loops": "remove"},
    ],
)
def test_so_are_those_of_a_graph_whose_edges_were_changed_on_import(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A mirrored edge has the row of the edge that it mirrors."""
    data = users_data(1)
    graph = imported(data, tmp_path, **options)
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[-1, -1])
    mirrored = 0
    for batch in PlannedLoader(tmp_path / "plan", graph, blocks=False):
        own, found = ends_of(batch), data.edge_index[:, batch.e_id]
        same = (own == found).all(0)
        assert (same | (own == found.flip(0)).all(0)).all()
        mirrored += int((~same).sum())
    assert (mirrored > 0) == ("symmetrise" in options)


def test_a_loop_that_import_added_has_no_row_and_no_other_edges_one(tmp_path: Path) -> None:
    data = users_data(2)
    graph = imported(data, tmp_path, self_loops="add")
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[-1, -1])
    batch = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    added, own = batch.e_id < 0, ends_of(batch)
    assert added.any()
    assert torch.equal(own[0, added], own[1, added])
    assert torch.equal(data.edge_index[:, batch.e_id[~added]], own[:, ~added])
    with pytest.raises(IndexError):
        data.edge_attr[batch.e_id]


def test_edges_of_links_and_of_a_dataset_in_its_own_order_are_places_in_indices(
    tmp_path: Path,
) -> None:
    graph = generate_links(tmp_path / "links", num_nodes=400, seed=0)
    assert graph.edge_id is None
    make_plan(graph, tmp_path / "plan", batch_size=64, fanouts=[3, 3])
    batch = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    source = torch.from_numpy(np.asarray(graph.indices, np.int64))
    assert torch.equal(source[batch.e_id], ends_of(batch)[0])


def test_edges_by_type_have_the_sources_places_and_weights(tmp_path: Path) -> None:
    graph = generate_typed(tmp_path / "g", num_papers=300, num_authors=100, num_classes=4)
    number = np.random.default_rng(0).permutation(graph.num_edges)
    weight = number.astype(np.float32) / 7
    graph = replace(graph, edge_id=number, edge_weight=weight)
    make_plan(graph, tmp_path / "plan", model="rgcn", batch_size=64, fanouts=[3, 2])
    loader = PlannedLoader(tmp_path / "plan", graph, blocks=False)
    places = np.argsort(number)
    for batch in loader:
        for store in batch.edge_stores:
            stored = places[store.e_id.numpy()]
            np.testing.assert_array_equal(store.edge_weight.numpy(), weight[stored])
            kind = np.asarray(graph.edge_type)[stored]
            assert len(set(kind.tolist())) <= 1


def test_stored_weights_are_in_the_batch_by_their_edges(tmp_path: Path) -> None:
    data = users_data(3, edge_weight=torch.rand(EDGES + 90))
    graph = imported(data, tmp_path)
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[4, 3])
    for batch in PlannedLoader(tmp_path / "plan", graph, blocks=False):
        assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])
        assert not hasattr(batch, "weights_of_sampler")


def test_weights_of_a_sampler_come_first_and_are_no_plain_models(tmp_path: Path) -> None:
    data = users_data(3, edge_weight=torch.rand(EDGES + 90))
    graph = imported(data, tmp_path)
    sampler = Sampler(
        name="neighbor",
        parameters={
            "draws": "poisson", "estimator": "horvitz-thompson", "weights": "graph"
        },
    )  # fmt: skip
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[4, 3], sampler=sampler)
    batch = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    assert batch.weights_of_sampler
    assert not torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])
    assert not unused_weights(load_plan(tmp_path / "plan"), graph)
    with pytest.raises(InputError, match="a sampler's weights"):
        planned(GCN(4, 8, 2, 3))(batch)


def test_what_does_not_use_the_weights_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = users_data(3, edge_weight=torch.rand(EDGES + 90))
    graph = imported(data, tmp_path)
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[4, 3])
    with caplog.at_level(logging.WARNING):
        PlannedLoader(tmp_path / "plan", graph).close()
    assert "the edge weights are not used: neighbor takes all edges alike" in caplog.text
    caplog.clear()
    loader = PlannedLoader(tmp_path / "plan", graph, blocks=False)
    assert not caplog.records
    model = planned(GCN(4, 8, 2, 3))
    with pytest.warns(UserWarning, match="edge_weight is not used") as said:
        outputs = [model(batch) for batch in loader]
    assert len(said) == 1
    assert len(outputs) == len(loader)


FIELDS = {"edge_attr": "not used: edge_attr .*edge_data", "pos": "not used: pos .*node_data"}


def test_a_field_that_import_left_out_says_why_and_how_to_have_it(tmp_path: Path) -> None:
    data = users_data(pos=torch.rand(NODES, 2), score=torch.rand(NODES))
    graph = imported(data, tmp_path)
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[4, 3])
    loader = PlannedLoader(tmp_path / "plan", graph, blocks=False)
    forget_warnings()
    for field, why in FIELDS.items():
        with pytest.warns(UserWarning, match=rf"batch\.{field} is None.*import: {why}=") as said:
            assert {getattr(batch, field) for batch in loader} == {None}
        assert len(said) == 1
    batch = next(iter(loader))
    with pytest.raises(AttributeError, match=r"score.*not known to this format.*node_data="):
        _ = batch.score
    with pytest.raises(AttributeError, match="neg_sampling='binary'"):
        _ = batch.edge_label_index
    assert getattr(batch, "score", 1) == 1
    given = PlannedLoader(
        tmp_path / "plan", graph, blocks=False, edge_data={"edge_attr": data.edge_attr},
        node_data={"score": data.score},
    )  # fmt: skip
    for batch in given:
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert torch.equal(batch.score, data.score[batch.n_id])
    with pytest.raises(AttributeError, match=r"edge_attr.*PlannedLoader\(blocks=False\)"):
        _ = next(iter(PlannedLoader(tmp_path / "plan", graph))).edge_attr


def test_one_value_of_each_edge_that_became_its_weight_says_so(tmp_path: Path) -> None:
    data = users_data()
    data.edge_attr = data.edge_attr[:, :1] + 1
    graph = imported(data, tmp_path)
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[4, 3])
    batch = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    forget_warnings()
    with pytest.warns(UserWarning, match="import: edge weights: from edge_attr"):
        assert batch.edge_attr is None
    assert torch.equal(batch.edge_weight, data.edge_attr[batch.e_id, 0])


def test_batches_do_in_pyg_what_datas_do(tmp_path: Path) -> None:
    """Fields that the source never had are None without a word; copies and stores are PyG's."""
    data = users_data()
    graph = imported(data, tmp_path)
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[4, 3])
    batch = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    names = set(batch.keys())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(batch, Data)
        assert batch.pos is batch.time is batch.face is None
        assert ("edge_attr" in batch, hasattr(batch, "score")) == (False, False)
        batch.validate()
        forms = [copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))]
        forms += [batch.clone(), Data(**batch.to_dict()), batch.to("cpu")]
        for form in forms:
            assert set(form.keys()) == names
            form.edge_attr = data.edge_attr[batch.e_id]
            assert torch.equal(form.edge_attr, data.edge_attr[batch.e_id])
        joined: Any = Batch.from_data_list(forms[:2])
        assert joined.num_nodes == 2 * int(batch.num_nodes or 0)
        assert torch.equal(joined.edge_attr[: batch.num_edges], forms[0].edge_attr)
        assert ToUndirected()(forms[2]).num_nodes == batch.num_nodes


def test_edge_ids_are_read_for_batches_that_have_them_and_not_held_in_memory(
    tmp_path: Path,
) -> None:
    graph = imported(users_data(), tmp_path)
    make_plan(graph, tmp_path / "plan", batch_size=32, fanouts=[4, 3])

    class Untouched(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("read")

    assert graph.edge_id is not None
    hidden = replace(graph, edge_id=np.asarray(graph.edge_id).view(Untouched))
    assert len(list(PlannedLoader(tmp_path / "plan", hidden))) > 1
    mapped = open_graph(graph.path).edge_id
    assert isinstance(mapped, np.memmap) or isinstance(getattr(mapped, "base", None), np.memmap)


def test_labels_lie_where_the_rows_do(small_graph: Graph, tmp_path: Path) -> None:
    """The meta device stands for a GPU: a loss takes outputs and labels of one device."""
    make_plan(small_graph, tmp_path, pipeline=["seeds", "sample", "gather", "copy", "batch"])
    batch = next(iter(PlannedLoader(tmp_path, small_graph, blocks=False, device="meta")))
    assert [batch.x.device.type, batch.y.device.type] == ["meta", "meta"]
    assert len(batch.y) == len(batch.n_id)


def test_a_plan_for_gpus_whose_script_names_none_is_said(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = make_plan(small_graph, tmp_path)
    change_strategy(plan, tmp_path, devices=[replace(plan.strategy.devices[0], kind="cuda")])
    forget_warnings()
    with pytest.warns(SlowerPathWarning, match=r"for GPU 0, because .* device cpu; .*'cuda:0'"):
        PlannedLoader(tmp_path, small_graph).close()
