"""Links and typed graphs drawn by a counter on the device, padded, equal the CPU's samplers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.planner.cost.backends.gpu_lanes import seed_bytes
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import GraphRef
from gnnplan.runtime.sampling.exclusion import (
    Candidates,
    Exclude,
    ExcludingSampler,
    NegativeSampler,
)
from gnnplan.runtime.sampling.memory import Envelope
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule, link_seeds
from gnnplan.runtime.sampling.typed import SortedByType, TypedSampler
from tests.runtime.sampling.gpu.test_padded import (
    _many_chunks,  # noqa: F401 - a fixture
    assert_padded,
    assert_untouched,
    count,  # noqa: F401 - a fixture
    guard,
    store_of,
    whole,
)
from tests.runtime.sampling.gpu.test_tasks_device import (
    Graph,
    load_topology,
    make_graph,
    some_pairs,
)

pytest.importorskip("triton")

SLOW = pytest.mark.slow
NODES = 40
REFERENCE = GraphRef(
    name="g", path="/data/g", fingerprint="f", num_nodes=NODES, num_edges=0, feature_dim=1,
    feature_dtype="float32", num_classes=3, task="multiclass", num_train=0,
)  # fmt: skip


def some_typed(
    graph: Graph, fanouts: list[list[int]], number: int, *, dialect: Dialect, device: torch.device
) -> tuple[TypedSampler, Any]:
    """The CPU's sampler of a graph with random types, and the device's."""
    from gnnplan.runtime.sampling.gpu.tasks import DeviceTypedSampler

    rng = np.random.default_rng([number, 9])
    edge_type = rng.integers(0, len(fanouts), len(graph[1])).astype(np.int32)
    alike: dict[str, Any] = {
        "dialect": dialect, "seed": number, "edge_ids": False,
        "node_type": rng.integers(0, 2, NODES).astype(np.int32),
    }  # fmt: skip
    rows = SortedByType.of(*graph, edge_type, len(fanouts))
    topology = load_topology((rows.ends, rows.indices), device, number % 2 == 0)
    return (
        TypedSampler(*graph, edge_type, fanouts, **alike),
        DeviceTypedSampler(topology, fanouts, device=device, **alike),
    )


@pytest.mark.parametrize(
    ("number", "dialect", "dense_bytes"),
    [
        (1, Dialect.FIRST_SEEN, 1 << 30),
        pytest.param(2, Dialect.EVERY_HOP, 0, marks=SLOW),
        pytest.param(3, Dialect.FIRST_SEEN, 0, marks=SLOW),
        pytest.param(4, Dialect.EVERY_HOP, 1 << 30, marks=SLOW),
    ],
)
@pytest.mark.usefixtures("_many_chunks", "shuffled")
def test_typed_batches_are_the_samplers(
    number: int, dialect: Dialect, dense_bytes: int, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    graph = make_graph(number, NODES, hub=True, dtype=np.int32 if number % 2 else np.int64)
    fanouts = [[3, 2], [1, 1], [2, 9]]
    oracle, sampler = some_typed(graph, fanouts, number, dialect=dialect, device=kernel_device)
    schedule = SeedSchedule(np.arange(3, 14), 6, seed=number)
    every_hop = dialect is Dialect.EVERY_HOP
    most = Envelope.largest(6, [6, 12], NODES, every_hop=every_hop)
    batches = [
        oracle.sample(
            schedule.share(2, step)[0], epoch=2, step=step, input_id=schedule.share(2, step)[1]
        )
        for step in range(schedule.num_steps)
    ]
    largest = max(len(batch.n_id) for batch in batches)
    for rows in (largest,) if number == 1 else (most.rows[-1], largest):
        room = Envelope((*most.rows[:-1], max(rows, most.rows[-2])), most.edges)
        draws = PaddedDraws(sampler, schedule, room, dense_bytes=dense_bytes)
        batch, rooms = guard(draws, draws.new_batch())
        draws.begin_epoch(2)
        for expected in batches:
            draws.fill(batch)
            fits = len(expected.n_id) < room.rows[-1]
            assert int(batch.overflow) == (not fits)
            assert_padded(batch, expected if fits else None)
            held = whole(batch.blocks[0].src_type)
            if fits:
                types = expected.blocks[0].src_type
                assert types is not None
                np.testing.assert_array_equal(held[: len(types)], types)
            assert_untouched(rooms)
    assert len(batches[0].n_id) > 12


LINKS = [
    (1, Exclude.BOTH, Candidates.IN_BATCH, Dialect.FIRST_SEEN, 1 << 30),
    pytest.param(2, Exclude.FORWARD, Candidates.UNIFORM, Dialect.EVERY_HOP, 0, marks=SLOW),
    pytest.param(3, Exclude.NONE, Candidates.IN_BATCH, Dialect.FIRST_SEEN, 0, marks=SLOW),
    pytest.param(4, Exclude.BOTH, Candidates.UNIFORM, Dialect.EVERY_HOP, 1 << 30, marks=SLOW),
]


def link_sampler(
    graph: Graph, number: int, exclude: Exclude, candidates: Candidates, each: int,
    device: torch.device, fanouts: list[int], **settings: Any,
) -> Any:  # fmt: skip
    from gnnplan.runtime.sampling.gpu.tasks import (
        DeviceExcludingSampler,
        DeviceLinkSampler,
        DeviceNegatives,
    )

    topology = load_topology(graph, device, number % 2 == 0)
    return DeviceLinkSampler(
        DeviceExcludingSampler(topology, fanouts, device=device, **settings),
        DeviceNegatives(topology, each, candidates=candidates, seed=number),
        exclude,
    )


@pytest.mark.parametrize(("number", "exclude", "candidates", "dialect", "dense_bytes"), LINKS)
@pytest.mark.usefixtures("_many_chunks", "shuffled")
def test_links_are_the_samplers(
    number: int, exclude: Exclude, candidates: Candidates, dialect: Dialect, dense_bytes: int,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    graph, fanouts, each = make_graph(number, NODES, hub=True, dtype=np.int32), [3, 2], 2
    pairs, alike = some_pairs(graph, number), {"dialect": dialect, "seed": number, "edge_ids": True}
    sampler = link_sampler(
        graph, number, exclude, candidates, each, kernel_device, fanouts, **alike
    )
    negatives = NegativeSampler(*graph, each, candidates=candidates, seed=number)
    oracle = ExcludingSampler(*graph, fanouts, **alike)
    for rank in range(2):
        schedule = LinkSchedule(pairs, 6, seed=number, num_ranks=2, rank=rank)
        every_hop = dialect is Dialect.EVERY_HOP
        room = Envelope.largest(3 * (2 + each), fanouts, NODES, every_hop=every_hop)
        draws = PaddedDraws(sampler, schedule, room, edge_ids=True, dense_bytes=dense_bytes)
        batch, rooms = guard(draws, draws.new_batch())
        draws.begin_epoch(1)
        for step in range(schedule.num_steps):
            own, ids, total = schedule.share(1, step)
            everyone = schedule.step_pairs(1, step)
            drawn = negatives.draw(own, ids, epoch=1, step=step, batch_destinations=everyone[:, 1])
            seeds, links = link_seeds(own, drawn)
            expected = oracle.sample_without(
                everyone, exclude, seeds, epoch=1, step=step, input_id=ids, global_num_seeds=total
            )
            draws.fill(batch)
            assert int(batch.overflow) == 0
            assert_padded(batch, expected)
            np.testing.assert_array_equal(whole(batch.y)[: len(links)], links)
            assert not whole(batch.y)[len(links) :].any()
            assert_untouched(rooms)
        draws.fill(batch)
        assert_padded(batch, None)
        assert int(batch.overflow) == 0


@pytest.mark.parametrize("tight", ["ends", "left out"])
def test_links_beyond_the_envelope_are_left_empty_and_told(
    tight: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.sampling.gpu import padded, segments

    # Node 1 has the edge from 0 nine times: more than is found room for.
    indptr = np.concatenate([[0, 0], np.full(NODES - 1, 9)]).astype(np.int64)
    graph = indptr, np.zeros(9, np.int32)
    pairs = np.array([[0, 1], [2, 3]])
    sampler = link_sampler(graph, 1, Exclude.FORWARD, Candidates.UNIFORM, 1, kernel_device, [2])
    rows = 2 if tight == "ends" else 20
    monkeypatch.setattr(segments, "COPIES", 2 if tight == "left out" else 9)
    draws = padded.PaddedDraws(sampler, LinkSchedule(pairs, 2, seed=0), Envelope((rows, 30), (30,)))
    batch, rooms = guard(draws, draws.new_batch())
    draws.begin_epoch(0)
    draws.fill(batch)
    assert int(batch.overflow) == 1
    assert_padded(batch, None)
    assert_untouched(rooms)


def test_links_and_types_launch_few_kernels_more(
    count: Callable[[Callable[[], object]], tuple[int, list[str]]],  # noqa: F811
    kernel_device: torch.device,
) -> None:
    """A batch of three hops takes 15 kernels of nodes; by the samplers several times as many."""
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    graph, room = (
        make_graph(1, NODES, hub=False, dtype=np.int32),
        Envelope((16, 41, 41, 41), (90, 150, 200)),
    )
    store = store_of(np.ones((NODES, 5), np.float32), kernel_device)
    _, typed = some_typed(
        graph, [[2, 2, 2], [1, 1, 1]], 1, dialect=Dialect.FIRST_SEEN, device=kernel_device
    )
    linked = link_sampler(graph, 1, Exclude.BOTH, Candidates.UNIFORM, 1, kernel_device, [2, 2, 2])
    nodes, links = (
        SeedSchedule(np.arange(9), 5, seed=0),
        LinkSchedule(some_pairs(graph, 1), 5, seed=0),
    )

    def typed_batch() -> None:
        typed.sample(nodes.share(0, 0)[0], epoch=0, step=0)

    def linked_batch() -> None:
        own, ids, total = links.share(0, 0)
        everyone = links.step_pairs(0, 0)
        linked.sample(own, everyone, epoch=0, step=0, input_id=ids, global_num_seeds=total)

    for sampler, schedule, kernels, others, alone in (
        (typed, nodes, 15, ["copy_", "index_select"], typed_batch),
        (linked, links, 19, ["sort", "ne", "cumsum", "sort", "cumsum", "copy_"], linked_batch),
    ):
        draws = PaddedDraws(sampler, schedule, room, store=store)
        batch = draws.new_batch()
        draws.begin_epoch(0)
        assert count(lambda d=draws, b=batch: d.fill(b)) == (kernels, others)
        assert draws.launches == kernels + len(others)
        before, beside = count(alone)
        assert before + len(beside) > 3 * draws.launches


def test_the_bytes_of_links_are_foreseen(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    graph, room = make_graph(1, NODES, hub=False, dtype=np.int32), Envelope((16, 41), (90,))
    linked = link_sampler(graph, 1, Exclude.NONE, Candidates.UNIFORM, 1, kernel_device, [2])
    pairs = some_pairs(graph, 1)
    draws = PaddedDraws(
        linked, LinkSchedule(pairs, 5, seed=0), room, labels=np.zeros((NODES, 3), np.int64)
    )
    assert draws._links is not None
    assert draws._labels is None
    held = [draws._order, draws._train, draws._links._pairs]
    none, all_of_them = (
        room.shared_bytes(NODES, links, seed_bytes=seed_bytes(replace(REFERENCE, task="link")))
        for links in (0, len(pairs))
    )
    assert sum(each.nbytes for each in held) == all_of_them - none


def test_what_of_links_and_types_has_no_padded_form_is_refused(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    graph, room = make_graph(1, NODES, hub=False, dtype=np.int32), Envelope((16, 41), (90,))
    _, typed = some_typed(graph, [[2], [-1]], 1, dialect=Dialect.FIRST_SEEN, device=kernel_device)
    linked = link_sampler(graph, 1, Exclude.BOTH, Candidates.UNIFORM, 1, kernel_device, [-1])
    nodes, links = (
        SeedSchedule(np.arange(9), 5, seed=0),
        LinkSchedule(some_pairs(graph, 1), 5, seed=0),
    )
    for sampler, schedule in ((typed, nodes), (linked, links)):
        with pytest.raises(SamplerError, match="bounded fan-outs"):
            PaddedDraws(sampler, schedule, room)
