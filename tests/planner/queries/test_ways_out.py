"""A refusal names what would help, each with the bytes it saves; planning again keeps the word."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.queries.remedies import find_remedies
from gnnplan.planner.search.search import Search
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload
from tests.support.machines import machine
from tests.support.profiles import hotness, profile

WORK = Workload(batch_size=100, hidden=64, fanouts=[5, 3])
MB = 10**6


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path) -> Profile:
    """All vertices are read with probability one half, one rank or two; nothing is started."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    made = profile(small_graph.num_nodes, 100)
    p = np.full(small_graph.num_nodes, 0.5)
    made = Profile(numbers=made.numbers, hotness={s: hotness(s, p) for s in made.hotness})
    monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])
    return made


def refused(graph: Graph, settings: PlanSettings, model: MachineModel) -> Search:
    return pipeline.search_for(graph, settings, model)


def test_the_refusal_is_one_line_with_the_sum_and_the_ways_out(
    small_graph: Graph, even: Profile, tmp_path: Path
) -> None:
    settings = PlanSettings(workload=WORK, devices=1, device_memory_bytes=100 * MB)
    with pytest.raises(PlanDoesNotFit) as caught:
        pipeline.plan(small_graph.path, settings, machine=machine(), out=tmp_path / "p")
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(r"rank0: context 200.0 MB .* > 100.0 MB usable; ways out: ", text)
    assert "--batch-size 50 saves about" in text
    assert "--hidden 32 saves about" in text
    assert re.search(r"--device-memory of \d+\.\d MB adds", text)


def test_half_the_batch_saves_what_its_frontier_shrinks_by(
    small_graph: Graph, even: Profile
) -> None:
    settings = PlanSettings(workload=WORK, devices=1, device_memory_bytes=100 * MB)
    search = refused(small_graph, settings, machine())
    priced = search.run()
    ways = {w.what: w for w in find_remedies(search, priced)}
    parts = priced[0].prediction.memory_bytes["rank0"].parts
    # [A5]: 1 - (1 - .5)^.5 = .2929 of the vertices, by hand, instead of .5.
    size = parts["activations"] + parts["batches"]
    saved = ways["--batch-size 50"].saves_bytes
    assert saved <= round(size * (1 - 0.29289 / 0.5)) + 1
    assert saved > 0


def test_enough_means_that_the_lack_is_covered_and_such_ways_come_first(
    small_graph: Graph, even: Profile, tmp_path: Path
) -> None:
    free = PlanSettings(workload=WORK, devices=1, policy="none")
    made = pipeline.plan(small_graph.path, free, machine=machine(), out=tmp_path / "free")
    total = made.prediction.memory_bytes["rank0"].total
    tight = replace(free, device_memory_bytes=total - 1000)
    search = refused(small_graph, tight, machine())
    ways = find_remedies(search, search.run())
    flags = [w.enough for w in ways[:-1]]
    assert flags == sorted(flags, reverse=True)
    assert any(flags)
    lack = ways[-1].saves_bytes
    assert all(w.enough == (w.saves_bytes >= lack) for w in ways)
    # The last way is taken at its word: as much memory as it names is enough.
    pipeline.plan(
        small_graph.path,
        replace(tight, device_memory_bytes=total - 1000 + lack),
        machine=machine(),
        out=tmp_path / "again",
    )


def test_float16_features_are_offered_where_rows_are_what_does_not_fit(
    small_graph: Graph, even: Profile
) -> None:
    settings = PlanSettings(workload=WORK, devices=1, host_memory_bytes=150 * MB)
    search = refused(small_graph, settings, machine())
    priced = search.run()
    ways = find_remedies(search, priced)
    rows = [w for w in ways if "float16" in w.what]
    held = min(p.prediction.memory_bytes["host0"].parts["features"] for p in priced)
    assert bool(rows) == (held > 0)  # rows that already went to disk save nothing
    assert ways[-1].what.startswith("--host-memory")


@pytest.fixture
def of_a_box(
    monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path
) -> Callable[..., list[str]]:
    """Ways out of what all eight GPUs of a box lack, as they are written."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))

    def ways(**limits: Any) -> list[str]:
        settings = PlanSettings(workload=WORK, devices=8, **limits)
        search = refused(small_graph, settings, load_preset("dgx-v100"))
        return [way.what for way in find_remedies(search, search.run())]

    return ways


def test_a_host_of_gpus_is_not_freed_by_what_lies_on_them(
    of_a_box: Callable[..., list[str]],
) -> None:
    found = of_a_box(host_memory_bytes=MB)
    assert found[-1].startswith("--host-memory of")
    assert not [what for what in found if what.startswith(("--batch-size", "--hidden"))]


def test_no_more_gpus_are_offered_than_there_are(of_a_box: Callable[..., list[str]]) -> None:
    found = of_a_box(device_memory_bytes=MB)
    assert found[-1].startswith("--device-memory of")
    assert "--batch-size 50" in found
    assert "--devices 16" not in found
