"""Lanes: what a stage reads was made before it on the device's clock, and stays till it is read.

A recorder takes the streams' place and keeps a vector clock per lane: what a lane knows to be done
grows by the marks it waits for, as on a GPU. Every stage then checks what it is given.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.loader import factory
from gnnplan.runtime.loader.device import tensors_of
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.loader.stages import AbstractStage, BufferRing, CopyStage, seed_batch
from gnnplan.runtime.plan.schema import DynamicCache
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.train.overlap import Workers
from gnnplan.runtime.train.streams import (
    AbstractMark,
    AbstractStreams,
    CudaStreams,
    HostStreams,
    streams_of,
)
from tests.support.plans import make_plan

STEPS = 4


@pytest.mark.parametrize("index", [0, 3])
def test_every_thread_that_makes_batches_chooses_the_ranks_own_gpu_first(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """CUDA's current device is a thread's own: one that chooses none works on GPU 0."""
    current, jobs = threading.local(), list[int | None]()
    chosen: list[tuple[str, int]] = []

    def choose(device: int) -> None:
        chosen.append((threading.current_thread().name, device))
        current.device = device

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    workers = Workers(2, enter=CudaStreams(torch.device("cuda", index)).enter_thread)
    both = threading.Barrier(2)

    def job() -> None:
        both.wait(60)  # each on a thread of its own
        jobs.append(getattr(current, "device", None))

    for _ in range(2):
        workers.start(job)
    assert workers.close()
    assert jobs == [index, index]
    assert sorted(chosen) == [("prefetch-0", index), ("prefetch-1", index)]


def test_a_loader_lets_its_threads_choose(small_graph: Graph, tmp_path: Path) -> None:
    entered: list[str] = []

    class Entered(HostStreams):
        def enter_thread(self) -> None:
            entered.append(threading.current_thread().name)

    make_plan(small_graph, tmp_path / "plan", sample_threads=2)
    loader = PlannedLoader(tmp_path / "plan", small_graph, streams=Entered())
    assert len(list(loader)) == len(loader)
    loader.close()
    assert sorted(entered) == ["prefetch-0", "prefetch-1"]


def test_a_loader_works_on_the_gpu_that_it_is_given(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels start on a thread's current GPU, whose name without a number is "cuda"."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(factory, "may_pin", lambda: False)
    make_plan(small_graph, tmp_path / "plan")
    for asked, number in (("cuda:3", 3), ("cuda", 2)):
        loader = PlannedLoader(
            tmp_path / "plan", small_graph, device=asked, on_device=False, streams=HostStreams()
        )
        own = torch.device("cuda", number)
        assert chosen.pop() == loader._parts.place.device == own
        loader.close()
    assert chosen == []


without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the recorder stands for streams on the CPU"
)


class Mark(AbstractMark):
    """What a lane knew when it was marked."""

    def __init__(self, known: dict[str, int]) -> None:
        self.known = known
        self.is_done = True

    def done(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Recorder(AbstractStreams):
    """Lanes with vector clocks."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, int]] = {}
        self.made: dict[int, tuple[str, int]] = {}
        """Lane and tick of each tensor, by address."""
        self.kept: set[tuple[str, int]] = set()
        self.alive: list[Tensor] = []
        """No tensor is freed while recording: an address names one tensor."""
        self.entered: set[str] = set()
        self._here = threading.local()
        self._lock = threading.Lock()

    @property
    def lane(self) -> str:
        return getattr(self._here, "lane", "")

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        before = self.lane
        self._here.lane = lane or before
        self.entered.add(self.lane)
        try:
            yield
        finally:
            self._here.lane = before

    def mark(self) -> Mark:
        with self._lock:
            return Mark(dict(self.known.setdefault(self.lane, {})))

    def wait(self, mark: AbstractMark) -> None:
        assert isinstance(mark, Mark)
        with self._lock:
            mine = self.known.setdefault(self.lane, {})
            for lane, tick in mark.known.items():
                mine[lane] = max(mine.get(lane, 0), tick)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        with self._lock:
            self.kept |= {(self.lane, tensor.data_ptr()) for tensor in tensors}

    def produced(self, tensors: Iterable[Tensor]) -> None:
        """The current lane has made these, as far as they are new."""
        with self._lock:
            mine = self.known.setdefault(self.lane, {})
            mine[self.lane] = mine.get(self.lane, 0) + 1
            for tensor in tensors:
                self.alive.append(tensor)
                self.made.setdefault(tensor.data_ptr(), (self.lane, mine[self.lane]))

    def check(self, tensors: Iterable[Tensor]) -> int:
        """The current lane reads these: were they made before, and are they kept for it?"""
        count = 0
        for tensor in tensors:
            maker, tick = self.made[tensor.data_ptr()]
            if maker == self.lane or tensor.numel() == 0:
                continue
            known = self.known.get(self.lane, {}).get(maker, 0)
            assert known >= tick, f"{self.lane or 'training'} reads what {maker} may not have made"
            assert (self.lane, tensor.data_ptr()) in self.kept, "memory may be used again too early"
            count += 1
        return count


