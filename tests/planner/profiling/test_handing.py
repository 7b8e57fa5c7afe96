"""Tests for planner/profiling/handing.py: what lies between the stages, by the runtime's loop."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.profiling import handing as module
from planner.profiling.bench import Bench
from planner.profiling.handing import STEPS, WARM, handing
from planner.profiling.synthetic import BatchShape
from planner.profiling.timing_request import TimingRequest
from runtime.graph.dataset import Graph
from runtime.graph.generate_links import generate_links
from runtime.plan import Workload
from runtime.stages import Stage
from runtime.train.minibatch import STEP

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


def test_every_step_is_metered_and_its_labels_are_those_of_the_model(small_graph: Graph) -> None:
    made = bench(small_graph)
    labels = [batch.y for batch in made.batches[0]]
    found = handing(made.loop, small_graph, WORK, 2, made.batches[0], 5)
    assert 0 < found.seeds < 0.1
    assert 0 < found.labels < 0.1
    assert 0 < found.between < 0.1
    meter = made.loop.meter
    assert len(meter.seconds(STEP, skip_steps=5)) == STEPS
    for name in (Stage.SEEDS, Stage.SAMPLE, Stage.GATHER, Stage.BATCH, Stage.OPTIMIZER):
        assert len(meter.seconds(name, skip_steps=5 + WARM)) == STEPS - WARM
    assert all(b.y is y for b, y in zip(made.batches[0], labels, strict=True))
    # A rank's half of the 16 seeds was chosen for each.
    assert {batch.num_seeds for batch in made.batches[0]} == {8}


def test_what_lies_between_the_stages_is_found(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: Callable[..., Iterator[object]] = module._handed

    def slower(*arguments: Any) -> Iterator[object]:
        for batch in taken(*arguments):
            time.sleep(0.01)
            yield batch

    monkeypatch.setattr(module, "_handed", slower)
    made = bench(small_graph)
    assert 0.01 <= handing(made.loop, small_graph, WORK, 1, made.batches[0], 0).between < 0.1


def test_links_bring_their_own_seeds(tmp_path: Path) -> None:
    graph = generate_links(tmp_path / "links", num_nodes=200, degree=6.0, feature_dim=4, seed=0)
    made = bench(graph, num_links=8)
    found = handing(made.loop, graph, replace(WORK, batch_size=8), 1, made.batches[0], 0)
    assert found.labels < 1e-3  # no labels are taken
    assert found.between > 0
