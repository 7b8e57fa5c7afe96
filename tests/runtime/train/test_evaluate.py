import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime import worker
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import DatasetError, GnnplanError
from gnnplan.runtime.features.cache import CachedFeatureStore
from gnnplan.runtime.features.store import open_store
from gnnplan.runtime.graph.dataset import Graph, SparseFeatures, open_graph, write_graph
from gnnplan.runtime.graph.findings import GraphWarning
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.metrics import metric_of
from gnnplan.runtime.plan.schema import DynamicCache, Workload
from gnnplan.runtime.train.evaluate import Evaluation, evaluate, split_by_edges
from gnnplan.runtime.train.minibatch import lend_buffers
from tests.support.fullgraph_plans import make_full_graph_plan
from tests.support.inprocess import run_in_process
from tests.support.plans import make_plan
from tests.support.ranks import free_port, run_on_ranks, train_on_ranks


def workload(model: str, layers: int = 2) -> Workload:
    return Workload(model=model, num_layers=layers, hidden=16, fanouts=[3] * layers, seed=4)


def full_graph_logits(model: torch.nn.Module, graph: Graph) -> torch.Tensor:
    """The model's own PyG layers on the whole graph's edge_index."""
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edge_index = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    convs: Any = model.get_submodule("convs")
    x = torch.from_numpy(np.array(graph.x))
    with torch.no_grad():
        for layer, conv in enumerate(convs):
            x = conv(x, edge_index)
            x = x if layer == len(convs) - 1 else x.relu()
    return x


def spy(model: torch.nn.Module, logits: dict[int, torch.Tensor]) -> Any:
    """Record the last layer's output by the order in which it is computed."""
    inner: Callable[..., torch.Tensor] = model.forward_layer  # pyright: ignore[reportAssignmentType]

    last = len(list(model.get_submodule("convs").children())) - 1

    def forward_layer(layer: int, x: torch.Tensor, block: Any) -> torch.Tensor:
        out = inner(layer, x, block)
        if layer == last and out.shape[0] > 0:  # its width is asked for without vertices
            logits[len(logits)] = out
        return out

    model.forward_layer = forward_layer  # pyright: ignore
    return model


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("chunk_bytes", [1 << 16, 1 << 28])
def test_layer_wise_logits_equal_the_full_graph_forward(name, chunk_bytes, small_graph):
    model = build_model(workload(name), 16, 5, "multiclass")
    expected = full_graph_logits(model, small_graph)
    found: dict[int, torch.Tensor] = {}
    ids = small_graph.val_idx
    score = evaluate(
        spy(model, found), small_graph, None, ids, workload=workload(name), chunk_bytes=chunk_bytes
    )
    rows = torch.from_numpy(np.unique(ids))
    logits = torch.cat(list(found.values()))
    assert len(found) > 1 or chunk_bytes > 1 << 20
    torch.testing.assert_close(logits, expected[rows], rtol=1e-5, atol=1e-5)
    metric = metric_of("multiclass")
    assert small_graph.y is not None
    metric.update(expected[rows], torch.from_numpy(np.array(small_graph.y[np.unique(ids)])))
    assert (score.value, score.count) == metric.compute()
    assert score.metric == "accuracy"


@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_sampling_with_every_neighbour_equals_exact_inference(name, small_graph):
    model = build_model(workload(name, 3), 16, 5, "multiclass")
    ids = small_graph.test_idx[:200]
    settings = workload(name, 3)
    exact = evaluate(model, small_graph, None, ids, workload=settings)
    sampled = evaluate(model, small_graph, None, ids, workload=settings, fanouts=[-1, -1, -1])
    assert (exact.value, exact.count) == (sampled.value, sampled.count)


def test_a_model_without_layers_is_evaluated_on_whole_neighbourhoods(small_graph):
    inner = build_model(workload("sage"), 16, 5, "multiclass")

    class Opaque(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x, blocks):
            return self.inner(x, blocks)

    expected = evaluate(inner, small_graph, None, small_graph.val_idx, workload=workload("sage"))
    found = evaluate(Opaque(), small_graph, None, small_graph.val_idx, workload=workload("sage"))
    assert found == expected


