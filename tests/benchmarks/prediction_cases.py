"""The configurations of the benchmark `prediction`: graphs, tiers, budgets, ranks, samplers.

A configuration is one planning request; its candidates are measured beside each other. Those of
role `calibrate` teach the stages' factors and are not reported; none of their graphs is a reported
one. Tiers:

ram      every row in the host's memory; candidates differ in ranks and threads
samplers as ram, one rank, candidates differ in samplers too
disk     no shared host mapping: a device budget for own rows, the rest from other ranks and disk
link     as disk, two ranks on two hosts joined by 1 Gbit/s
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_rmat, generate_sbm
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.plan.schema import Workload

Tier = Literal["ram", "samplers", "disk", "link"]
RATE_BITS_PER_SECOND = 1e9
FEATURES = {
    "amazon-computers": "dense",
    "coauthor-physics": "project:512",
    "github-social": "project:256",
    "facebook-pages": "project:512",
    "wordnet-synsets": "project:128",
    "flickr-attr": "project:1024",
    "dblp-citation": "project:512",
}
"""Reported packs, and how their features are imported."""
GENERATED = {"rmat-17": 256, "rmat-15": 512, "rmat-16": 128, "sbm-16": 256}
"""Generated graphs: 2^S nodes by name, feature columns."""
SAMPLERS: tuple[tuple[str, dict[str, float | str]], ...] = (
    ("neighbor", {}),
    ("labor", {}),
    ("ladies", {"sizes": "1024,2048"}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration."""

    role: Literal["calibrate", "report"]
    graph: str
    tier: Tier
    ranks: tuple[int, ...] = (1,)
    share: float = 1.0
    """Of all rows that each rank has room for (tiers disk and link)."""
    batch_size: int = 512
    hidden: int = 128
    fanouts: tuple[int, ...] = (10, 5)

    @property
    def name(self) -> str:
        """What a reader sees."""
        ranks = "-".join(map(str, self.ranks))
        budget = "" if self.share == 1.0 else f" {self.share:g}"
        return f"{self.graph} {self.tier}{budget} x{ranks}"

    def settings(self, *, budget_bytes: int | None = None) -> list[PlanSettings]:
        """One planning request per number of ranks and sampler."""
        in_memory = self.tier in ("ram", "samplers")
        samplers = SAMPLERS if self.tier == "samplers" else SAMPLERS[:1]
        work = Workload(
            num_layers=len(self.fanouts),
            hidden=self.hidden,
            fanouts=list(self.fanouts),
            batch_size=self.batch_size,
            allow="approximate" if len(samplers) > 1 else "exact",
        )
        return [
            PlanSettings(
                workload=work,
                devices=ranks,
                device_memory_bytes=budget_bytes,
                sampler=name,
                sampler_parameters=dict(parameters),
                # A layer is drawn for all vertices so far.
                dialect="every_hop" if name == "ladies" else "first_seen",
                # In memory nothing is gained by copies: placements would only take time to try.
                policy="none" if in_memory else "auto",
                shared_host=in_memory,
            )
            for ranks in self.ranks
            for name, parameters in samplers
        ]


def _cases() -> list[Case]:
    found: list[Case] = []

    def add(
        role: Literal["calibrate", "report"],
        tier: Tier,
        graphs: str,
        *,
        ranks: tuple[int, ...] = (1,),
        share: float = 1.0,
    ) -> None:
        for name in graphs.split():
            found.append(Case(role=role, graph=name, tier=tier, ranks=ranks, share=share))

    add("calibrate", "ram", "rmat-15 rmat-16 sbm-16", ranks=(1, 2))
    add("calibrate", "samplers", "rmat-15 sbm-16")
    add("calibrate", "disk", "rmat-15 sbm-16", share=0.3)
    add("calibrate", "disk", "rmat-16", ranks=(2,), share=0.3)
    add("calibrate", "link", "rmat-15 sbm-16", ranks=(2,), share=0.5)
    packs = "amazon-computers coauthor-physics github-social facebook-pages"
    add("report", "ram", f"{packs} wordnet-synsets rmat-17", ranks=(1, 2))
    add("report", "samplers", f"{packs} wordnet-synsets rmat-17")
    add("report", "disk", f"{packs} flickr-attr dblp-citation wordnet-synsets rmat-17", share=0.3)
    add("report", "disk", f"{packs} rmat-17", ranks=(2,), share=0.3)
    add("report", "link", f"{packs} wordnet-synsets rmat-17", ranks=(2,), share=0.6)
    add("report", "link", packs, ranks=(2,), share=0.3)
    return found


CASES = _cases()
"""In the order in which they must run: those that calibrate come first."""


def open_case_graph(name: str, folder: Path, data: Path) -> Graph:
    """The named graph, imported or generated once under `folder`."""
    place = folder / name
    if (place / "graph.json").exists():
        return open_graph(place)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"making {name} in {place}", file=sys.stderr)
    if name in FEATURES:
        options = ImportOptions(features=FEATURES[name])
        return import_graph(data / f"{name}.npz", place, options=options)
    kind, _, scale = name.partition("-")
    make = generate_rmat if kind == "rmat" else generate_sbm
    return make(
        place,
        num_nodes=1 << int(scale),
        degree=20.0,
        feature_dim=GENERATED[name],
        num_classes=16,
        seed=0,
    )


def default_data() -> Path:
    """$GNNPLAN_TEST_DATA, or shared/data beside the checkout."""
    named = os.environ.get("GNNPLAN_TEST_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
