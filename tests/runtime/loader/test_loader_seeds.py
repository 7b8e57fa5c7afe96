"""Loaders over other seeds than training's, and PyG's keywords: what a script asks of a loader."""

import gc
import inspect
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from gnnplan.runtime.errors import InputError, forget_warnings
from gnnplan.runtime.graph.dataset import Graph, rows_within_types
from gnnplan.runtime.graph.generate import generate_links, generate_typed
from gnnplan.runtime.loader.loader import PlannedLoader, check_graph, plan_folder
from gnnplan.runtime.loader.pyg import check_keywords
from gnnplan.runtime.plan.schema import Sampler
from tests.support.cooperative import make_cooperative_plan
from tests.support.plans import make_plan


def opened(graph: Graph, folder: Path, loader: dict[str, Any] | None = None, **plan: Any) -> Any:
    make_plan(graph, folder, **{"fanouts": [4, 3], "batch_size": 64, **plan})
    return PlannedLoader(folder, graph, **{"blocks": False, **(loader or {})})


def seeds_in(loader: PlannedLoader) -> list[int]:
    return [int(v) for batch in loader for v in batch.n_id[: batch.batch_size]]


def test_validation_goes_over_its_nodes_once_and_in_their_order(
    small_graph: Graph, tmp_path: Path
) -> None:
    loader = opened(small_graph, tmp_path)
    held = loader.over("val", batch_size=50)
    assert seeds_in(held) == seeds_in(held) == small_graph.val_idx.tolist()
    assert len(held) == -(-len(small_graph.val_idx) // 50)
    assert (held.batch_size, list(held.dataset)) == (50, small_graph.val_idx.tolist())
    batch = next(iter(held))
    assert small_graph.x is not None
    assert small_graph.y is not None
    np.testing.assert_array_equal(batch.x, small_graph.x[batch.n_id])
    np.testing.assert_array_equal(batch.y, small_graph.y[batch.n_id])
    assert max(np.bincount(batch.edge_index[1])[: batch.batch_size]) <= 4


def nodes_asked() -> dict[str, Any]:
    mask = torch.zeros(3000, dtype=torch.bool)
    mask[[3, 700, 12]] = True
    return {
        "mask": mask,
        "mask of numpy": mask.numpy(),
        "ids": torch.tensor([3, 12, 700]),
        "a list": [3, 12, 700],
        "int32": np.array([3, 12, 700], np.int32),
    }


@pytest.mark.parametrize("form", nodes_asked())
def test_input_nodes_are_taken_in_all_forms_of_pyg(
    form: str, small_graph: Graph, tmp_path: Path
) -> None:
    loader = opened(small_graph, tmp_path)
    assert seeds_in(loader.over(nodes_asked()[form])) == [3, 12, 700]


def test_none_means_all_nodes(small_graph: Graph, tmp_path: Path) -> None:
    assert seeds_in(opened(small_graph, tmp_path).over()) == list(range(small_graph.num_nodes))


def test_a_shuffled_loader_has_another_order_each_epoch_and_repeats(
    small_graph: Graph, tmp_path: Path
) -> None:
    loader = opened(small_graph, tmp_path)
    held = loader.over("test", shuffle=True)
    first, second = seeds_in(held), seeds_in(held)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(small_graph.test_idx)
    assert seeds_in(loader.over("test", shuffle=True)) == first


def test_an_incomplete_last_batch_is_left_out_if_asked(small_graph: Graph, tmp_path: Path) -> None:
    held = opened(small_graph, tmp_path).over(range(100), batch_size=40, drop_last=True)
    assert seeds_in(held) == list(range(80))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_small_last_batch_of_each_epoch_is_marked(
    small_graph: Graph, tmp_path: Path, drop_last: bool
) -> None:
    held = opened(small_graph, tmp_path).over(range(100), batch_size=40, drop_last=drop_last)
    for _ in range(2):
        seeds_in(held)
    assert held.meter.small_steps == (set() if drop_last else {2, 5})
    even = opened(small_graph, tmp_path).over(range(80), batch_size=40)
    seeds_in(even)
    assert even.meter.small_steps == set()


def test_ranks_share_other_seeds_in_equally_many_batches(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path, ranks=3, batch_size=48)
    shares = [
        PlannedLoader(tmp_path, small_graph, rank=r, size=3).over("val", batch_size=7)
        for r in range(3)
    ]
    counts = [[batch.num_seeds for batch in share] for share in shares]
    assert len({len(each) for each in counts}) == 1
    assert max(max(each) for each in counts) == 7
    assert sum(map(sum, counts)) == len(small_graph.val_idx)
    whole = PlannedLoader(tmp_path, small_graph, rank=1, size=3).over("val", alone=True)
    assert [int(v) for batch in whole for v in batch.seeds] == small_graph.val_idx.tolist()


def test_a_loader_over_other_seeds_reads_by_the_same_store_and_leaves_it_open(
    small_graph: Graph, tmp_path: Path
) -> None:
    loader = opened(small_graph, tmp_path, sample_threads=1)
    held = loader.over("val")
    assert held.store is loader.store
    first = seeds_in(held)
    held.close()
    assert len(seeds_in(loader)) == small_graph.num_train
    again = loader.over("val")
    assert seeds_in(again) == first
    loader.close()


@pytest.mark.parametrize("threads", [0, 1])
def test_a_loader_over_other_seeds_holds_the_one_whose_rows_it_reads(
    small_graph: Graph, tmp_path: Path, threads: int
) -> None:
    held = opened(small_graph, tmp_path, sample_threads=threads).over("val")
    gc.collect()
    assert small_graph.x is not None
    for batch in held:
        batch.x.fill_(-1.0)  # what a later read that reads nothing would leave
    for batch in held:
        np.testing.assert_array_equal(batch.x, small_graph.x[batch.n_id])


@pytest.mark.parametrize("threads", [0, 1])
def test_closing_a_loader_closes_those_that_read_by_its_store(
    small_graph: Graph, tmp_path: Path, threads: int
) -> None:
    loader = opened(small_graph, tmp_path, sample_threads=threads)
    held = loader.over("val", batch_size=16)
    further = held.over("test")
    halfway = iter(held)
    next(halfway)
    loader.close()
    for taken in (halfway, iter(held), iter(further)):
        with pytest.raises(InputError, match="found one that was closed"):
            next(taken)


def test_training_is_the_same_beside_a_validation(small_graph: Graph, tmp_path: Path) -> None:
    alone, beside = (opened(small_graph, tmp_path / n) for n in ("a", "b"))
    for _ in range(2):
        first = [batch.n_id for batch in alone]
        second = [batch.n_id for batch in beside]
        seeds_in(beside.over("val"))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_state_of_an_evaluation_goes_on_in_its_middle(
    small_graph: Graph, tmp_path: Path
) -> None:
    held = opened(small_graph, tmp_path).over("val", batch_size=16)
    whole = seeds_in(held)
    taken = iter(held)
    for _ in range(2):
        next(taken)
    state = held.state_dict()
    held.load_state_dict(state)
    assert seeds_in(held) == whole[32:]


class TwoLayers(torch.nn.Module):
    """PyG's example of layer-wise inference, its loop unchanged."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(width, 8), SAGEConv(8, 3)])

    @torch.no_grad()
    def inference(self, x_all: torch.Tensor, subgraph_loader: Any) -> torch.Tensor:
        for i, conv in enumerate(self.convs):
            xs = []
            for batch in subgraph_loader:
                x = x_all[batch.n_id]
                x = conv(x, batch.edge_index)
                if i < len(self.convs) - 1:
                    x = x.relu()
                xs.append(x[: batch.batch_size])
            x_all = torch.cat(xs, dim=0)
        return x_all


def test_layer_wise_inference_as_pygs_examples_have_it_equals_the_whole_graph(
    small_graph: Graph, tmp_path: Path
) -> None:
    loader = opened(small_graph, tmp_path)
    everything = loader.over(None, num_neighbors=[-1], batch_size=300)
    model = TwoLayers(small_graph.feature_dim)
    x = torch.from_numpy(np.array(small_graph.x, np.float32))
    found = model.inference(x, everything)
    degree = np.diff(small_graph.indptr)
    edge_index = torch.from_numpy(
        np.stack([np.asarray(small_graph.indices), np.repeat(np.arange(len(degree)), degree)])
    ).long()
    first, second = model.convs
    expected = second(first(x, edge_index).relu(), edge_index)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_plan_of_shared_batches_still_evaluates_rank_by_rank(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_cooperative_plan(small_graph, tmp_path, ranks=1, batch_size=64)
    loader = PlannedLoader(tmp_path, small_graph)
    for blocks in (True, False):
        held = loader.over("val", blocks=blocks)
        seeds = sum(b.num_seeds if blocks else b.batch_size for b in held)
        assert seeds == len(small_graph.val_idx)


def test_transform_and_further_columns_are_in_every_batch(
    small_graph: Graph, tmp_path: Path
) -> None:
    nodes, edges = small_graph.num_nodes, small_graph.num_edges
    place = np.random.default_rng(0).standard_normal((nodes, 3))
    attr = torch.arange(edges * 2).reshape(edges, 2)

    def marked(batch: Data) -> Data:
        batch.mark = batch.batch_size
        return batch

    given = {
        "node_data": {"pos": place, "train_mask": torch.arange(nodes) % 2 == 0},
        "edge_data": {"edge_attr": attr},
        "transform": marked,
    }
    loader = opened(small_graph, tmp_path, given)
    for batch in [*loader, *loader.over("val", transform=marked)]:
        assert batch.mark == batch.batch_size
        np.testing.assert_array_equal(batch.pos, place[batch.n_id])
        assert torch.equal(batch.train_mask, batch.n_id % 2 == 0)
        assert torch.equal(batch.edge_attr, attr[batch.e_id])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"node_data": {"pos": np.zeros((5, 2))}}, "pos with one row for each of"),
        ({"node_data": {"pos": 1.0}}, "pos with one row for each of"),
    ],
)
def test_columns_of_another_length_are_refused_at_once(
    given: dict[str, Any], words: str, small_graph: Graph, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        opened(small_graph, tmp_path, given)


def test_too_few_rows_of_edges_are_refused_in_one_line(small_graph: Graph, tmp_path: Path) -> None:
    loader = opened(small_graph, tmp_path, {"edge_data": {"edge_attr": np.zeros((3, 1))}})
    with pytest.raises(InputError, match=r"edge_attr with a row per edge of the source, found 3"):
        next(iter(loader))


def test_nodes_of_a_type_are_chosen_by_their_number_within_it(tmp_path: Path) -> None:
    graph = generate_typed(tmp_path / "g", num_papers=300, num_authors=100, num_classes=4)
    assert graph.node_type is not None
    names = list(graph.meta.node_types)
    column = {"author": {"born": np.arange(100)}}
    plan: dict[str, Any] = {"model": "rgcn", "fanouts": [3, 2]}
    loader = opened(graph, tmp_path / "plan", {"node_data": column}, **plan)
    authors = np.flatnonzero(graph.node_type == names.index("author"))
    within = rows_within_types(graph.node_type, len(names))
    mask = np.zeros(100, np.bool_)
    mask[[5, 60]] = True
    for asked in (("author", [5, 60]), ("author", torch.from_numpy(mask))):
        (batch,) = loader.over(asked)
        assert batch["author"].batch_size == 2
        assert batch["author"].n_id[:2].tolist() == [5, 60]
        assert torch.equal(batch["author"].born, batch["author"].n_id)
    whole = loader.over("author", batch_size=1000)
    assert [len(v) for v in [whole.dataset]] == [100]
    assert within[authors].tolist() == list(range(100))
    fanouts = {tuple(name.split("__")): [1, 1] for name in graph.meta.edge_types}
    (batch,) = loader.over(("author", None), batch_size=1000, num_neighbors=fanouts)
    assert (
        max(
            int(np.bincount(s.edge_index[1]).max())
            for s in batch.edge_stores
            if s.edge_index.numel()
        )
        == 1
    )
    with pytest.raises(InputError, match="expected a node type among"):
        loader.over(("venue", None))


def test_links_are_handed_out_in_either_form_of_pyg(tmp_path: Path) -> None:
    graph = generate_links(tmp_path / "g", num_nodes=400, seed=0)
    form = {"neg_sampling": NegativeSampling("binary", 1)}
    binary = opened(graph, tmp_path / "p", form)
    triplet = PlannedLoader(tmp_path / "p", graph, blocks=False)
    for two, three in zip(binary, triplet, strict=True):
        half = len(three.src_index)
        assert two.edge_label.tolist() == [1] * half + [0] * half
        positive = torch.stack([three.src_index, three.dst_pos_index])
        negative = torch.stack([three.src_index, three.dst_neg_index])
        assert torch.equal(two.edge_label_index, torch.cat([positive, negative], dim=1))
        assert "src_index" not in two
    for held in (binary.over("val"), binary.over(edge_label_index=graph.val_idx.T)):
        seen = [batch.n_id[batch.edge_label_index[:, batch.edge_label == 1]].t() for batch in held]
        np.testing.assert_array_equal(torch.cat(seen), graph.val_idx)
    with pytest.raises(InputError, match="val, test or edge_label_index"):
        binary.over([1, 2])
    with pytest.raises(TypeError, match=r"binary with 1 negatives per link.*found binary with 3"):
        PlannedLoader(tmp_path / "p", graph, neg_sampling_ratio=3)
    weighted = NegativeSampling("binary", 1, dst_weight=torch.ones(graph.num_nodes))
    with pytest.raises(TypeError, match="expected no weights of nodes"):
        PlannedLoader(tmp_path / "p", graph, neg_sampling=weighted)
    train: dict[str, Any] = {"edge_label_index": graph.train_idx.T, "shuffle": True}
    named = PlannedLoader(tmp_path / "p", graph, epoch=1, **train)
    np.testing.assert_array_equal(next(iter(named)).n_id, next(iter(binary)).n_id)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_nodes": [0, 10**6]}, "expected nodes from 0 to .* found 1000000"),
    ({"input_nodes": [-1]}, "found -1"),
    ({"input_nodes": torch.zeros(3, dtype=torch.bool)}, "expected a mask of"),
    ({"input_nodes": [0.5]}, "a list of node ids, found float64"),
    ({"input_nodes": "valid"}, "train, val, test, a mask, ids or None, found 'valid'"),
    ({"input_nodes": []}, "found"),
    ({"input_nodes": [1], "num_neighbors": [-2]}, "at least -1"),
    ({"input_nodes": [1], "num_neighbors": {("a", "b", "c"): [1]}}, "found a mapping"),
    ({"input_nodes": [1], "batch_size": 0}, "expected at least 1, found 0"),
    ({"edge_label_index": [[0], [1]]}, "expected a dataset of task link"),
]


@pytest.mark.parametrize(("asked", "words"), WRONG)
def test_seeds_that_do_not_exist_are_one_line(
    asked: dict[str, Any], words: str, small_graph: Graph, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        opened(small_graph, tmp_path).over(**asked)
    assert "\n" not in str(caught.value)


ALIKE: dict[str, Any] = {
    "num_neighbors": [4, 3],
    "batch_size": 64,
    "shuffle": True,
    "drop_last": False,
    "replace": False,
    "subgraph_type": "directional",
    "num_workers": 4,
    "persistent_workers": True,
    "pin_memory": True,
    "prefetch_factor": 2,
    "input_nodes": "train",
}


def test_pygs_keywords_are_taken_where_they_say_what_the_plan_says(
    small_graph: Graph, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plain = [batch.n_id for batch in opened(small_graph, tmp_path)]
    asked = [batch.n_id for batch in opened(small_graph, tmp_path, ALIKE)]
    assert all(torch.equal(a, b) for a, b in zip(plain, asked, strict=True))
    assert [r.message for r in caplog.records if "left out" in r.message] == [
        "PlannedLoader: num_workers, persistent_workers, pin_memory, prefetch_factor left out: the "
        "plan's threads make batches"
    ]


@pytest.mark.parametrize("own", [{}, {"author__writes__paper": [1, -1]}], ids=["alike", "by type"])
def test_fan_outs_by_edge_type_are_taken_where_they_are_the_plans(
    own: dict[str, list[int]], tmp_path: Path
) -> None:
    graph = generate_typed(tmp_path / "g", num_papers=300, num_authors=100, num_classes=4)
    keys = [tuple(name.split("__")) for name in graph.meta.edge_types]
    same: dict[Any, list[int]] = {key: own.get("__".join(key), [3, 2]) for key in keys}
    plan: dict[str, Any] = {"model": "rgcn", "fanouts": [3, 2], "type_fanouts": own}
    plain = [batch["paper"].n_id for batch in opened(graph, tmp_path / "plan", **plan)]
    writes = {("author", "writes", "paper"): same["author", "writes", "paper"]}
    taken: list[Any] = [
        same,
        {"__".join(key): tuple(fanouts) for key, fanouts in same.items()},
        NumNeighbors(same),
        NumNeighbors(writes, default=[3, 2]),
    ]
    refused: list[Any] = [same | {keys[0]: [2, 2]}, NumNeighbors([3, 1])]
    (refused if own else taken).append([3, 2])
    for asked in taken:
        loader = PlannedLoader(tmp_path / "plan", graph, blocks=False, num_neighbors=asked)
        assert all(map(torch.equal, plain, [batch["paper"].n_id for batch in loader]))
    for asked in refused:
        with pytest.raises(TypeError, match=r"num_neighbors: expected .* as planned, found"):
            PlannedLoader(tmp_path / "plan", graph, blocks=False, num_neighbors=asked)
    with pytest.raises(InputError, match="found none of"):
        PlannedLoader(tmp_path / "plan", graph, blocks=False, num_neighbors=writes)


def test_the_plans_training_nodes_given_by_a_script_are_trained_on_as_planned(
    small_graph: Graph, tmp_path: Path
) -> None:
    train = torch.from_numpy(small_graph.train_idx)
    plain = [batch.n_id for batch in opened(small_graph, tmp_path, sampler=Sampler(name="labor"))]
    asked: dict[str, Any] = {"num_neighbors": [4, 3], "batch_size": 64, "shuffle": True}
    loader = PlannedLoader(tmp_path, small_graph, blocks=False, input_nodes=train, **asked)
    assert all(map(torch.equal, plain, [batch.n_id for batch in loader]))
    for changed, other in (("batch_size", 8), ("drop_last", True)):
        changes: dict[str, Any] = asked | {changed: other}
        with pytest.raises(TypeError, match=changed):
            PlannedLoader(tmp_path, small_graph, input_nodes=train, **changes)
    in_order = PlannedLoader(tmp_path, small_graph, blocks=False, input_nodes=train)
    assert seeds_in(in_order) == train.tolist()


def test_training_nodes_that_a_script_split_over_its_ranks_are_said(
    small_graph: Graph, tmp_path: Path
) -> None:
    make_plan(small_graph, tmp_path, ranks=2, batch_size=48)
    train = small_graph.train_idx
    asked: dict[str, Any] = {"rank": 1, "size": 2, "shuffle": True, "batch_size": 20}
    forget_warnings()
    with pytest.warns(UserWarning, match=f"of {len(train)} training nodes, as if split over 2"):
        PlannedLoader(tmp_path, small_graph, input_nodes=train[len(train) // 2 :], **asked)


OTHERS: dict[str, tuple[Any, str]] = {
    "num_neighbors": ([5, 5], r"expected \[4, 3\] as planned, found \[5, 5\].*--fanouts"),
    "batch_size": (8, r"expected 64 on each of 1 ranks.*found 8.*--batch-size"),
    "shuffle": (False, "name other input_nodes"),
    "drop_last": (True, "name other input_nodes"),
    "replace": (True, r"replace=True: the plan decides that.*--sampler"),
    "subgraph_type": ("induced", "the plan decides that"),
    "disjoint": (True, "the plan decides that"),
    "time_attr": ("time", "the plan decides that"),
    "weight_attr": ("w", "the plan decides that"),
    "subgraph_type of PyG": (SubgraphType.induced, "the plan decides that"),
    "data": (Data(), "gnnplan graph import"),
    "devise": (1, "unexpected keyword argument 'devise'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_would_change_a_planned_batch_is_refused(
    name: str, small_graph: Graph, tmp_path: Path
) -> None:
    value, words = OTHERS[name]
    make_plan(small_graph, tmp_path, fanouts=[4, 3], batch_size=64)
    with pytest.raises(TypeError, match=words):
        PlannedLoader(tmp_path, blocks=False, **{name.split()[0]: value})


def test_every_keyword_of_pygs_loaders_is_known() -> None:
    """Each is a keyword of ours, or one that is looked at."""
    check_keywords({"subgraph_type": SubgraphType.directional})
    own = set(inspect.signature(PlannedLoader.__init__).parameters)
    for loader in (NeighborLoader, LinkNeighborLoader, DataLoader):
        for name in set(inspect.signature(loader).parameters) - {"kwargs"} - own:
            try:
                check_keywords({name: object()})
            except TypeError as error:
                assert "unexpected" not in str(error)  # noqa: PT017
    with pytest.raises(TypeError, match=r"expected a plan folder, found Data; import the graph"):
        plan_folder(Data())
    with pytest.raises(TypeError, match=r"expected the plan's dataset .*, found list"):
        check_graph([15, 10])


def test_a_script_that_names_another_plan_than_it_was_launched_under_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GNNPLAN_PLAN", str(tmp_path / "a"))
    assert plan_folder(None) == plan_folder(tmp_path / "b" / ".." / "a").resolve()
    assert not caplog.records
    assert plan_folder(tmp_path / "b") == tmp_path / "b"
    assert "was launched under" in caplog.text