def test_pieces_keep_their_bound_and_are_halved_where_there_is_no_room(small_graph):
    settings = workload("sage")
    run = Evaluation(
        model=build_model(settings, 16, 5, "multiclass"), graph=small_graph, workload=settings,
        comm=None, metric=metric_of("multiclass"),
    )  # fmt: skip
    ids, work = np.arange(40), np.cumsum([3] * 20 + [50] + [3] * 19)
    for room, note in ((40, ""), (1, "rank 0 found no room on cpu for 2 vertices at once")):
        done: list[list[int]] = []

        def one(piece: np.ndarray, room: int = room, done: list[list[int]] = done) -> bool:
            if len(piece) > room:
                raise torch.OutOfMemoryError
            done.append(piece.tolist())
            return True

        run.run_in_pieces(ids, work, 12, one)
        assert [each for piece in done for each in piece] == ids.tolist()
        assert max(len(piece) for piece in done) == min(4, room)
        assert [20] in done
        assert run.note.endswith(note)
        assert bool(run.note) == bool(note)
    with pytest.raises(torch.OutOfMemoryError):
        run.run_in_pieces(ids, work, 12, lambda piece: one(piece, room=0))
    sizes: list[int] = []

    def few(piece: np.ndarray) -> bool:
        sizes.append(len(piece))
        return len(piece) <= 5

    run.run_in_pieces(np.arange(20), np.arange(1, 21), 16, few, begin=1)
    assert sizes == [1, 2, 4, 8, 4, 4, 4, 1]


