"""Batches drawn by a counter on the device, padded, equal the sampler's; nothing waits for them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.memory import Envelope
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.seeds import SeedSchedule, ShardSchedule
from tests.runtime.sampling.device_cases import random_graph, topology_of

pytest.importorskip("triton")

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]
SMALL = 16
"""Positions of a chunk and entries of a tile, so that small batches have many."""


@pytest.fixture
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from gnnplan.runtime.sampling.gpu import choose, neighbor, relabel

    for module, name in ((choose, "_TILE"), (neighbor, "CHUNK"), (relabel, "CHUNK")):
        monkeypatch.setattr(module, name, SMALL)


def expected_batches(
    graph: Graph, schedule: SeedSchedule, fanouts: list[int], epoch: int, **settings: Any
) -> Iterator[MiniBatch]:
    oracle = NeighborSampler(*graph, fanouts, **settings)
    for step in range(schedule.num_steps):
        seeds, input_id, total = schedule.share(epoch, step)
        yield oracle.sample(
            seeds, epoch=epoch, step=step, input_id=input_id, global_num_seeds=total
        )


def sizes_of(batch: MiniBatch) -> tuple[list[int], list[int]]:
    """Nodes after 0 .. L hops, and edges of the blocks, seeds' hop first."""
    blocks = batch.blocks[::-1]
    return [batch.num_seeds, *(b.num_src for b in blocks)], [b.num_edges for b in blocks]


def draws_bounds(dialect: Dialect) -> Envelope:
    return Envelope.largest(6, [4, 3], 60, every_hop=dialect is Dialect.EVERY_HOP)


def whole(tensor: Any) -> NDArray[Any]:
    return tensor.cpu().numpy()


def assert_padded(found: Any, expected: MiniBatch | None) -> None:
    """The batch, and padding behind it; None: an empty one."""
    hops = len(found.blocks)
    nodes, edges = ([0] * (hops + 1), [0] * hops) if expected is None else sizes_of(expected)
    np.testing.assert_array_equal(whole(found.counts), [*nodes, *edges])
    n_id, input_id = (np.zeros(0),) * 2 if expected is None else (expected.n_id, expected.input_id)
    for tensor, values in ((found.n_id, n_id), (found.input_id, input_id)):
        held = whole(tensor)
        np.testing.assert_array_equal(held[: len(values)], values)
        assert not held[len(values) :].any()
    weight = np.zeros(found.seed_weight.numel(), np.float32)
    assert int(found.labels_now) == len(input_id)
    if expected is not None:
        weight[: len(input_id)] = np.float32(1) / np.float32(expected.global_num_seeds)
        assert whole(found.now).tolist() == [
            expected.epoch, expected.step, len(input_id), expected.global_num_seeds
        ]  # fmt: skip
    np.testing.assert_array_equal(whole(found.seed_weight), weight)
    for place, block in enumerate(found.blocks):
        hop = hops - 1 - place
        assert hop == 0 or block.num_dst == found.blocks[place + 1].num_src
        assert int(block.live) == nodes[hop]
        drawn = None if expected is None else expected.blocks[place]
        assert_padded_block(block, drawn)


def assert_padded_block(block: Any, drawn: Any) -> None:
    edges = 0 if drawn is None else drawn.num_edges
    each = 1 if block.relation_ptr is None else (block.relation_ptr.numel() - 1) // block.num_dst
    ends = np.full(each * block.num_dst + 1, edges)
    indices = np.full(block.indices.numel(), block.num_src - 1)
    dst = np.full(block.dst.numel(), block.num_dst - 1)
    e_id = np.zeros(block.dst.numel(), np.int64)
    if drawn is not None:
        of_types = drawn.indptr if drawn.relation_ptr is None else drawn.relation_ptr
        ends[: each * drawn.num_dst] = of_types[:-1]
        indices[:edges] = drawn.indices
        dst[:edges] = np.repeat(np.arange(drawn.num_dst), np.diff(drawn.indptr))
        e_id[:edges] = 0 if drawn.e_id is None else drawn.e_id
    assert (block.indptr.dtype, block.indices.dtype) == (torch.int64, torch.int32)
    np.testing.assert_array_equal(whole(block.indptr), ends[::each])
    np.testing.assert_array_equal(whole(block.indices), indices)
    np.testing.assert_array_equal(whole(block.dst), dst)
    if each > 1:
        np.testing.assert_array_equal(whole(block.relation_ptr), ends)
    if block.e_id is not None:
        np.testing.assert_array_equal(whole(block.e_id), e_id)


