"""The recipes work: a toy policy, sampler and cost term, added to a copy of the tree by them.

Each is added by editing the files that its page numbers, and no others.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.machine import save_machine
from gnnplan.planner.machine.model import make_table
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.graph.generate import generate_sbm

ROOT = Path(__file__).resolve().parents[1]
POLICY_PAGE = "planner/placement/HOWTO_add_a_placement_policy.md"
SAMPLER_PAGE = "runtime/sampling/HOWTO_add_a_sampler.md"
TERM_PAGE = "planner/cost/HOWTO_add_a_cost_term.md"

TOY_POLICY = '''
"""Rows by id, from the last down."""

import numpy as np

from gnnplan.planner.placement.policies.policy import Copies, Knowledge
from gnnplan.planner.placement.problem import PlacementProblem


def place_toy(problem: PlacementProblem, know: Knowledge) -> Copies:
    """Keep the last rows of the table, the same on every device."""
    del know
    num = problem.kinds[0].num_items
    return Copies(own={0: [np.arange(max(0, num - m), num) for m in problem.capacity_rows]})
'''
TOY_ENTRY = """    PlacementPolicy(
        name="toy",
        source="-",
        function="gnnplan.planner.placement.policies.toy:place_toy",
    ),
"""
TOY_SAMPLER = '''
"""One neighbour of each vertex: the first of its list."""

import numpy as np

from gnnplan.runtime.sampling.neighbor import NeighborSampler


class ToySampler:
    """Cuts every list to its first entry and takes all that is left."""

    def __init__(self, r):
        indptr = np.asarray(r.indptr)
        has = indptr[1:] > indptr[:-1]
        cut = np.concatenate([[0], np.cumsum(has)])
        self._of = NeighborSampler(
            cut, np.asarray(r.indices)[indptr[:-1][has]], [-1] * len(r.fanouts),
            dialect=r.dialect, seed=r.seed, edge_ids=r.edge_ids,
        )

    def sample(self, seeds, **settings):
        return self._of.sample(seeds, **settings)
'''
TOY_SPEC = """    SamplerSpec(
        name="toy", cpu="gnnplan.runtime.sampling.toy:ToySampler", unequal=True
    ),
"""

TOY_TERM = '''
"""Labels that are looked up by a slow clerk."""

from dataclasses import replace

from gnnplan.planner.cost.rank_times import RankTimes, RankWork
from gnnplan.planner.cost.rates import lookup
from gnnplan.planner.machine.table import TableName
from gnnplan.runtime.stages import Stage

CLERK = TableName("label_clerk", "ranks", "seconds_per_seed")
"""Seconds to look up one seed's label while so many ranks look up."""


def clerk_seconds(seeds: float, seconds_per_seed: float) -> float:
    """Seconds of looking up labels.

    >>> clerk_seconds(2.0, 1e-3)
    0.002
    """
    return seeds * seconds_per_seed


def add_toy(work: RankWork, times: RankTimes) -> RankTimes:
    """Add the clerk to the stage that adds labels, where the machine knows its pace."""
    if CLERK not in work.machine.tables:
        return times
    rate = lookup(work.machine, CLERK, ranks=work.candidate.num_ranks)
    batch = times.stages[Stage.BATCH]
    more = clerk_seconds(work.batch.vertices[0].mean, rate.seconds)
    words = f"{batch.provenance} + a clerk ({rate.provenance})"
    slower = replace(batch, seconds=batch.seconds + more, provenance=words)
    return times.with_stages({Stage.BATCH: slower})
'''

FIRST_SPEC = "SAMPLERS: dict[str, SamplerSpec] = {spec.name: spec for spec in (\n"
LAST_ENTRY = "    *(PlacementPolicy("
POLICY_EDITS = {
    "planner/placement/policies/toy.py": [("", TOY_POLICY)],
    "planner/placement/policies/registry.py": [(LAST_ENTRY, TOY_ENTRY + LAST_ENTRY)],
}
SAMPLER_EDITS = {
    "runtime/sampling/toy.py": [("", TOY_SAMPLER)],
    "runtime/sampling/registry.py": [(FIRST_SPEC, FIRST_SPEC + TOY_SPEC)],
}
TERM_EDITS = {
    "planner/cost/stages/toy.py": [("", TOY_TERM)],
    "planner/cost/terms.py": [
        ("    add_cache_upkeep,\n", "    add_cache_upkeep,\n    add_toy,\n"),
        (
            "from gnnplan.planner.machine.model",
            "from gnnplan.planner.cost.stages.toy import add_toy\n"
            "from gnnplan.planner.machine.model",
        ),
    ],
}
FIELD_EDITS = {
    "runtime/plan/schema.py": [
        (
            '''    """Numbers of threads of each rank."""
