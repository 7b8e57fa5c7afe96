"""Every row of README's table is planned for presets of several GPUs, and asked about.

Each way to train, asked for by settings as a user would, is planned for five boxes on a small
graph. Either there is a plan, whose choice `explain` gives, or a refusal that `REFUSED` lists with
its reason of physics. `why-not`, asked of the box's own best plan, answers each with seconds or
with that reason.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gnnplan.planner import pipeline
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.queries.why_not import render_why_not, why_not
from gnnplan.planner.request import read_changes
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Links, Plan, Workload
from tests.emulated.modes import ROWS
from tests.support.emulated_ranks import make_graph

WORK = Workload(batch_size=32, hidden=8, fanouts=[3, 2])


@dataclass(frozen=True, kw_only=True)
class Box:
    """A preset, and how many of its GPUs on how many hosts are planned on."""

    preset: str
    devices: int
    hosts: int = 1

    @property
    def name(self) -> str:
        return f"{self.preset}x{self.hosts}" if self.hosts > 1 else self.preset


BOXES = [
    Box(preset="dgx-a100", devices=8),
    Box(preset="hgx-h100", devices=8),
    Box(preset="dgx-v100", devices=8),
    Box(preset="pcie-4090x4", devices=4),
    Box(preset="hgx-h100", devices=16, hosts=2),
]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One way to train, by the settings that ask for it."""

    row: str
    changes: tuple[str, ...]
    graph: str = "nodes"
    holds: Callable[[Plan], bool] = lambda plan: True
    """What shows that the plan is what was asked for."""
    little: bool = False
    """Whether GPUs have room for few rows beside all else."""

    @property
    def name(self) -> str:
        return f"{self.row}: {', '.join(self.changes) or 'auto'}"


def _topology(policy: str) -> Callable[[Plan], bool]:
    return lambda plan: plan.strategy.topology.policy == policy


def _policy(name: str) -> Callable[[Plan], bool]:
    return lambda plan: plan.strategy.features.policy == name


def _sampler(name: str) -> Callable[[Plan], bool]:
    return lambda plan: plan.strategy.sampler.name == name


def _shared(plan: Plan) -> bool:
    return plan.strategy.batching == "cooperative"


def _whole(plan: Plan) -> bool:
    return plan.strategy.mode == "full-graph"


