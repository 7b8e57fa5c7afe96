"""Tests for planner/profile/loop.py: what lies between the stages, by the runtime's loop."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.profile import loop as module
from gnnplan.planner.profile.loop import MOST_STEPS as STEPS, WARM, Bench, handing
from gnnplan.planner.profile.protocol import BatchShape, TimingRequest
from gnnplan.runtime import meter
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train import minibatch, overlap
from gnnplan.runtime.train.minibatch import STEP
from tests.support.clock import FakeClock

WORK = Workload(hidden=8, fanouts=[3, 2], batch_size=16)


def bench(graph: Graph, *, num_links: int = 0) -> Bench:
    """The model on batches of 16 seeds."""
    return Bench(
        TimingRequest(
            workload=WORK,
            in_dim=4,
            num_classes=max(2, graph.num_classes),
            task=str(graph.task),
            shape=BatchShape(vertices=[16, 48, 96], edges=[48, 96], num_links=num_links),
            scales=[1.0],
            threads=1,
            steps=2,
        )
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Time of the loop and its stages: a batch's seeds take 2 ms, its labels 3, its step 5."""
    made = FakeClock()
    for reads in (overlap, meter, minibatch):
        monkeypatch.setattr(reads, "time", made)

    made.lasts(monkeypatch, module.SeedsStage, "submit", 0.002)
    made.lasts(monkeypatch, module._Labels, "submit", 0.003)
    made.lasts(monkeypatch, minibatch.TrainLoop, "_forward_backward", 0.005)
    return made


def test_every_step_is_metered_and_its_labels_are_those_of_the_model(
    small_graph: Graph, clock: FakeClock
) -> None:
    made = bench(small_graph)
    labels = [batch.y for batch in made.batches[0]]
    found = handing(made.loop, small_graph, WORK, 2, made.batches[0], 5)
    assert found.seeds == pytest.approx(0.002)
    assert found.labels == pytest.approx(0.003)
    assert found.between == pytest.approx(0.0)
    meter = made.loop.meter
    assert meter.seconds(STEP, skip_steps=5) == pytest.approx([0.010] * STEPS)
    for name in (Stage.SEEDS, Stage.SAMPLE, Stage.GATHER, Stage.BATCH, Stage.OPTIMIZER):
        assert len(meter.seconds(name, skip_steps=5 + WARM)) == STEPS - WARM
    assert all(b.y is y for b, y in zip(made.batches[0], labels, strict=True))
    # A rank's half of the 16 seeds was chosen for each.
    assert {batch.num_seeds for batch in made.batches[0]} == {8}


def test_what_lies_between_the_stages_is_found(
    small_graph: Graph, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: Callable[..., Iterator[object]] = module._make_batches

    def slower(*arguments: Any) -> Iterator[object]:
        for batch in taken(*arguments):
            clock.sleep(0.01)
            yield batch

    monkeypatch.setattr(module, "_make_batches", slower)
    made = bench(small_graph)
    found = handing(made.loop, small_graph, WORK, 1, made.batches[0], 0)
    assert found.between == pytest.approx(0.01)


def test_links_bring_their_own_seeds(tmp_path: Path, clock: FakeClock) -> None:
    graph = generate_links(tmp_path / "links", num_nodes=200, degree=6.0, feature_dim=4, seed=0)
    made = bench(graph, num_links=8)
    found = handing(made.loop, graph, replace(WORK, batch_size=8), 1, made.batches[0], 0)
    assert (found.seeds, found.labels) == (0.0, 0.0)  # they come with the batch
    assert found.between == pytest.approx(0.0)
