"""Evaluation takes no more memory than the plan leaves: smaller pieces, outputs in files."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links, generate_sbm
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import Links, MemoryUse, Plan, Workload
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.train.evaluate import evaluate, evaluate_links
from gnnplan.runtime.train.evaluation_room import (
    COPIES,
    EXACT_EDGES,
    LEAST_CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    EvaluationRoom,
    choose_fanouts,
    evaluation_room,
    index_bytes,
    most_sampled_bytes,
    name_sampling,
    sampled_bytes,
)
from tests.support.plans import make_plan

MB = 10**6
SETTINGS = Workload(model="sage", num_layers=3, hidden=16, fanouts=[3] * 3, seed=4)


def memory(total: int, headroom: int, **parts: int) -> MemoryUse:
    return MemoryUse(parts=parts, total=total, capacity=total + headroom, headroom=headroom)


def with_memories(plan: Plan, kind: str = "cpu", **memories: MemoryUse) -> Plan:
    devices = [replace(device, kind=kind) for device in plan.strategy.devices]
    return replace(
        plan,
        strategy=replace(plan.strategy, devices=devices),
        prediction=replace(plan.prediction, memory_bytes=memories),
    )


def test_room_is_what_activations_give_back_and_half_of_what_is_free(small_graph, tmp_path):
    one = make_plan(small_graph, tmp_path / "one")
    ids = index_bytes(one, None)
    tight = with_memories(
        one, rank0=memory(900 * MB, 100 * MB, activations=30 * MB), host0=memory(MB, 200 * MB)
    )
    half = (100 * MB - ids) // 2
    assert evaluation_room(tight, 0) == EvaluationRoom(
        chunk_bytes=(half + 30 * MB) // 4, table_bytes=half // 2
    )
    full = with_memories(one, rank0=memory(MB, 0), host0=memory(MB, 200 * MB))
    assert evaluation_room(full, 0) == EvaluationRoom(
        chunk_bytes=LEAST_CHUNK_BYTES, table_bytes=0, missing_bytes=ids
    )
    large = with_memories(one, rank0=memory(MB, 10**11), host0=memory(MB, 10**11))
    assert evaluation_room(large, 0).chunk_bytes == MOST_CHUNK_BYTES
    assert evaluation_room(one, 0) == EvaluationRoom(chunk_bytes=MOST_CHUNK_BYTES, table_bytes=None)


def test_ids_beyond_what_is_free_are_taken_from_what_activations_give_back(small_graph, tmp_path):
    one = make_plan(small_graph, tmp_path / "one")
    large = replace(one, graph=replace(one.graph, num_nodes=5 * MB))
    assert index_bytes(large, None) == 180 * MB
    for given_back, chunk_bytes, missing in (
        (300 * MB, 120 * MB // COPIES, 0),
        (100 * MB, LEAST_CHUNK_BYTES, 80 * MB),
    ):
        use = memory(900 * MB, 0, activations=given_back)
        room = evaluation_room(with_memories(large, rank0=use, host0=memory(MB, 0)), 0)
        assert room == EvaluationRoom(chunk_bytes=chunk_bytes, table_bytes=0, missing_bytes=missing)
        on_gpu = with_memories(large, kind="cuda", rank0=use, host0=memory(MB, 150 * MB))
        assert evaluation_room(on_gpu, 0).missing_bytes == 30 * MB


def test_ranks_share_what_their_host_has_free(small_graph, tmp_path):
    two = make_plan(small_graph, tmp_path / "two", ranks=2)
    rank, ids = memory(MB, 500 * MB), index_bytes(two, [3, 3])
    shared = with_memories(two, rank0=rank, rank1=rank, host0=memory(MB, 200 * MB))
    assert evaluation_room(shared, 1, [3, 3]).table_bytes == (200 * MB // 2 - ids) // 2 // 2
    apart = with_memories(
        two, rank0=rank, rank1=rank, host0=memory(MB, 200 * MB), host1=memory(MB, 400 * MB)
    )
    assert evaluation_room(apart, 1, [3, 3]).table_bytes == (200 * MB - ids) // 2 // 2


def test_pieces_of_a_gpu_are_bounded_by_it_and_tables_by_its_host(small_graph, tmp_path):
    plan = make_plan(small_graph, tmp_path / "one")
    gpu = with_memories(
        plan,
        kind="cuda",
        rank0=memory(MB, 60 * MB, activations=20 * MB),
        host0=memory(MB, 1000 * MB),
    )
    assert evaluation_room(gpu, 0) == EvaluationRoom(
        chunk_bytes=80 * MB // 4, table_bytes=(1000 * MB - index_bytes(plan, None)) // 2 // 2
    )


def test_what_pieces_leave_of_a_gpu_holds_tables(small_graph, tmp_path):
    plan = make_plan(small_graph, tmp_path / "one")
    memories: dict[str, Any] = {
        "rank0": memory(MB, 4000 * MB, activations=30 * MB),
        "host0": memory(MB, 10**11),
    }
    room = evaluation_room(with_memories(plan, kind="cuda", **memories), 0)
    assert room.chunk_bytes == MOST_CHUNK_BYTES
    assert room.device_table_bytes == (4030 * MB - 4 * MOST_CHUNK_BYTES) // 2
    assert evaluation_room(with_memories(plan, **memories), 0).device_table_bytes == 0


@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_the_ids_of_an_evaluation_take_the_bytes_that_are_counted(name: str, tmp_path: Path):
    graph = generate_sbm(
        tmp_path / "graph", num_nodes=100_000, degree=3.0, feature_dim=4, num_classes=3, seed=5
    )
    work = replace(SETTINGS, model=name)
    plan = make_plan(graph, tmp_path / "plan", model=name, fanouts=[3] * 3)
    model = build_model(work, 4, 3, "multiclass")
    ids = np.arange(graph.num_nodes)
    room: dict[str, Any] = {"chunk_bytes": 1 << 16, "table_bytes": 0, "scratch": tmp_path}
    evaluate(model, graph, None, ids[:100], workload=work, **room)  # compiles
    tracemalloc.start()
    try:
        evaluate(model, graph, None, ids, workload=work, **room)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    counted = index_bytes(plan, None)
    assert 0.9 * counted <= peak <= counted + COPIES * room["chunk_bytes"]


def test_sampled_pieces_keep_to_the_room_and_score_the_same(small_graph: Graph):
    model = build_model(SETTINGS, 16, 5, "multiclass")
    ids, rows = small_graph.test_idx[:200], list[tuple[int, int]]()
    exact = evaluate(model, small_graph, None, ids, workload=SETTINGS)
    inner = model.forward

    def forward(x: torch.Tensor, blocks: Any) -> torch.Tensor:
        rows.append((x.shape[0], blocks[-1].num_dst))
        return inner(x, blocks)

    model.forward = forward
    room = 1 << 13
    found = evaluate(
        model, small_graph, None, ids, workload=SETTINGS, fanouts=[-1] * 3, chunk_bytes=room
    )
    assert (found, found.note) == (exact, "")
    assert all(n * 64 <= most_sampled_bytes(room) or seeds == 1 for n, seeds in rows)
    assert sum(seeds for _, seeds in rows) == 200
    assert any(seeds < 200 for _, seeds in rows)


@pytest.mark.parametrize("fanouts", [[-1, -1], [20, 20]])
def test_no_batch_is_drawn_far_beyond_the_room_and_edges_count(
    fanouts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of 2,000 nodes in few columns, each with 60 neighbours: nearly all bytes are edges'."""
    graph = generate_sbm(
        tmp_path / "dense",
        num_nodes=2000,
        degree=60.0,
        feature_dim=4,
        num_classes=3,
        seed=5,
        degree_exponent=50.0,
    )
    work = Workload(hidden=8, fanouts=[3, 3], seed=4)
    model, ids = build_model(work, 4, 3, "multiclass"), graph.test_idx[:200]
    expected = evaluate(model, graph, None, ids, workload=work, fanouts=fanouts)
    drawn, sample = list[tuple[int, float]](), NeighborSampler.sample

    def spy(sampler: NeighborSampler, seeds: Any, **step: Any) -> Any:
        batch = sample(sampler, seeds, **step)
        drawn.append((len(seeds), sampled_bytes(batch.n_id.shape[0], batch.num_edges, 4)))
        return batch

    monkeypatch.setattr(NeighborSampler, "sample", spy)
    found = evaluate(model, graph, None, ids, workload=work, fanouts=fanouts, chunk_bytes=1 << 17)
    room = most_sampled_bytes(1 << 17)
    assert max(size for _, size in drawn) <= 2 * room
    assert sum(seeds for seeds, size in drawn if size <= room) == found.count == 200
    assert max(seeds for seeds, _ in drawn) > drawn[0][0]
    # Which hop expands a vertex depends on the other seeds of its batch.
    assert abs(found.value - expected.value) <= (0.1 if fanouts[0] > 0 else 0.0)


