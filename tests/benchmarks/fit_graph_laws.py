"""Fit the clustering of preset graphs to published counts, and print what it says of each.

    python -m tests.benchmarks.fit_graph_laws [NAME ...]

prints the lines `law:` of planner/graph_presets.yaml, and each fitted fact beside the law's. The
facts are in `FITTED`, by data set, with their sources; rows of the published numbers that they are
taken from are in `ROWS`, and are not to be scored. What few facts leave open stays near `PRIOR`.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
from scipy.optimize import minimize

from gnnplan.planner.graph_presets import graph_preset
from gnnplan.planner.profile.community_law import Clustering, CommunityLaw, community_law
from tests.benchmarks.published_remote import HALO, halo
from tests.reference.law_caches import counted, hit_rate, touched_share

SAMPLERS = {"NS": "neighbor", "LABOR-0": "labor"}
TEN, GNNLAB = (10, 10, 10), (15, 10, 5)
"""Fan-outs, next to the seeds first: GNNLab goes through its (5, 10, 15) from the end."""
ROWS = {
    "gnnlab-f4a-5-hit",
    "gnnlab-f4a-10-hit",
    "gnnlab-f4a-20-hit",
    "gnnlab-f10-degree-PA-hit",
    "gnnlab-f10-presample_1-PA-hit",
    "gnnlab-f10-optimal-PA-hit",
    "gnnlab-f10-degree-PR-hit",
    "gnnlab-f10-presample_1-PR-hit",
    "gnnlab-f10-optimal-PR-hit",
    "gnnlab-f10-degree-TW-hit",
    "gnnlab-f10-presample_1-TW-hit",
    "gnnlab-f10-optimal-TW-hit",
    "gnnlab-f10-degree-UK-hit",
    "gnnlab-f10-presample_1-UK-hit",
    "gnnlab-f10-optimal-UK-hit",
    "gnnlab-f12-UK-random-feature",
    "gb-disk-nodes-neighbour",
    "gb-disk-nodes-LABOR-0",
    "gb-disk-miss-SIEVE",
}
"""Ids of the published rows that were fitted, beside the table of LABOR (formulas 5.8)."""
LABOR_TABLE = {
    # V1, V2, V3 and E0, E1, E2 in thousands, of 1000 seeds (formulas 5.8)
    "reddit": {"NS": (10.1, 68.3, 167, 9.7, 100, 682), "LABOR-0": (6.8, 17.8, 36, 9.6, 67, 177)},
    "products": {
        "NS": (10.6, 95.4, 513, 9.9, 106, 944),
        "LABOR-0": (10.1, 62.4, 237, 9.9, 100, 615),
    },
    "yelp": {"NS": (6.3, 42.5, 188, 6.3, 55, 392), "LABOR-0": (6.2, 35.1, 138, 6.3, 54, 318)},
    "flickr": {"NS": (6.4, 32.8, 73, 6.7, 52, 244), "LABOR-0": (6.4, 29.1, 66, 6.7, 52, 219)},
}
PRIOR = Clustering(spread=1.0, inside=0.6, community=3000.0)
PRIOR_WIDTH = {"spread": 0.6, "inside": 1.5, "community": 2.0, "seed_lean": 0.7, "region": 1.5}
PRIOR_WIDTH |= {"seed_spread": 0.7, "stray": 1.5, "lists": 1.5, "named": 1.5, "rest_spread": 0.6}
"""Standard deviations of the free numbers: of logs, of log-odds for shares, and as they are."""
TOLERANCE = 0.05
"""Standard deviation of a fact, of its log, or of a hit rate."""
SHARES, PLAIN = {"inside", "region", "stray"}, {"seed_lean"}


@dataclass(frozen=True)
class Fact:
    """A published figure and the law's."""

    name: str
    value: float
    of: Callable[[CommunityLaw], float]
    share: bool = False

    def error(self, law: CommunityLaw) -> float:
        """In standard deviations."""
        found = self.of(law)
        if self.share:
            return (found - self.value) / TOLERANCE * 2
        return math.log(max(found, 1e-9) / self.value) / TOLERANCE


