"""What an owner asks first is answered from the search's own candidates, kept beside the plan."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.cli.main import main
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.queries.answers import evaluation_words
from gnnplan.planner.queries.explain import Explanation, explain, render
from gnnplan.planner.queries.rivals import load_runners_up, save_runners_up
from gnnplan.planner.queries.whatif import reopen
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import seconds_text
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Alternative, Plan, Workload
from tests.support.machines import machine
from tests.support.profiles import hotness, profile

SETTINGS = PlanSettings(workload=Workload(batch_size=100, hidden=8, fanouts=[5, 3]))
SLOW = machine(mapped_row=20e-6)
"""The mapping is slow, so copies of rows pay."""


@pytest.fixture(autouse=True)
def skewed(monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path) -> None:
    """Half of the reads go to the first tenth of the vertices; no process is started."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    n = small_graph.num_nodes
    made = profile(n, 100)
    p = np.where(np.arange(n) < n // 10, 0.9, 0.1)
    made = Profile(numbers=made.numbers, hotness={s: hotness(s, p) for s in made.hotness})
    monkeypatch.setattr("gnnplan.planner.profile.profile.profiles", lambda *a, **k: [made])


def plan(graph: Graph, out: Path, settings: PlanSettings = SETTINGS) -> Plan:
    return pipeline.plan(graph.path, settings, machine=SLOW, out=out)


def test_the_best_of_each_number_of_ranks_is_what_the_search_prices(
    small_graph: Graph, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p")
    found = explain(made).runners_up
    best: dict[str, float] = {}
    for p in reopen(made).run():
        number = str(p.candidate.num_ranks)
        if p.eligible:
            best[number] = min(best.get(number, np.inf), p.seconds)
    assert len(best) > 1
    own = str(made.num_ranks)
    assert set(found.by_ranks) == set(best)
    for number, other in found.by_ranks.items():
        if number == own:
            assert other.why == ""
            assert other.step_seconds == made.prediction.step_seconds.value
        else:
            assert other.why
            assert other.step_seconds == best[number]
    assert not found.asked
    text = explain(made).answers.why_so_many
    assert f"{seconds_text(made.prediction.step_seconds.value)} on {own} (this plan)" in text
    assert all(f"{seconds_text(best[n])} on {n}" in text for n in best if n != own)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("does not fit: rank0: rows 9.0 GB > 8.0 GB usable", "too much memory on 4"),
        ("sends more than a limit allows", "none to be chosen on 4"),
    ],
)
def test_a_number_of_ranks_of_which_none_may_be_chosen_lacks_memory_only_where_it_does(
    why: str, words: str, small_graph: Graph, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p")
    found = load_runners_up(made.plan_id)
    four = {"4": Alternative(name="", step_seconds=None, why=why)}
    save_runners_up(replace(found, by_ranks=found.by_ranks | four), made.plan_id)
    assert words in explain(made).answers.why_so_many


def test_the_gain_is_over_one_rank_that_reads_all_from_the_host(
    small_graph: Graph, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p")
    plainest = explain(made).runners_up.plainest
    assert plainest is not None
    threads = max(
        p.candidate.threads.compute for p in reopen(made).run() if p.candidate.num_ranks == 1
    )
    assert plainest.name == f"1 rank x ({threads} compute + 0 loader) threads, none"
    times = (plainest.step_seconds or 0.0) / made.prediction.step_seconds.value
    assert times > 1
    words = explain(made).answers.what_it_gains
    assert words.startswith(f"{times:.1f} times as fast")
    assert "predicted" in words
    assert "measured" not in words
    guessed = replace(made, prediction=replace(made.prediction, estimated=True))
    words = explain(guessed).answers.what_it_gains
    assert "estimated too" in words
    assert "predicted" not in words


def test_a_number_of_ranks_that_was_asked_for_says_so(small_graph: Graph, tmp_path: Path) -> None:
    made = plan(small_graph, tmp_path / "p", replace(SETTINGS, devices=1))
    told = explain(made)
    assert told.runners_up.asked
    assert list(told.runners_up.by_ranks) == ["1"]
    assert "that number was asked for" in told.answers.why_so_many


def test_a_training_of_that_many_epochs_is_as_long(small_graph: Graph, tmp_path: Path) -> None:
    asked = replace(SETTINGS, epochs=70)
    made = plan(small_graph, tmp_path / "p", asked)
    assert (made.epochs, load_plan(tmp_path / "p").epochs) == (70, 70)
    times = made.prediction
    total = seconds_text(times.startup_seconds + 70 * times.epoch_seconds.value)
    assert explain(made).answers.how_long.startswith(f"{total} for 70 epochs and the start-up")
    assert f"how long the training is: {total} for" in render(explain(made))
    unasked = plan(small_graph, tmp_path / "q")
    assert (unasked.epochs, explain(unasked).answers.how_long) == (None, "")
    assert unasked.strategy == made.strategy


def test_a_plan_from_elsewhere_answers_what_it_holds(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(small_graph, tmp_path / "p")
    here = explain(made)
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "another"))
    there = explain(made)
    assert "planned elsewhere" in there.answers.why_so_many
    assert "planned elsewhere" in there.answers.what_it_gains
    assert there.answers.what_fills_memory == here.answers.what_fills_memory
    assert there.answers.what_is_faster == here.answers.what_is_faster
    assert there.today is None
    changed = replace(there, answers=here.answers, runners_up=here.runners_up, today=here.today)
    assert changed == here
    assert not (tmp_path / "another").exists()  # a question makes no folder


def test_the_largest_parts_and_the_best_relaxation_are_named(
    small_graph: Graph, tmp_path: Path
) -> None:
    made = plan(small_graph, tmp_path / "p")
    told = explain(made).answers
    for name in ("rank0", "host0"):
        parts = made.prediction.memory_bytes[name].parts
        largest = max(parts, key=lambda part: parts[part])
        assert f"{name} " in told.what_fills_memory
        assert f"({largest} " in told.what_fills_memory
    prices = made.shadow_prices
    best = max(prices, key=lambda name: prices[name])
    assert told.what_is_faster.startswith(f"{best} would save {seconds_text(prices[best])} a step")
    none = replace(made, shadow_prices=dict.fromkeys(prices, 0.0))
    assert explain(none).answers.what_is_faster.startswith("more memory or a faster link would not")


def test_the_memory_says_what_runs_beside_it(small_graph: Graph, tmp_path: Path) -> None:
    made = plan(small_graph, tmp_path / "p")
    memory = next(part for part in render(explain(made)).split("\n\n") if part.startswith("memory"))
    assert memory.splitlines()[-1] == f"  {evaluation_words(made)}"
    assert " validation and test run layer by layer " in memory


def runner_lines(told: Explanation, *others: Alternative) -> list[str]:
    changed = replace(told, alternatives=list(others), runner_up=others[0] if others else None)
    text = render(changed).split("\n\n")
    return next(part for part in text if part.startswith("runner-up")).splitlines()[1:]


def test_alternatives_that_nobody_minds_are_one_line(small_graph: Graph, tmp_path: Path) -> None:
    told = explain(plan(small_graph, tmp_path / "p"))
    step, ranks = told.step_seconds, " ".join(told.summary.split()[:2]).rstrip(",")
    alike = [
        Alternative(name=f"{ranks} x {name}", step_seconds=step * 1.002, why="as fast")
        for name in ("a", "b", "c")
    ]
    slower = Alternative(name=f"{ranks} x d", step_seconds=step * 1.2, why="20.0% slower")
    fewer = Alternative(name="7 ranks x a", step_seconds=step, why="as fast")
    found = runner_lines(told, *alike, slower)
    assert len(found) == 2
    assert "(2 more as fast" in found[0]
    assert found[1].startswith(f"  {ranks} x d")
    # Another number of ranks is what a user minds, however fast it is.
    assert [line.split(":")[0] for line in runner_lines(told, alike[0], fewer)] == [
        f"  {ranks} x a",
        "  7 ranks x a",
    ]
    assert runner_lines(told) == ["  none: nothing else was possible"]


@pytest.mark.parametrize("listed", [0, 1, 3, 10**6])
def test_as_many_alternatives_are_listed_as_are_asked_for(
    listed: int, small_graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "1000")
    others = plan(small_graph, tmp_path / "p").alternatives
    assert 3 < len(others) < 10**6

    def told(*flags: str) -> str:
        assert main(["explain", str(tmp_path / "p"), *flags]) == 0
        return capsys.readouterr().out

    flag = ("--alternatives", str(listed))
    assert told("--json", *flag) == told("--json")
    usual, asked = told().rstrip("\n").split("\n\n"), told(*flag).rstrip("\n").split("\n\n")
    at = next(i for i, part in enumerate(usual) if part.startswith("runner-up"))
    section = asked[at].splitlines() if listed else []
    assert [*asked[:at], *asked[at + bool(listed) :]] == [*usual[:at], *usual[at + 1 :]]
    if listed:
        shown = others[:listed]
        assert section[0] == f"alternatives, {len(shown)} of {len(others)}"
        assert len(section) == 1 + len(shown)
        assert all(
            line.startswith(f"  {other.name}: ") and line.endswith(other.why)
            for line, other in zip(section[1:], shown, strict=True)
        )


@pytest.mark.parametrize("listed", [None, 2])
def test_a_plan_without_alternatives_says_so(
    listed: int | None, small_graph: Graph, tmp_path: Path
) -> None:
    alone = replace(plan(small_graph, tmp_path / "p"), alternatives=[])
    assert "runner-up\n  none: nothing else was possible\n" in render(explain(alone), listed)