def test_large_graphs_are_sampled_unless_asked_otherwise_and_it_is_said(small_graph, tmp_path):
    plan = make_plan(small_graph, tmp_path / "one", fanouts=[4, 3])
    large = replace(plan, graph=replace(plan.graph, num_edges=EXACT_EDGES + 1))
    assert choose_fanouts(plan, None) is None
    assert name_sampling(plan, None) == ""
    assert choose_fanouts(large, None) == [4, 3]
    assert name_sampling(large, None) == (
        "validation and test are sampled with fan-outs 4,3: the graph has more than 500,000,000 "
        "edges; --eval-fanouts -1,-1 takes all neighbours"
    )
    assert choose_fanouts(large, [-1, -1]) is None
    assert choose_fanouts(large, [9, 9]) == [9, 9]
    assert name_sampling(large, [9, 9]) == name_sampling(large, [-1, -1]) == ""


def test_scores_are_the_same_in_little_room(small_graph: Graph, tmp_path: Path):
    model = build_model(SETTINGS, 16, 5, "multiclass")
    ids = small_graph.test_idx
    roomy = evaluate(model, small_graph, None, ids, workload=SETTINGS)
    tight = evaluate(
        model, small_graph, None, ids, workload=SETTINGS, chunk_bytes=1 << 14, table_bytes=0,
        scratch=tmp_path,
    )  # fmt: skip
    assert tight == roomy
    assert list(tmp_path.iterdir()) == []


def test_links_are_scored_the_same_in_little_room(tmp_path: Path):
    graph = generate_links(
        tmp_path / "g",
        num_nodes=600,
        degree=12.0,
        feature_dim=16,
        num_communities=5,
        train_fraction=0.25,
        homophily=0.9,
        seed=3,
    )
    workload = Workload(hidden=8, fanouts=[3, 3], links=Links(eval_negatives=20), seed=5)
    model = build_model(workload, graph.feature_dim, 0, "link")
    roomy = evaluate_links(model, graph, None, graph.test_idx, workload=workload)
    tight = evaluate_links(
        model, graph, None, graph.test_idx, workload=workload, chunk_bytes=1 << 14, table_bytes=0
    )
    assert tight.count == roomy.count
    assert tight.value == pytest.approx(roomy.value, rel=1e-6)