def labor_facts(name: str) -> list[Fact]:
    """Vertices and edges of all hops by both samplers."""
    found: list[Fact] = []
    for label, row in LABOR_TABLE[name].items():
        for at, value in enumerate(row):
            hop, edges = at % 3, at >= 3

            def of(law: CommunityLaw, hop: int = hop, edges: bool = edges, who: str = label):
                counts = counted(law, 1000, TEN, SAMPLERS[who])
                return (counts.edges[hop] if edges else counts.vertices[hop + 1]) / 1000

            found.append(Fact(f"{label} {'E' if edges else 'V'}{hop + (not edges)}", value, of))
    return found


def hit(policy: str, share: float, value: float, *, fanouts=GNNLAB, seeds=8000) -> Fact:
    """A hit rate of GNNLab's figures 4a and 10."""
    return Fact(
        f"hit of {policy} {share:.1%}",
        value,
        lambda law: hit_rate(law, seeds, fanouts, "neighbor", policy=policy, share=share),  # pyright: ignore
        share=True,
    )


def inputs(sampler: str, value: float, *, seeds: int = 1024, fanouts=TEN) -> Fact:
    """Input vertices of a batch."""
    return Fact(
        f"inputs by {sampler}",
        value,
        lambda law: counted(law, seeds, fanouts, sampler).vertices[-1],
    )


FITTED = {name: labor_facts(name) for name in LABOR_TABLE}
FITTED["products"] += [
    # GNNLab, exp/fig10: 10% of the rows
    hit("degree", 0.1, 0.1912),
    hit("presample", 0.1, 0.2037),
    hit("optimal", 0.1, 0.20669),
    # SALIENT++'s artefact, the column halo-1hop of its README
    Fact("halo", HALO[0], lambda law: halo(law, 1024, GNNLAB, 4)[0]),
    Fact("reads outside the halo", HALO[1], lambda law: halo(law, 1024, GNNLAB, 4)[1], share=True),
]
FITTED["papers100m"] = [
    # GNNLab, exp/fig4a, fig5a, fig10; a batch's features are 290.97 MB of 512-byte rows (fig5a)
    inputs("neighbor", 290.97e6 / 512, seeds=8000, fanouts=GNNLAB),
    hit("degree", 0.05, 0.2892),
    hit("degree", 0.1, 0.4957),
    hit("degree", 0.2, 0.7512),
    hit("presample", 0.1, 0.9829),
    hit("optimal", 0.05, 0.97166),
    hit("optimal", 0.1, 1.0),
]
FITTED["papers100m-both"] = [
    # GraphBolt, examples/graphbolt/disk_based_feature: inputs, and 10 GB of rows by SIEVE; what
    # its first epoch of dmlc/dgl PR 7541 brings from disk into 40M slots (.0601 of .74 of the rows)
    Fact(
        "touched",
        0.0601 * 0.74 * 1178 * 664303 / 111059956,
        lambda law: touched_share(law, 1024, TEN, "neighbor"),
        share=True,
    ),
    inputs("neighbor", 674194),
    inputs("labor", 479331),
    hit("optimal", 10e9 / 512 / 111059956, 1 - 0.0408, fanouts=TEN, seeds=1024),
]
FITTED["twitter"] = [
    # GNNLab, exp/fig10: 10% of the rows
    hit("degree", 0.1, 0.7272),
    hit("presample", 0.1, 0.7487),
    hit("optimal", 0.1, 0.79827),
]
COPY_RATE = 290.97e6 / 0.0411
"""Bytes per second of GNNLab's copies without a cache (fig4a, fig5a)."""
FITTED["uk-2006-05"] = [
    # The same, and a batch's rows as the copies of fig12 imply: 7.6358 s in 125 batches of
    # 1024-byte rows, of which a random cache lacks .8622
    inputs("neighbor", 7.6358 / 125 * COPY_RATE / 1024 / 0.8622, seeds=8000, fanouts=GNNLAB),
    hit("degree", 0.1, 0.2801),
    hit("presample", 0.1, 0.6129),
    hit("optimal", 0.1, 0.6523),
]
START = {
    "reddit": (PRIOR, ("spread", "inside", "community", "seed_lean")),
    "products": (
        replace(PRIOR, spread=1.4, inside=0.9, seed_spread=0.5),
        ("spread", "inside", "community", "seed_lean", "seed_spread"),
    ),
    "yelp": (PRIOR, ("spread", "inside", "community", "seed_lean")),
    "flickr": (PRIOR, ("spread", "inside", "community", "seed_lean")),
    "papers100m": (
        replace(
            PRIOR,
            both_ways=False,
            region=0.07,
            lists=0.5,
            named=1.5,
            spread=0.7,
            rest_spread=1.2,
            stray=0.02,
        ),
        ("spread", "region", "lists", "named", "rest_spread", "stray"),
    ),
    "twitter": (
        replace(PRIOR, both_ways=False, seed_spread=0.5),
        ("spread", "inside", "community", "seed_spread"),
    ),
    "uk-2006-05": (
        replace(
            PRIOR,
            both_ways=False,
            spread=1.8,
            inside=0.95,
            community=300.0,
            region=0.5,
            seed_spread=0.5,
        ),
        ("spread", "inside", "community", "region", "seed_spread"),
    ),
    "papers100m-both": (
        replace(PRIOR, region=0.3, seed_spread=0.5),
        ("spread", "inside", "community", "region", "seed_spread"),
    ),
}