def draws_of(
    graph: Graph, schedule: SeedSchedule, fanouts: list[int], device: torch.device,
    envelope: Envelope | None = None, *, tier: int = 0, dialect: Dialect = Dialect.FIRST_SEEN,
    seed: int = 0, method: str = "neighbor", **settings: Any,
) -> Any:  # fmt: skip
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    topology = topology_of(graph, device, tier)
    sampler = DeviceNeighborSampler(
        topology, fanouts, device=device, dialect=dialect, seed=seed, method=method, edge_ids=True
    )
    if envelope is None:
        every_hop = dialect is Dialect.EVERY_HOP
        most = Envelope.largest(
            schedule.largest_share(), fanouts, sampler.num_nodes, every_hop=every_hop
        )
        envelope = Envelope.around(most.rows, most.edges, most, multiple=8)
    return PaddedDraws(sampler, schedule, envelope, edge_ids=True, **settings)


SLOW = pytest.mark.slow
CASES = [
    (2, Dialect.FIRST_SEEN, [2, 1, 3], 0),
    pytest.param(0, Dialect.FIRST_SEEN, [3, 2], 1 << 30, marks=SLOW),
    pytest.param(1, Dialect.EVERY_HOP, [3, 2], 0, marks=SLOW),
    pytest.param(2, Dialect.EVERY_HOP, [9], 1 << 30, marks=SLOW),
]


@pytest.mark.parametrize(("number", "dialect", "fanouts", "dense_bytes"), CASES)
@pytest.mark.usefixtures("_many_chunks", "shuffled")
def test_padded_batches_are_the_samplers_over_epochs(
    number: int, dialect: Dialect, fanouts: list[int], dense_bytes: int, kernel_device: torch.device
) -> None:
    graph = random_graph(number)
    train = np.random.default_rng(number).permutation(60)[:19].astype(np.int64)
    schedule = SeedSchedule(train, 8, seed=number)
    draws = draws_of(
        graph, schedule, fanouts, kernel_device, tier=number, dialect=dialect, seed=number,
        dense_bytes=dense_bytes,
    )  # fmt: skip
    # Two batches' buffers in turn, as where one is drawn while the other is trained on.
    buffers = [draws.new_batch(), draws.new_batch()]
    fills = itertools.cycle(buffers)
    for epoch in (0, 5):
        draws.begin_epoch(epoch)
        drawn = expected_batches(
            graph, schedule, fanouts, epoch, dialect=dialect, seed=number, edge_ids=True
        )
        for expected, found in zip(drawn, fills, strict=False):
            draws.fill(found)
            assert_padded(found, expected)
    # Behind the end batches are empty, and the counter stays.
    found = next(fills)
    draws.fill(found)
    assert_padded(found, None)
    assert whole(found.now).tolist() == [5, schedule.num_steps, 0, 0]
    assert int(found.overflow) == 0


CANARY = 77


def guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of a tensor's size and type, and the room on both sides of it."""
    around = torch.full((tensor.numel() + 64,), CANARY, dtype=tensor.dtype, device=tensor.device)
    return around[32:-32].view(tensor.shape), around


def guard(draws: Any, batch: Any) -> tuple[Any, list[torch.Tensor]]:
    """The batch and the draws' passing room with canaries around each buffer."""
    rooms: list[torch.Tensor] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        view, around = guarded(tensor)
        rooms.append(around)
        return view

    names = [
        n for n in ("row_ptr", "rows", "local", "positions") if getattr(batch.kept, n) is not None
    ]
    kept = replace(batch.kept, **{name: watch(getattr(batch.kept, name)) for name in names})
    alone = {name: watch(getattr(batch, name)) for name in ("n_id", "input_id", "seed_weight")}
    alone |= {} if batch.y is None else {"y": watch(batch.y)}
    hops, shared = draws._hops, draws._hops._slots is draws._hops._values
    hops._values, hops._turns = watch(hops._values), watch(hops._turns)
    hops._slots = hops._values if shared else watch(hops._slots)
    each = hops.each
    alone["row_ends"] = kept.row_ptr if each == 1 else watch(batch.row_ends)
    blocks, row, edge = [], 0, 0
    for block in batch.blocks[::-1]:
        rows, edges = slice(row, row + block.num_dst + 1), slice(edge, edge + block.dst.numel())
        types = slice(each * row, each * (row + block.num_dst) + 1)
        row, edge = rows.stop, edges.stop
        blocks.append(
            replace(
                block, indptr=alone["row_ends"][rows], indices=kept.local[edges],
                dst=kept.rows[edges],
                e_id=None if block.e_id is None else kept.positions[edges],
                relation_ptr=None if each == 1 else kept.row_ptr[types],
            )
        )  # fmt: skip
    return replace(batch, kept=kept, blocks=blocks[::-1], **alone), rooms