''',
            '''    """Numbers of threads of each rank."""

    toys: int = field(default=0, metadata=codec.UNLESS_SET)
    """Threads that play."""
''',
        )
    ],
    "planner/settings.py": [
        (
            "    quick: Annotated[\n",
            "    toys: Annotated[\n"
            '        int, Setting(help="Threads that play.", plan_field="strategy.threads.toys")\n'
            "    ] = 0\n"
            "    quick: Annotated[\n",
        )
    ],
    "planner/queries/explain.py": [
        ("            e.summary,\n", "            e.summary,\n            e.toys,\n"),
        ("    summary: str\n    answers", "    summary: str\n    toys: str\n    answers"),
        (
            "        summary=_summary(plan),\n",
            "        summary=_summary(plan),\n"
            '        toys=f"{plan.strategy.threads.toys} threads play",\n',
        ),
    ],
}
LIMIT_EDITS = {
    "planner/settings.py": [
        (
            "    quick: Annotated[\n",
            "    most_traffic: Annotated[\n"
            '        int | None, Setting(help="Most bytes a step.", unset="any number")\n'
            "    ] = None\n"
            "    quick: Annotated[\n",
        )
    ],
    "planner/search/choose.py": [
        (
            "    return _lacks_memory(prediction)\n",
            "    if (moved := sum(prediction.traffic_bytes.values())) > (\n"
            "        moved if settings.most_traffic is None else settings.most_traffic\n"
            "    ):\n"
            '        return f"moves {moved:.0f} B, more than --most-traffic allows"\n'
            "    return _lacks_memory(prediction)\n",
        )
    ],
}
DRAW = """
from gnnplan.runtime.loader.loader import PlannedLoader
loader = PlannedLoader("plan")
sizes = [(len(b.n_id), [len(block.indices) for block in b.blocks]) for b in loader]
loader.close()
print(sizes)
"""


def numbered(page: str) -> set[str]:
    """The files that a recipe's numbered list names."""
    found = re.findall(r"^\d\. \*\*`([\w/.]+)`\*\*", (ROOT / page).read_text(), re.MULTILINE)
    return {name.replace("NAME", "toy") for name in found}


def furnish(folder: Path, edits: dict[str, list[tuple[str, str]]]) -> None:
    """Copy the product and edit the copy."""
    for package in ("gnnplan", "api", "planner", "runtime"):
        shutil.copytree(ROOT / package, folder / package, symlinks=True)
    for name, changes in edits.items():
        path = folder / name
        text = path.read_text() if path.exists() else ""
        for old, new in changes:
            assert not old or text.count(old) == 1, f"{name}: {old!r}"
            text = text.replace(old, new) if old else new.lstrip()
        path.write_text(text)


def run(folder: Path, *words: str, status: int = 0) -> str:
    """What a program of the copy printed (of a refusal its line), run beside a small graph."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "GNNPLAN_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr[-2000:]
    return done.stderr if status else done.stdout


def plan(folder: Path, *words: str, machine: str = "cpu-2core") -> Path:
    """A plan that the copy makes for a machine."""
    if not (folder / "graph").exists():
        generate_sbm(folder / "graph", num_nodes=600, num_classes=4, feature_dim=8, seed=0)
    settings = f"--machine {machine} --devices 1 --fanouts 3,3 --hidden 8 --batch-size 64"
    run(folder, "-m", "planner", "plan", "graph", "-o", "plan", *settings.split(), *words)
    return folder / "plan"


@pytest.mark.parametrize(
    ("page", "edits"),
    [(POLICY_PAGE, POLICY_EDITS), (SAMPLER_PAGE, SAMPLER_EDITS), (TERM_PAGE, TERM_EDITS)],
)
def test_a_recipe_numbers_the_files_that_its_toy_edits(
    page: str, edits: dict[str, list[tuple[str, str]]]
) -> None:
    assert numbered(page) == set(edits)


@pytest.mark.parametrize(
    "edits",
    [POLICY_EDITS, SAMPLER_EDITS, TERM_EDITS, FIELD_EDITS, LIMIT_EDITS],
    ids=["policy", "sampler", "term", "field", "limit"],
)
def test_a_toy_finds_the_lines_that_it_edits(edits: dict[str, list[tuple[str, str]]]) -> None:
    for name, changes in edits.items():
        for old, _ in changes:
            assert not old or (ROOT / name).read_text().count(old) == 1, (name, old)


@pytest.mark.slow
def test_a_policy_added_by_its_recipe_places_the_rows_of_a_plan(tmp_path: Path) -> None:
    furnish(tmp_path, POLICY_EDITS)
    made = plan(tmp_path, "--policy", "toy")
    features = json.loads((made / "plan.json").read_text())["strategy"]["features"]
    assert features["policy"] == "toy"
    (own,) = [np.load(path) for path in made.rglob("*feature_own_ids_0*.npy")]
    assert own.tolist() == list(range(600 - len(own), 600))


@pytest.mark.slow
def test_a_sampler_added_by_its_recipe_draws_the_batches_of_a_plan(tmp_path: Path) -> None:
    furnish(tmp_path, SAMPLER_EDITS)
    made = plan(tmp_path, "--sampler", "toy", "--allow", "approximate")
    sampler = json.loads((made / "plan.json").read_text())["strategy"]["sampler"]
    assert sampler["name"] == "toy"
    (line,) = run(tmp_path, "-c", DRAW).splitlines()
    assert line.startswith("[(")
    for vertices, edges in eval(line):
        # One neighbour each: a seed adds a vertex per hop, and no block has more edges than that.
        assert 64 < vertices <= 64 * 3
        assert all(0 < number <= vertices for number in edges)


@pytest.mark.slow
def test_a_cost_term_added_by_its_recipe_is_in_the_stage_and_the_words_of_a_plan(
    tmp_path: Path,
) -> None:
    furnish(tmp_path, TERM_EDITS)
    prediction = json.loads((plan(tmp_path) / "plan.json").read_text())["prediction"]
    assert "clerk" not in prediction["provenance"]["batch"]  # the preset does not know it
    path = tmp_path / "machine.json"
    machine = load_preset("cpu-2core")
    pace = make_table("seconds_per_seed", {"ranks": [1]}, [1e-3], 0.1)
    save_machine(machine.with_tables({"label_clerk": pace}), path)
    prediction = json.loads((plan(tmp_path, machine=path.name) / "plan.json").read_text())[
        "prediction"
    ]
    # All 60 training nodes, 1 ms each and once; labels and edge weights take less than they do.
    assert 60e-3 <= prediction["stages"]["batch"] < 120e-3
    assert prediction["provenance"]["batch"].endswith(" + a clerk (measured: table label_clerk)")
    assert prediction["step_seconds"]["value"] > 60e-3


@pytest.mark.slow
def test_a_field_of_the_plan_that_a_flag_sets_touches_the_files_of_its_row(tmp_path: Path) -> None:
    row = next(
        line
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith("| a field of the plan that users set")
    )
    assert all(f"`{name}`" in row for name in sorted(FIELD_EDITS)[1:])
    furnish(tmp_path, FIELD_EDITS)
    made = plan(tmp_path, "--toys", "3")
    assert json.loads((made / "plan.json").read_text())["strategy"]["threads"]["toys"] == 3
    assert "\n3 threads play\n" in run(tmp_path, "-m", "planner", "explain", "plan")
    whole = "plan graph -o full --machine cpu-2core --devices 1 --mode full-graph --quick --toys 2"
    run(tmp_path, "-m", "planner", *whole.split())
    assert json.loads((tmp_path / "full/plan.json").read_text())["strategy"]["threads"]["toys"] == 2


@pytest.mark.slow
def test_a_flag_that_limits_plans_touches_the_files_of_its_row(tmp_path: Path) -> None:
    row = next(
        line
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith("| a flag that limits what may be chosen")
    )
    assert all(f"`{name}`" in row for name in LIMIT_EDITS)
    furnish(tmp_path, LIMIT_EDITS)
    traffic = json.loads((plan(tmp_path) / "plan.json").read_text())["prediction"]["traffic_bytes"]
    batches = ["--machine", "cpu-2core", "--fanouts", "3,3", "--hidden", "8", "--batch-size", "64"]
    asked = ["-m", "planner", "plan", "graph", "--most-traffic"]
    run(tmp_path, *asked, f"{int(sum(traffic.values())) + 1}", "-o", "few", *batches)
    lost = json.loads((tmp_path / "few/plan.json").read_text())["alternatives"]
    refused = [each for each in lost if "more than --most-traffic allows" in each["why"]]
    assert refused
    assert all(each["step_seconds"] is None for each in refused)
    whole = ["--machine", "cpu-2core", "--mode", "full-graph", "--quick", "--devices", "2"]
    for words in ([*batches, "--devices", "2"], whole):
        line = run(tmp_path, *asked, "0", "-o", "none", *words, status=3)
        assert "more than --most-traffic allows" in line
        assert "ways out" not in line  # memory is not what is short
        assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_rate_of_a_term_in_another_unit_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    furnish(tmp_path, TERM_EDITS)
    in_ms = make_table("ms_per_seed", {"ranks": [1]}, [1.0], 0.1)
    save_machine(
        load_preset("cpu-2core").with_tables({"label_clerk": in_ms}), tmp_path / "machine.json"
    )
    with pytest.raises(AssertionError, match="label_clerk: expected the unit seconds_per_seed"):
        plan(tmp_path, machine="machine.json")
    assert not (tmp_path / "plan").exists()