def encode(facts: Clustering, names: tuple[str, ...]) -> list[float]:
    """Free numbers of a clustering."""
    found: list[float] = []
    for name in names:
        value = getattr(facts, name)
        if name in SHARES:
            found.append(math.log(value / (1 - value)))
        else:
            found.append(value if name in PLAIN else math.log(value))
    return found


def decode(numbers: list[float], start: Clustering, names: tuple[str, ...]) -> Clustering:
    """The clustering of free numbers."""
    values: dict[str, float] = {}
    for name, number in zip(names, numbers, strict=True):
        if name in SHARES:
            values[name] = 1 / (1 + math.exp(-number))
        else:
            values[name] = number if name in PLAIN else math.exp(min(number, 20.0))
    return replace(start, **values)


def fit(name: str) -> Clustering:
    """The clustering that explains a data set's facts best."""
    start, names = START[name]
    like, facts = graph_preset(name), FITTED[name]
    prior = np.array(encode(start, names))
    width = np.array([PRIOR_WIDTH[each] for each in names])

    def loss(numbers: list[float]) -> float:
        law = community_law(like.nodes, like.edges, like.train_share, decode(numbers, start, names))
        errors = [fact.error(law) for fact in facts]
        return sum(e * e for e in errors) + float((((numbers - prior) / width) ** 2).sum())

    options = {"xatol": 0.01, "fatol": 0.05, "maxfev": 400, "initial_simplex": None}
    simplex = np.vstack([prior, *(prior + np.diag(width / 2))])
    best = minimize(
        loss, prior, method="Nelder-Mead", options=options | {"initial_simplex": simplex}
    )
    return decode(list(best.x), start, names)


def show(name: str, clustering: Clustering) -> None:
    """Print a preset's line and its facts."""
    like = graph_preset(name)
    law = community_law(like.nodes, like.edges, like.train_share, clustering)
    always = ("spread", "inside", "community")
    kept = {k for k, v in asdict(clustering).items() if v != getattr(PRIOR, k) or k in always}
    plain = ", ".join(
        f"{k}: {str(v).lower() if isinstance(v, bool) else f'{v:.3g}'}"
        for k, v in asdict(clustering).items()
        if v is not None and k in kept
    )
    print(f"{name}: law: {{{plain}}}")
    for fact in FITTED[name]:
        found = fact.of(law)
        print(f"    {fact.name:24} {found:12.4g} of {fact.value:12.4g}  {found / fact.value:.2f}")


def main() -> None:
    """Fit the named data sets, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(START))
    parser.add_argument("--as-is", action="store_true", help="show the presets, fit nothing")
    given = parser.parse_args()
    for name in given.names:
        show(name, graph_preset(name).law if given.as_is else fit(name))


if __name__ == "__main__":
    main()