def assert_untouched(rooms: list[torch.Tensor]) -> None:
    for around in rooms:
        assert (around[:32] == CANARY).all()
        assert (around[-32:] == CANARY).all()


@pytest.mark.parametrize(
    ("dialect", "dense_bytes", "places"),
    [
        (Dialect.FIRST_SEEN, 1 << 30, [1]),
        pytest.param(Dialect.EVERY_HOP, 1 << 30, range(4), marks=SLOW),
        pytest.param(Dialect.FIRST_SEEN, 0, range(4), marks=SLOW),
        pytest.param(Dialect.FIRST_SEEN, 1 << 30, range(4), marks=SLOW),
    ],
)
@pytest.mark.usefixtures("_many_chunks", "shuffled")
def test_batches_beyond_the_envelope_are_left_empty_and_told(
    dialect: Dialect, dense_bytes: int, places: Sequence[int], kernel_device: torch.device
) -> None:
    graph, fanouts, seed = random_graph(1), [4, 3], 3
    schedule = SeedSchedule(np.arange(0, 60, 2), 6, seed=seed)
    drawn = [*expected_batches(graph, schedule, fanouts, 1, dialect=dialect, seed=seed,
                               edge_ids=True)]  # fmt: skip
    rows, edges = zip(*map(sizes_of, drawn), strict=True)
    for place in places:
        # One size after another is a little less than the batch that needs most of it.
        most = [np.max(sizes, 0).tolist() for sizes in (rows, edges)]
        room = Envelope.around(most[0], most[1], draws_bounds(dialect), margin=1, multiple=1)
        sizes = [*room.rows[1:], *room.edges]
        sizes[place] -= 1
        need = [[n + 1 for n in r[1:]] + e for r, e in zip(rows, edges, strict=True)]
        tight = Envelope((room.rows[0], *sizes[:2]), tuple(sizes[2:]))
        draws = draws_of(
            graph, schedule, fanouts, kernel_device, tight, dialect=dialect, seed=seed,
            dense_bytes=dense_bytes,
        )  # fmt: skip
        batch, rooms = guard(draws, draws.new_batch())
        draws.begin_epoch(1)
        missed = [step for step, n in enumerate(need) if any(np.array(n) > sizes)]
        assert 0 < len(missed) < len(drawn)
        for step, expected in enumerate(drawn):
            draws.fill(batch)
            assert int(batch.overflow) == (step in missed)
            assert_padded(batch, None if step in missed else expected)
            assert whole(batch.now)[:2].tolist() == [1, step]
            assert_untouched(rooms)


