"""The plans that are kept: graphs, machines, ranks and what is asked, drawn by seed.

Every graph may be planned for on every machine under every sampler, every policy, all at once
(auto) and as a whole graph, for one rank and for two, with ample memory or with room for some rows;
`drawn` took a part of these by seed, every sampler, policy and mode among it. What is kept is what
counts: a new sampler changes what is drawn, and no plan that is kept.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.settings import POLICIES, PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import (
    generate_links,
    generate_rmat,
    generate_sbm,
    generate_typed,
)
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.registry import SAMPLERS as SPECS, is_layerwise
from tests.support.generate_large import generate_rmat_topology
from tests.support.joined import hosts_machine
from tests.support.machines import machine

COUNT = 300
SEED = 51
MACHINES: dict[str, Callable[[], MachineModel]] = {
    "cpu-2core": lambda: load_preset("cpu-2core"),
    "siton": lambda: load_preset("siton"),
    "hgx-h100": lambda: load_preset("hgx-h100"),
    "slow-rows": lambda: machine(mapped_row=100e-6),
    "two-hosts": lambda: hosts_machine(2),
}
"""Presets, and two made by hand on which ranks gain by sharing batches and the topology."""
ON_GPUS = ("siton", "hgx-h100")
FILLING = ("lru", "clock")
"""Policies whose rows change while a run goes on."""
RANKS = (1, 2)
HOSTS_RANKS = (2, 4)
MODES = ("full-graph", "cooperative", "grid")
"""Besides mini-batches: the whole graph; or of what joins ranks the fastest, which may not be the
fastest of all: batches that they sample together, and the topology in parts."""
ROOMS = ("ample", "tight", "tight", "disk")
"""Memory of a rank for copies of rows: for all of them, for some, or for some and the others on the
disk, without the host's mapping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A generated graph and what is trained on it."""

    make: Callable[[Path], Graph]
    workload: dict[str, Any] = field(default_factory=dict[str, Any])
    """What differs from the cases' workload."""
    expansion: str = "first_seen"
    timed_whole: bool = False
    """The kept profile holds every measurement that a profile may hold; else the least."""


GRAPHS = {
    "rmat": Dataset(
        make=lambda f: generate_rmat(
            f, num_nodes=700, degree=12.0, feature_dim=256, train_fraction=0.5, seed=1
        ),
        timed_whole=True,
    ),
    "rmat-dense": Dataset(
        make=lambda f: generate_rmat(
            f, num_nodes=500, degree=40.0, feature_dim=8, train_fraction=0.3, seed=2
        ),
        workload={"model": "gcn", "hidden": 16},
    ),
    "sbm": Dataset(
        make=lambda f: generate_sbm(
            f, num_nodes=800, degree=10.0, feature_dim=64, train_fraction=0.4, seed=3
        ),
        workload={"model": "gat", "heads": 2, "dropout": 0.5},
        timed_whole=True,
    ),
    "sbm-wide": Dataset(
        make=lambda f: generate_sbm(
            f, num_nodes=400, degree=15.0, feature_dim=512, train_fraction=0.6, seed=4
        ),
        workload={"fanouts": [4, 3, 2], "num_layers": 3, "batch_size": 48},
        expansion="every_hop",
    ),
    "sbm-two": Dataset(
        make=lambda f: generate_sbm(
            f, num_nodes=900, degree=5.0, feature_dim=128, num_classes=2, train_fraction=0.1, seed=5
        ),
        workload={"batch_size": 64, "precision": "bfloat16"},
        timed_whole=True,
    ),
    "bare": Dataset(
        make=lambda f: generate_rmat_topology(
            f, num_nodes=600, degree=15.0, feature_dim=100, train_fraction=0.5
        )
    ),
    "links": Dataset(
        make=lambda f: generate_links(f, num_nodes=500, degree=12.0, feature_dim=96, seed=6),
        workload={"batch_size": 64},
    ),
    "typed": Dataset(
        make=lambda f: generate_typed(
            f, num_papers=400, num_authors=200, train_fraction=0.5, seed=7
        ),
        workload={"model": "rgcn"},
        timed_whole=True,
    ),
}
SAMPLERS: dict[str, dict[str, float | str]] = {
    **{name: {} for name in SPECS},
    "neighbor-again": {"draws": "replacement"},
    "labor-1": {"variant": 1, "estimator": "horvitz-thompson"},
}
"""By the name of the case: what differs from the sampler's defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One plan."""

    graph: str
    machine: str
    ranks: int
    sampler: str = "neighbor"
    policy: str = "auto"
    mode: str = "minibatch"
    """Or one of MODES."""
    room: str = "ample"

    @property
    def name(self) -> str:
        """All of it, as it stands in the record."""
        what = self.mode if self.mode in MODES else self.sampler
        return f"{self.graph} {self.machine} {self.ranks} {what} {self.policy} {self.room}"

    @staticmethod
    def named(name: str) -> "Case":
        """The case of that name."""
        graph, machine, ranks, what, policy, room = name.split()
        asked = {"mode": what} if what in MODES else {"sampler": what}
        return Case(
            graph=graph, machine=machine, ranks=int(ranks), policy=policy, room=room, **asked
        )

    @property
    def profile(self) -> str:
        """What its profile depends on."""
        what = self.mode if self.mode == "full-graph" else self.sampler
        return f"{self.graph} {self.machine} {self.ranks} {what}"

    def settings(self, room_bytes: int | None = None) -> PlanSettings:
        """The request.

        Args:
            room_bytes: of a rank's memory, where the room is not ample.
        """
        dataset = GRAPHS[self.graph]
        usual: dict[str, Any] = {
            "model": "sage", "fanouts": [6, 4], "num_layers": 2, "hidden": 32, "batch_size": 32,
            "allow": "approximate",
        }  # fmt: skip
        settings = PlanSettings(
            workload=Workload(**{**usual, **dataset.workload}),
            devices=self.ranks,
            policy=self.policy,
            device_memory_bytes=None if self.room == "ample" else room_bytes,
            shared_host=self.room != "disk",
        )
        if self.mode == "full-graph":
            return replace(settings, mode="full-graph")
        if self.sampler == "auto":
            return replace(settings, sampler="auto")
        name = self.sampler.split("-")[0]
        expansion: Any = "every_hop" if is_layerwise(name) else dataset.expansion
        return replace(
            settings, sampler=name, sampler_parameters=SAMPLERS[self.sampler], dialect=expansion
        )


