"""A search's bound is below everything that it claims to bound, and a plan's certificate says so.

Random searches: hotness with a heavy tail whose halves differ by chance, as those of few batches
do, and random rates and memories, on cores and on presets' GPUs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.assemble import assemble
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile import profile as profiling
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.queries.explain import gap_words
from gnnplan.planner.search.choose import alternatives, certificate, choose
from gnnplan.planner.search.search import Search, SearchResult, best_over_samplers
from gnnplan.planner.settings import POLICIES, PlanSettings
from gnnplan.planner.workload import Hotness
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.plan.schema import Workload
from tests.support.machines import machine
from tests.support.profiles import batch_profile, profile

Make = Callable[[int, Graph, pytest.MonkeyPatch], Search]
CORES = 170
GPUS = 30
WORK = Workload(batch_size=64, hidden=8, fanouts=[5, 3])
PRESETS = ("siton", "dgx-v100", "hgx-h100", "rtx-2080ti-x10")


def random_hotness(rng: np.random.Generator, seeds: int, num_nodes: int) -> Hotness:
    """Frequencies over two halves of eight batches each, drawn from a law with a heavy tail."""
    law = (1 + rng.permutation(num_nodes)) ** -rng.uniform(0.3, 1.2)
    p = np.minimum(1.0, law * (10.0 * seeds / law.sum()))
    halves = [(rng.binomial(8, p) / 8).astype(np.float32) for _ in range(2)]
    first, second = halves
    mean = ((first + second) / 2).astype(np.float32)
    return Hotness(
        seeds_per_rank=seeds, first_half=first, second_half=second, num_batches=16, topology=mean
    )


def with_columns(graph: Graph, seed: int) -> Graph:
    """The graph with rows so wide that copies of them outgrow a core's caches."""
    columns = (512, 1024, 2048)[seed % 3]
    return replace(graph, meta=replace(graph.meta, feature_dim=columns, feature_storage="none"))


def random_profile(rng: np.random.Generator, graph: Graph, ranks: tuple[int, ...]) -> Profile:
    """Times by hand, hotness by chance."""
    made = profile(graph.num_nodes, WORK.batch_size, ranks)
    hot = {seeds: random_hotness(rng, seeds, graph.num_nodes) for seeds in made.hotness}
    return Profile(numbers=made.numbers, hotness=hot)


def random_machine(rng: np.random.Generator) -> MachineModel:
    """Two or four cores; rows that cost little or much in the host's mapping; scarce memory."""
    own = 10 ** rng.uniform(-7.5, -5.5)
    return machine(
        cores=int(rng.choice([2, 4])),
        own_row=own,
        mapped_row=own * rng.uniform(0.9, 4.0),
        noise=float(rng.choice([0.0, 0.03, 0.1])),
    )


def cores_search(seed: int, graph: Graph, patch: pytest.MonkeyPatch) -> Search:
    """A request for cores: each policy in turn, memory that holds some rows, many or all."""
    rng = np.random.default_rng(seed)
    room = int(rng.choice([0, 205_000_000, 230_000_000]))
    settings = PlanSettings(
        workload=WORK,
        policy="auto" if seed % 2 == 0 else POLICIES[seed // 2 % len(POLICIES)],
        devices=int(rng.choice([1, 2])) if rng.random() < 0.5 else None,
        device_memory_bytes=room or None,
    )
    made = random_profile(rng, graph, (1, 2, 4))
    patch.setattr("gnnplan.planner.profile.profile.profiles", lambda *_, **__: [made])
    model = load_preset("cpu-2core") if seed % 4 < 2 else random_machine(rng)
    return pipeline.search_for(with_columns(graph, seed), settings, model)


def gpus_search(seed: int, graph: Graph, patch: pytest.MonkeyPatch) -> Search:
    """A request for a preset's GPUs, which have room for some of the rows."""
    rng = np.random.default_rng(seed)
    model = load_preset(PRESETS[seed % len(PRESETS)])
    settings = PlanSettings(workload=WORK, policy=POLICIES[seed // 4 % len(POLICIES)])
    ranks = (1, 2, 4, 8, 10)
    made = random_profile(rng, graph, ranks)
    drawn = replace(made.numbers, timing={}, batches=[batch_profile(s) for s in made.hotness])
    patch.setattr(profiling, "_draw_for_gpus", lambda *_, **__: replace(made, numbers=drawn))
    return pipeline.search_for(graph, settings, model)


def check(search: Search, explored: SearchResult) -> None:
    """Hold a search's bound against all candidates, and its certificate against its table."""
    bound = search.lower_bound(explored.priced)
    assert 0 < bound <= min(p.seconds for p in explored.priced)
    try:
        chosen = choose(explored.priced, search.request.machine.noise)
    except PlanDoesNotFit:
        return
    found = certificate(chosen, bound, complete=search.settings.policy != "auto")
    assert (found.lower_bound, found.objective) == (bound, chosen.seconds)
    assert found.gap == pytest.approx(1 - bound / chosen.seconds, abs=1e-12)
    told = gap_words(found.gap, bound, found.status)
    faster = "nothing that was priced is faster:"
    assert (faster in told) == (found.gap <= 1e-9)
    assert "every candidate was priced" in found.status
    assert "an estimate, no proof" in found.status  # reads of what was not priced are scaled
    for each in alternatives(explored.priced, chosen):
        if each.step_seconds is not None:
            assert each.step_seconds >= found.objective * (1 - found.gap) * (1 - 1e-12)


@pytest.fixture(scope="module")
def tiny_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Some nodes."""
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    return generate_sbm(folder, num_nodes=2000, degree=8.0, feature_dim=16, num_classes=5, seed=3)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No cache of an earlier test."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    return monkeypatch


SEARCHES = [(cores_search, seed) for seed in range(CORES)]
SEARCHES += [(gpus_search, seed) for seed in range(GPUS)]
FEW = [(cores_search, seed) for seed in (1, 16)] + [(gpus_search, seed) for seed in (0, 9)]
"""On the first two the reads of one placement, scaled, cost more than another's as they are."""


@pytest.mark.parametrize(
    "searches",
    [
        pytest.param(FEW, id="a few"),
        *(
            pytest.param(SEARCHES[i::20], id=f"{i} of 20", marks=pytest.mark.slow)
            for i in range(20)
        ),
    ],
)
def test_no_candidate_is_below_the_bound(
    searches: list[tuple[Make, int]], tiny_graph: Graph, patch: pytest.MonkeyPatch
):
    for make, seed in searches:
        search = make(seed, tiny_graph, patch)
        check(search, search.explore())


def test_a_plan_is_not_bounded_above_what_another_sampler_came_to(
    tiny_graph: Graph, patch: pytest.MonkeyPatch
):
    fast = cores_search(0, tiny_graph, patch)
    slow = replace(fast, settings=replace(fast.settings, policy="none"))
    outcome = best_over_samplers(
        [slow, fast], lambda _, priced: max(priced, key=lambda p: p.seconds)
    )
    assert outcome.elsewhere == [p.seconds for p in fast.explore().priced if p.eligible]
    found = outcome.best
    alone, _ = assemble(found.search, found.explored, found.chosen)
    least = 0.5 * alone.certificate.lower_bound
    beside, _ = assemble(found.search, found.explored, found.chosen, elsewhere=[1.0, least])
    assert beside.certificate.lower_bound == least
    assert beside.certificate.gap == pytest.approx(1 - least / found.chosen.seconds)