class Broken(torch.nn.Module):
    """A user's model whose outputs are NaN for some of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16, 5))

    def forward(self, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        out = x[: blocks[-1].num_dst] @ self.weight
        out[:3] = torch.nan
        return out


def test_a_users_model_that_gives_nan_ends_the_evaluation_with_a_count(small_graph):
    ids = small_graph.val_idx[:100]
    with pytest.raises(GnnplanError, match=r"^epoch 2, validation: .* found 15 of 500 that are"):
        evaluate(
            Broken(), small_graph, None, ids, workload=workload("sage"),
            where="epoch 2, validation",
        )  # fmt: skip


@pytest.mark.parametrize("fanouts", [None, [4, 4]])
def test_nan_in_a_layer_ends_the_evaluation_on_every_rank(small_graph, fanouts):
    ids = small_graph.val_idx[:60]

    def body(comm):
        model = build_model(workload("sage"), 16, 5, "multiclass")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(torch.nan if comm.rank == 0 else 1.0)
        with pytest.raises(GnnplanError) as error:
            evaluate(
                model, small_graph, None, ids, workload=workload("sage"), comm=comm,
                fanouts=fanouts,
            )  # fmt: skip
        return str(error.value)

    first, second = run_in_process(2, body)
    assert first == second
    assert "of 300 that are NaN" in first


@pytest.mark.parametrize(
    ("mode", "split"),
    [("minibatch", "val_idx"), ("minibatch", "test_idx"), ("full-graph", "val_idx")],
)
def test_a_run_names_epoch_and_split_of_scores_that_are_no_numbers(tmp_path, mode, split):
    """A cycle of 20 nodes to train on; of 5 nodes without an edge, 2 have features of NaN.

    In full-graph training these are in the products of the first step: every weight is NaN then.
    """
    x = np.random.default_rng(0).standard_normal((25, 3)).astype(np.float32)
    x[22:24] = np.nan
    good, bad = np.array([20, 21]), np.array([22, 23, 24])
    with pytest.warns(GraphWarning, match="NaN"):
        graph = write_graph(
            tmp_path / "graph",
            name="bad",
            indptr=np.minimum(np.arange(26), 20),
            indices=np.roll(np.arange(20, dtype=np.int32), 1),
            x=x,
            y=np.arange(25) % 5,
            train_idx=np.arange(20),
            val_idx=bad if split == "val_idx" else good,
            test_idx=bad if split == "test_idx" else good,
            task="multiclass",
            num_classes=5,
        )
    if mode == "minibatch":
        make_plan(graph, tmp_path / "plan", batch_size=16)
    else:
        make_full_graph_plan(graph, tmp_path / "plan", np.zeros(25, np.int32))
    (tmp_path / "run").mkdir()
    config = RunConfig(
        plan_folder=str(tmp_path / "plan"), run_folder=str(tmp_path / "run"), epochs=2, pin=False
    )
    where = "epoch 0, validation" if split == "val_idx" else "epoch 1, test"
    count = 10 if mode == "minibatch" else 15
    with pytest.raises(GnnplanError, match=rf"^{where}: .* found {count} of 15 that are NaN"):
        worker.run(config)


def test_ranks_share_the_vertices_of_a_sampled_evaluation(small_graph):
    """Each is scored by one rank, also where a rank has none."""
    ids = np.concatenate([small_graph.val_idx[:11], small_graph.val_idx[:3]])

    class Counting(Evaluation):
        def count(self, logits: torch.Tensor, ids: np.ndarray) -> None:
            assert len(logits) == len(ids)
            scored.extend(ids.tolist())

    for size in (1, 2, 3, 20):
        scored: list[int] = []
        for rank in range(size):
            comm = Communicator()
            comm.rank, comm.size = rank, size
            run = Counting(
                model=build_model(workload("sage"), 16, 5, "multiclass"), graph=small_graph,
                workload=workload("sage"), comm=comm, metric=metric_of("multiclass"),
            )  # fmt: skip
            run.run(ids, [4, 4])
        assert sorted(scored) == sorted(set(ids.tolist()))


def test_the_mode_of_the_model_is_left_as_it_was(small_graph):
    model = build_model(workload("sage"), 16, 5, "multiclass").train()
    evaluate(model, small_graph, None, small_graph.val_idx[:5], workload=workload("sage"))
    assert model.training


def test_sparse_features_give_the_same_score(small_graph, tmp_path):
    model = build_model(workload("sage"), 16, 5, "multiclass")
    x = np.array(small_graph.x)
    mask = np.abs(x) > 0
    sparse = SparseFeatures(
        indptr=np.r_[0, np.cumsum(mask.sum(1))].astype(np.int64),
        indices=np.nonzero(mask)[1].astype(np.int32),
        data=x[mask],
    )
    copy = write_graph(
        tmp_path / "sparse",
        name="sparse",
        indptr=np.array(small_graph.indptr),
        indices=np.array(small_graph.indices),
        x_csr=sparse,
        y=small_graph.y,
        train_idx=small_graph.train_idx,
        val_idx=small_graph.val_idx,
        test_idx=small_graph.test_idx,
        task="multiclass",
        num_classes=5,
        feature_dim=16,
    )
    settings = workload("sage")
    expected = evaluate(model, small_graph, None, small_graph.val_idx, workload=settings)
    assert evaluate(model, copy, None, copy.val_idx, workload=settings) == expected


def test_evaluation_leaves_a_cache_as_training_left_it(small_graph, tmp_path):
    model = build_model(workload("sage"), 16, 5, "multiclass")
    plan = make_plan(small_graph, tmp_path / "plan", cache=DynamicCache(policy="lru", rows=[40]))
    store = open_store(small_graph, plan, tmp_path / "plan", 0, threads=1)
    assert isinstance(store, CachedFeatureStore)
    rows = np.arange(30, dtype=np.int64)
    store.read(rows, np.empty((30, 16), np.float32))
    settings, ids = workload("sage"), small_graph.val_idx
    expected = evaluate(model, small_graph, None, ids, workload=settings)
    for fanouts in (None, [3, 3]):
        found = evaluate(model, small_graph, store, ids, workload=settings, fanouts=fanouts)
        assert fanouts or found == expected
    assert sorted(store.cached()[0]) == rows.tolist()
    assert store.num_touched == rows.size


def test_a_graph_without_labels_is_refused(small_graph, tmp_path):
    copy = write_graph(
        tmp_path / "bare",
        name="bare",
        indptr=np.array(small_graph.indptr),
        indices=np.array(small_graph.indices),
        x=np.array(small_graph.x),
        train_idx=small_graph.train_idx,
        val_idx=small_graph.val_idx,
        test_idx=small_graph.test_idx,
        task="multiclass",
        num_classes=5,
    )
    model = build_model(workload("sage"), 16, 5, "multiclass")
    with pytest.raises(DatasetError, match="expected labels"):
        evaluate(model, copy, None, copy.val_idx, workload=workload("sage"))


def test_parts_are_contiguous_and_hold_about_equal_work():
    indptr = np.array([0, 10, 10, 10, 20, 30])
    parts = split_by_edges(np.arange(5), indptr, 3)
    assert np.concatenate(parts).tolist() == [0, 1, 2, 3, 4]
    # By hand: work 11, 1, 1, 11, 11 of 35 in all; cuts at 11 and 23.
    assert [part.tolist() for part in parts] == [[0], [1, 2], [3, 4]]
    assert [p.tolist() for p in split_by_edges(np.arange(0), indptr, 2)] == [[], []]


def _score_on_rank(rank: int, port: int, folder: Path, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    graph, settings, comm = open_graph(folder), workload("sage", 3), Communicator()
    model = build_model(settings, 16, 5, "multiclass")
    ids = graph.test_idx
    one_host = evaluate(model, graph, None, ids, workload=settings, comm=comm)
    socket.gethostname = lambda: f"host{rank}"
    two_hosts = evaluate(model, graph, None, ids, workload=settings, comm=comm)
    sampled = evaluate(model, graph, None, ids, workload=settings, comm=comm, fanouts=[4, 4, 4])
    scores = (one_host, two_hosts, sampled)
    np.save(out / f"{rank}.npy", [[score.value, score.count] for score in scores])
    dist.destroy_process_group()


@pytest.mark.distributed
def test_two_ranks_score_what_one_does(small_graph, tmp_path):
    run_on_ranks(_score_on_rank, (free_port(), small_graph.path, tmp_path), 2)
    model = build_model(workload("sage", 3), 16, 5, "multiclass")
    ids, settings = small_graph.test_idx, workload("sage", 3)
    exact = evaluate(model, small_graph, None, ids, workload=settings)
    sampled = evaluate(model, small_graph, None, ids, workload=settings, fanouts=[4, 4, 4])
    expected = [[score.value, score.count] for score in (exact, exact, sampled)]
    for rank in range(2):
        assert np.load(tmp_path / f"{rank}.npy").tolist() == expected


@pytest.mark.distributed
def test_all_ranks_score_the_model_that_is_saved(small_graph: Graph, tmp_path: Path) -> None:
    """Buffers differ between ranks, as running statistics do; checkpoints hold rank 0's."""
    make_plan(small_graph, tmp_path / "plan", ranks=2, model="tests.support.models:noting")
    report = train_on_ranks(tmp_path / "plan", epochs=1)
    assert small_graph.y is not None
    answered = small_graph.y[small_graph.test_idx] == 0
    assert report.test_score == pytest.approx(answered.mean())


def test_ranks_get_their_own_buffers_back() -> None:
    def lend(comm: Communicator) -> tuple[list[float], list[float]]:
        norm = torch.nn.BatchNorm1d(2)
        before = norm.weight.clone()
        assert norm.running_mean is not None
        norm.running_mean.fill_(comm.rank)
        with lend_buffers(norm, comm):
            lent = norm.running_mean.tolist()
        assert norm.weight.equal(before)
        return lent, norm.running_mean.tolist()

    assert run_in_process(2, lend) == [([0, 0], [0, 0]), ([0, 0], [1, 1])]


@pytest.mark.distributed
def test_what_another_rank_lacks_in_an_evaluation_is_said_once(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_TEST_FAULT", "1:100:room")
    make_plan(small_graph, tmp_path / "plan", ranks=2, model="tests.support.models:faulty")
    report = train_on_ranks(tmp_path / "plan", epochs=2)
    (note,) = report.notes
    assert note.startswith("validation and test go on in smaller pieces: rank 1 found no room on")
    lines = (tmp_path / "plan" / "run" / "events.jsonl").read_text().splitlines()
    said = [event["line"] for line in lines if (event := json.loads(line))["event"] == "warning"]
    assert said == [note]