def drawn(count: int = COUNT, seed: int = SEED) -> list[Case]:
    """So many cases, drawn by seed; the first of them hold every sampler, policy and mode."""
    asked: list[dict[str, str]] = [{"sampler": "auto"}, {"mode": "full-graph"}]
    asked += [{"sampler": name} for name in SAMPLERS]
    asked += [{"policy": name} for name in POLICIES if name != "auto"]
    rng = random.Random(seed)
    cases = [
        Case(graph=graph, machine=name, ranks=ranks, room=_room(each, graph, rng), **each)
        for each in asked
        for graph, name, place in itertools.product(GRAPHS, MACHINES, range(len(RANKS)))
        for ranks in [(HOSTS_RANKS if name == "two-hosts" else RANKS)[place]]
        if _is_planned(each, graph, name)
    ]
    kinds = itertools.groupby(cases, lambda case: (case.sampler, case.policy, case.mode))
    first = [case for _, same in kinds for case in rng.sample(list(same), 3)]
    rest = [case for case in cases if case not in first]
    return [*first, *rng.sample(rest, max(0, count - len(first)))][:count]


def joined() -> list[Case]:
    """Cases of ranks that share batches or the topology, beside those that are drawn."""
    graphs, places = ("rmat", "rmat-dense", "sbm", "sbm-wide", "bare"), (("two-hosts", 4),)
    shared = (("cpu-2core", 2), ("slow-rows", 2), ("two-hosts", 2), *places)
    return [
        Case(graph=graph, machine=name, ranks=ranks, mode=mode, policy="none")
        for mode, machines in (("cooperative", shared), ("grid", places))
        for graph in graphs
        for name, ranks in machines
    ]


def _room(asked: dict[str, str], graph: str, rng: random.Random) -> str:
    found = rng.choice(ROOMS)
    if "mode" in asked or asked.get("policy") in FILLING:
        return "ample"
    if found == "disk" and (graph in ("bare", "links", "typed") or asked.get("policy") == "naive"):
        return "tight"
    return found


def _is_planned(asked: dict[str, str], graph: str, machine: str) -> bool:
    """Whether the planner can do what is asked: refusals have tests of their own."""
    sampler, policy = asked.get("sampler", "neighbor"), asked.get("policy", "auto")
    if "mode" in asked:
        return machine == "cpu-2core" and graph not in ("links", "typed", "sbm-two")
    if policy in FILLING and machine in ON_GPUS:
        return False
    if graph == "sbm":  # attention, which wants draws without weights
        return sampler in ("auto", "full", "neighbor", "neighbor-again")
    if graph == "links":
        return sampler in ("auto", "neighbor")
    if graph == "typed":  # features by node type, which stay on the host
        plain = policy in ("auto", "none") and sampler in ("auto", "neighbor")
        return plain and machine not in ON_GPUS
    return True