ANY = "allow=approximate"
LAYERS = ("dialect=every_hop", ANY)
ASKED = [
    *(
        Asked(row="independent", changes=changes)
        for changes in (
            (), ("model=gcn",), ("model=gat", "heads=2"), ("dropout=0.3",), ("precision=bfloat16",),
            ("precision=tf32",), ("devices=1",), ("devices=2",),
        )
    ),
    *(
        Asked(row="rows", changes=(f"policy={name}",), holds=_policy(name))
        for name in ("none", "degree", "legion", "song-jiang", "joint")
    ),
    Asked(row="rows", changes=("policy=degree", "shared_host=no"), little=True,
          holds=lambda plan: plan.strategy.features.disk_budget_bytes > 0),
    *(
        Asked(row="topology", changes=(f"topology={asked}",), holds=_topology(kept))
        for asked, kept in (
            ("host", "host"), ("replicated", "replicated"), ("cached", "cached"),
            ("clique", "cached"),
        )
    ),
    Asked(row="legion", changes=("topology=clique", "policy=legion"), little=True,
          holds=lambda plan: plan.strategy.partition == "hierarchical"),
    Asked(row="samplers", changes=("sampler=labor", ANY), holds=_sampler("labor")),
    *(
        Asked(row="samplers", changes=(f"sampler={name}:sizes=40,30", *LAYERS),
              holds=_sampler(name))
        for name in ("ladies", "pladies", "fastgcn")
    ),
    *(
        Asked(row="samplers", changes=(f"policy={name}",), holds=_policy(name))
        for name in ("lru", "clock")
    ),
    Asked(row="samplers", changes=("sampler=labor:kappa=16", "policy=lru", ANY),
          holds=lambda plan: plan.strategy.sampler.parameters.get("kappa") == 16),
    Asked(row="samplers", changes=("sampler=las:factor=4", "policy=degree", ANY), little=True,
          holds=_sampler("las")),
    *(
        Asked(row="cooperative", changes=("batching=cooperative", *more), holds=_shared)
        for more in (
            (), ("dialect=every_hop",), ("model=gcn",), ("model=gat", "heads=2"),
            ("sampler=labor", ANY), ("precision=bfloat16",), ("owner=partition",),
        )
    ),
    *(
        Asked(row="bulk", changes=(f"replication={copies}",),
              holds=lambda plan, copies=copies: plan.strategy.topology.replication == copies)
        for copies in (1, 2, 4, 8, 16)
    ),
    Asked(row="bulk", changes=("replication=2", "sampler=ladies:sizes=40,30", *LAYERS)),
    Asked(row="bulk", changes=("replication=2", "policy=legion")),
    *(
        Asked(row="full graph", changes=("mode=full-graph", *more), holds=_whole)
        for more in (
            (), ("allow=unbiased",), (ANY,), ("keep=0.5", ANY), ("keep=0.5", "draws=shared", ANY),
            ("keep=0.5", "drop=edges", ANY), ("keep=0.5", "drop=boundary-edges", ANY),
            ("exchange=broadcast",), ("first_layer=once",), ("model=gcn",),
            ("model=gat", "heads=2"),
        )
    ),
    *(
        Asked(row="links and types", graph=graph, changes=changes)
        for graph in ("links", "typed")
        for changes in ((), ("policy=none",), ("policy=legion",), ("topology=replicated",),
                        ("policy=lru",))
    ),
]  # fmt: skip
REFUSED = {
    (box.name, f"bulk: replication={copies}"): "several ranks, a multiple of it"
    for box in BOXES
    for copies in (8, 16)
    if copies > box.devices
} | {("hgx-h100x2", "independent: devices=1"): "2 hosts share evenly"}
"""Words of the refusals, by box and what is asked for: ranks hold no more copies than they are, and
one rank is not on two hosts."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The graphs, and each box's own best plan."""

    folder: Path
    graphs: dict[str, Graph] = field(default_factory=dict[str, Graph])

    def graph(self, kind: str) -> Graph:
        if kind not in self.graphs:
            self.graphs[kind] = make_graph(self.folder / kind, kind)
        return self.graphs[kind]

    def changes(self, box: Box, asked: Asked) -> list[str]:
        """What is asked for, with a memory of each GPU's that holds 60 rows beside all else."""
        if not asked.little:
            return [*asked.changes]
        use = self.best(box, asked.graph, "policy=none").prediction.memory_bytes["rank0"]
        rows = 60 * self.graph(asked.graph).row_bytes
        needed = int((use.total - use.parts["reserve"] + rows) / 0.95) + 1
        return [*asked.changes, f"device_memory={needed}"]

    def plan(self, box: Box, kind: str, changes: list[str], out: Path) -> Plan:
        made = read_changes(settings_of(box, kind), changes)
        return pipeline.plan(self.graph(kind).path, made, machine=machine_of(box), out=out)

    def best(self, box: Box, kind: str, *changes: str) -> Plan:
        """The box's own best plan, or under some settings."""
        out = self.folder / " ".join([box.name, kind, *changes])
        return load_plan(out) if out.exists() else self.plan(box, kind, [*changes], out)


@functools.cache
def machine_of(box: Box) -> MachineModel:
    return load_preset(box.preset)


def settings_of(box: Box, kind: str) -> PlanSettings:
    work = WORK
    if kind == "links":
        work = Workload(batch_size=32, hidden=8, fanouts=[3, 2], links=Links(eval_negatives=10))
    if kind == "typed":
        work = Workload(batch_size=32, hidden=8, fanouts=[3, 2], model="rgcn")
    hosts = box.hosts if box.hosts > 1 else None
    return PlanSettings(workload=work, devices=box.devices, hosts=hosts)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(folder=tmp_path_factory.mktemp("presets"))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path_factory.getbasetemp() / "presets-cache"))


def hold_explained(plan: Plan) -> None:
    found = explain(plan)
    text = render(found)
    assert found.summary in text
    assert found.step_seconds > 0
    assert all(row.provenance for row in found.stages)
    assert all(each.step_seconds is not None or each.why for each in found.alternatives)
    assert found.runner_up is not None


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED, ids=lambda each: each.name)
@pytest.mark.parametrize("box", BOXES, ids=lambda each: each.name)
def test_a_way_to_train_is_planned_and_asked_about(
    box: Box, asked: Asked, bench: Bench, tmp_path: Path
) -> None:
    refused, changes = REFUSED.get((box.name, asked.name)), bench.changes(box, asked)
    if refused is None:
        made = bench.plan(box, asked.graph, changes, tmp_path / "plan")
        assert asked.holds(made), made.strategy
        hold_explained(made)
    else:
        with pytest.raises(GnnplanError, match=refused):
            bench.plan(box, asked.graph, changes, tmp_path / "plan")
    answer = why_not(bench.best(box, asked.graph), changes=changes or ["devices=2"])
    assert (answer.best is None) == (refused is not None), answer.why
    assert answer.best is None or answer.best.step_seconds.value > 0
    assert answer.why.strip()
    assert refused is None or refused in answer.why
    assert answer.why in render_why_not(answer)


def test_every_row_but_the_probes_is_asked_for() -> None:
    assert {asked.row for asked in ASKED} == ROWS.keys() - {"probe"}