@pytest.mark.parametrize(
    ("method", "fanouts", "dialect", "dense_bytes"),
    [
        ("labor", [4], Dialect.EVERY_HOP, 0),
        pytest.param("labor", [3, 2], Dialect.FIRST_SEEN, 1 << 30, marks=SLOW),
        pytest.param("neighbor", [2, -1], Dialect.EVERY_HOP, 1 << 30, marks=SLOW),
    ],
)
@pytest.mark.usefixtures("_many_chunks", "shuffled")
def test_rows_that_are_scanned_are_drawn_alike(
    method: str, fanouts: list[int], dialect: Dialect, dense_bytes: int,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    graph = random_graph(0)  # with rows that take a tile of their own
    schedule = SeedSchedule(np.arange(12), 5, seed=1)
    room = Envelope((8, *[61] * len(fanouts)), (400, 900)[: len(fanouts)])
    draws = draws_of(graph, schedule, fanouts, kernel_device, room, tier=2, dialect=dialect,
                     method=method, dense_bytes=dense_bytes)  # fmt: skip
    sampler, found = draws.sampler, draws.new_batch()
    draws.begin_epoch(2)
    sampler.topology.reads()
    for step in range(schedule.num_steps):
        seeds, input_id, total = schedule.share(2, step)
        expected = sampler.sample(
            seeds, epoch=2, step=step, input_id=input_id, global_num_seeds=total
        ).to_host()
        read = sampler.topology.reads()
        draws.fill(found)
        assert int(found.overflow) == 0
        assert_padded(found, expected)
        assert sampler.topology.reads() == read


NAMES = """
empty empty_like view slice select narrow as_strided alias detach expand unsqueeze squeeze
_unsafe_view split_with_sizes lift_fresh _local_scalar_dense set_ is_pinned
"""
VIEWS = frozenset(NAMES.split())
"""Operations that start no kernel."""


class Operations(TorchDispatchMode):
    """What torch starts on a device beside our kernels, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = func._schema.name.split("::")[1]
        self.names += [] if name in VIEWS else [name]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def count(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> Callable[[Callable[[], object]], tuple[int, list[str]]]:
    """Kernels of ours that a call launches, and torch's operations."""
    if kernel_device.type == "cuda":
        pytest.skip("counted in Triton's interpreter, where every launch can be seen")
    from triton.runtime.interpreter import GridExecutor

    launches, seen, launch = [0], Operations(), GridExecutor.__call__

    def counted(self: Any, *args: Any, **named: Any) -> None:
        launches[0] += 1
        before = len(seen.names)
        launch(self, *args, **named)
        del seen.names[before:]  # what the interpreter does is the kernel's

    def measure(call: Callable[[], object]) -> tuple[int, list[str]]:
        launches[0] = 0
        seen.names.clear()
        with seen:
            call()
        return launches[0], list(seen.names)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return measure


def store_of(x: NDArray[np.float32], device: torch.device) -> Any:
    """Rows of every third node in one memory, of the others in another."""
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.device_store import DeviceFeatureStore
    from gnnplan.runtime.features.gather_triton import DeviceTable
    from gnnplan.runtime.features.location import encode

    numbers = (np.arange(len(x)) % 3 > 0).astype(np.uint8)
    slots = np.zeros(len(x), np.int64)
    tables = {}
    for number, kind in enumerate(("own", "host")):
        slots[numbers == number] = np.arange((numbers == number).sum())
        rows = torch.from_numpy(x[numbers == number])
        rows = rows.to(device) if kind == "own" or device.type == "cpu" else rows.pin_memory()
        tables[number] = DeviceRows(kind, rows)
    return DeviceFeatureStore(DeviceTable(encode(numbers, slots), tables, device))


def test_a_batch_launches_few_kernels_and_nothing_else(
    count: Callable[[Callable[[], object]], tuple[int, list[str]]], kernel_device: torch.device
) -> None:
    graph, fanouts = random_graph(1), [2, 2, 2]
    schedule = SeedSchedule(np.arange(20), 7, seed=1)
    x = np.random.default_rng(1).normal(size=(60, 5)).astype(np.float32)
    store, labels = store_of(x, kernel_device), np.arange(60)
    for dense_bytes, launches, fills in ((1 << 30, 15, []), (0, 19, ["fill_"])):
        draws = draws_of(
            graph, schedule, fanouts, kernel_device, store=store, labels=labels,
            dense_bytes=dense_bytes,
        )  # fmt: skip
        batch = draws.new_batch()
        draws.begin_epoch(0)
        assert count(lambda d=draws, b=batch: d.fill(b)) == (launches, fills)
        assert draws.launches == launches + len(fills)

    def by_the_sampler() -> None:
        seeds, input_id, _ = schedule.share(0, 0)
        drawn = draws.sampler.sample(seeds, epoch=0, step=0, input_id=input_id)
        store.gather(drawn.n_id, store.empty(drawn.n_id.numel()), store.new_counts())
        torch.from_numpy(labels[seeds]).to(kernel_device).clone()

    kernels, others = count(by_the_sampler)
    assert int(batch.counts[3]) > 10
    assert kernels + len(others) > 3.5 * 15


def test_rows_and_labels_come_with_the_batch(kernel_device: torch.device) -> None:
    graph, rng = random_graph(2), np.random.default_rng(2)
    schedule = SeedSchedule(np.arange(5, 40), 10, seed=2, num_ranks=3, rank=1)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    for labels in (rng.integers(0, 9, 60), rng.normal(size=(60, 3)).astype(np.float32)):
        draws = draws_of(
            graph, schedule, [3, 2], kernel_device, seed=2, labels=labels,
            store=store_of(x, kernel_device),
        )  # fmt: skip
        batch = draws.new_batch()
        draws.begin_epoch(4, step=2)
        drawn = [*expected_batches(graph, schedule, [3, 2], 4, seed=2, edge_ids=True)][2:]
        for expected in drawn:
            batch.x.fill_(9)
            draws.fill(batch)
            assert_padded(batch, expected)
            rows, y, seeds = whole(batch.x), whole(batch.y), expected.seeds
            np.testing.assert_array_equal(rows[: len(expected.n_id)], x[expected.n_id])
            assert not rows[len(expected.n_id) :].any()
            np.testing.assert_array_equal(y[: len(seeds)], labels[seeds])
            assert (y[len(seeds) :] == -100).all()
            assert y.dtype == labels.dtype
        counted = draws._store.named(draws.row_counts.tolist()).rows
        asked = np.concatenate([each.n_id for each in drawn])
        assert counted == {"own": (asked % 3 == 0).sum(), "host": (asked % 3 > 0).sum()}


def test_lists_read_are_counted_as_the_samplers(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler

    graph, schedule = random_graph(1), SeedSchedule(np.arange(12), 6, seed=0)
    topology = topology_of(graph, kernel_device, 2)
    plain = DeviceNeighborSampler(topology, [3, 2], device=kernel_device)
    for step in range(2):
        plain.sample(schedule.share(0, step)[0], epoch=0, step=step)
    expected = topology.reads()
    draws = draws_of(graph, schedule, [3, 2], kernel_device, tier=2)
    draws.begin_epoch(0)
    batch = draws.new_batch()
    for _ in range(2):
        draws.fill(batch)
    assert draws._hops.topology.reads() == expected


def test_other_deals_and_streams_are_followed(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    graph, train = random_graph(1), np.arange(3, 17)
    parts = (np.arange(60) % 4 > 0).astype(np.int32)
    # The second rank of the last schedule gets no seed of the last step.
    for schedule in (
        ShardSchedule(train, 5, parts=parts, num_ranks=2, seed=1),
        SeedSchedule(train, 13, seed=1, num_ranks=3, rank=0, shuffle=False),
    ):
        sampler = DeviceNeighborSampler(
            topology_of(graph, kernel_device), [3], device=kernel_device, seed=-5,
            steps_per_epoch=schedule.num_steps,
        )  # fmt: skip
        count = -1
        draws = PaddedDraws(sampler, schedule, Envelope((14, 61), (61,)))
        batch = draws.new_batch()
        draws.begin_epoch(7)
        for step in range(schedule.num_steps):
            seeds, _, _ = schedule.share(7, step)
            expected = sampler.sample(seeds, epoch=7, step=step).to_host()
            draws.fill(batch)
            count = len(expected.n_id)
            assert int(batch.counts[1]) == count
            np.testing.assert_array_equal(whole(batch.n_id)[:count], expected.n_id)
    assert count == 0


def test_what_has_no_padded_form_is_refused(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler, PaddedHops
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws

    topology = topology_of(random_graph(1), kernel_device)
    schedule, room = SeedSchedule(np.arange(9), 4, seed=0), Envelope((5, 20), (20,))
    unpadded: tuple[dict[str, Any], ...] = ({"kappa": 4}, {"layer_dependent": True})
    for settings in unpadded:
        sampler = DeviceNeighborSampler(topology, [3], device=kernel_device, **settings)
        with pytest.raises(SamplerError, match="independent batches to pad"):
            PaddedDraws(sampler, schedule, room)
    sampler = DeviceNeighborSampler(topology, [3], device=kernel_device)
    with pytest.raises(SamplerError, match="more rows than the 4 seeds"):
        PaddedDraws(sampler, schedule, Envelope((4, 20), (20,)))
    for fanouts, envelope in (([0], room), ([2, 2], room), ([2, 2], Envelope((5, 9, 9), (9, 8)))):
        with pytest.raises(SamplerError, match="not 0, hop by hop"):
            PaddedHops(topology, fanouts, envelope, kernel_device, every_hop=False)
    with pytest.raises(SamplerError, match="rows do not fall"):
        Envelope((5, 4), (3,))


@pytest.mark.parametrize("dense_bytes", [0, 1 << 30])
def test_the_bytes_of_buffers_are_foreseen(dense_bytes: int, kernel_device: torch.device) -> None:
    schedule, room = SeedSchedule(np.arange(50), 8, seed=0), Envelope((16, 500, 900), (700, 2000))
    draws = draws_of(random_graph(1), schedule, [3, 2], kernel_device, room,
                     labels=np.zeros((60, 5), np.int64), dense_bytes=dense_bytes)  # fmt: skip
    hops = draws._hops
    table = [hops.table.ranks, *([] if hops.table.keys is None else [hops.table.keys, hops._slots])]
    shared = [*table, hops._values, hops._turns, draws._order, draws._train, draws._labels]
    foreseen = room.shared_bytes(60, 50, seed_bytes=5 * 8, dense_bytes=dense_bytes)
    assert sum(t.nbytes for t in shared) == pytest.approx(foreseen, abs=16)