class Deaf(Recorder):
    """Waits for nothing."""

    def wait(self, mark: AbstractMark) -> None:
        del mark


class Forgetful(Recorder):
    """Keeps nothing."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        del tensors


class Watched(AbstractStage):
    """A stage that checks what it is given and records what it makes."""

    def __init__(self, stage: AbstractStage, streams: Recorder) -> None:
        self.stage, self.streams = stage, streams
        self.name, self.ordered, self.lane = stage.name, stage.ordered, stage.lane

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        assert self.streams.lane == self.lane
        self.streams.check(tensors_of(batch))
        batch = self.stage.wait(self.stage.submit(batch, index))
        self.streams.produced(tensors_of(batch))
        return batch

    def finish(self) -> None:
        self.stage.finish()


@pytest.fixture(scope="module")
def tiny_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    return generate_sbm(folder, num_nodes=400, degree=6.0, feature_dim=5, num_classes=3, seed=5)


def watched(graph: Graph, folder: Path, streams: Recorder, **settings: Any) -> PlannedLoader:
    pytest.importorskip("triton")
    make_plan(graph, folder, fanouts=[2, 2], batch_size=12, own_rows=60, **settings)
    loader = PlannedLoader(folder, graph, on_device=True, streams=streams)
    stages: list[AbstractStage] = [Watched(stage, streams) for stage in loader.stages]
    loader.stages = stages
    return loader


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("threads", [0, 1, 3])
@without_gpu
def test_batches_on_lanes_are_ordered_kept_and_equal_to_the_serial_ones(
    threads: int, cached: bool, tiny_graph: Graph, tmp_path: Path
) -> None:
    streams = Recorder()
    settings: dict[str, Any] = {"cache": DynamicCache(policy="clock", rows=[50])} if cached else {}
    loader = watched(
        tiny_graph, tmp_path / "plan", streams, sample_threads=threads, prefetch_depth=3, **settings
    )
    serial = PlannedLoader(tmp_path / "plan", tiny_graph, on_device=False)
    checked = 0
    for found, expected in zip(loader.batches(STEPS), serial.batches(STEPS), strict=True):
        checked += streams.check(tensors_of(found))
        np.testing.assert_array_equal(found.n_id, expected.n_id)
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.y, expected.y)
        for mine, theirs in zip(found.device_blocks, expected.blocks, strict=True):
            np.testing.assert_array_equal(mine.indices.numpy(), theirs.indices[: mine.num_edges])
    assert checked > 4 * STEPS
    assert streams.entered >= {"sample", "gather"}
    loader.close()


@without_gpu
@pytest.mark.parametrize(
    ("kind", "words"), [(Deaf, "may not have made"), (Forgetful, "used again too early")]
)
def test_the_recorder_notices_lanes_that_do_not_wait_or_keep(
    kind: type[Recorder], words: str, tiny_graph: Graph, tmp_path: Path
) -> None:
    loader = watched(tiny_graph, tmp_path / "plan", kind())
    with pytest.raises(AssertionError, match=words):
        next(iter(loader))


def test_a_buffer_is_not_given_out_again_before_it_is_copied() -> None:
    class Pending(HostStreams):
        marks: list[Mark]

        def mark(self) -> Mark:
            mark = Mark({})
            mark.is_done = False
            self.marks.append(mark)
            return mark

    streams = Pending()
    streams.marks = []
    stage, ring = CopyStage(torch.device("meta"), streams), BufferRing(2, 3)

    def copied() -> int:
        batch = seed_batch(0, 0, Dialect.FIRST_SEEN)
        rows = ring.take(4)
        address = rows.ctypes.data
        batch.x = torch.from_numpy(rows)
        del rows
        stage.submit(batch, 0)
        return address

    first, second = copied(), copied()
    assert first != second
    third = copied()
    assert third not in (first, second)
    assert ring.overflows == 1
    for mark in streams.marks:
        mark.is_done = True
    copied()  # finds the copies done and lets go of their buffers
    assert copied() in (first, second)


def test_a_processor_needs_no_streams() -> None:
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, HostStreams)
    with streams.on("gather"):
        mark = streams.mark()
    streams.wait(mark)
    streams.keep([torch.ones(2)])
    assert mark.done()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA streams need a GPU")
def test_work_on_a_lane_comes_before_what_waits_for_its_mark() -> None:
    device = torch.device("cuda")
    streams = streams_of(device)
    for turn in range(20):
        with streams.on("gather"):
            rows = torch.full((1 << 24,), float(turn), device=device)
            for _ in range(20):
                rows = rows + 1
            mark = streams.mark()
        with streams.on("sample"):
            streams.wait(mark)
            streams.keep([rows])
            total = rows.sum()
            done = streams.mark()
        del rows  # its memory is taken again by the next turn's lane
        done.synchronize()
        assert float(total) == (turn + 20) * (1 << 24)
