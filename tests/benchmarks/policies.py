"""Every placement policy on five graphs and five machines, by the one evaluator, against joint.

    python -m tests.benchmarks.policies --json [--graphs a,b]
        [--only table|disk|song-jiang|las|cliques]

The three largest graphs of the packs by nodes and two R-MAT graphs; GPUs of presets, none of them
measured here; every GPU has room for 5% of all feature rows and lists. Lines:

- `policies_<graph>_<preset>_<global|sharded>`, one per policy: modelled seconds of a step's reads
  (pipelined: the slowest link, formulas 6.2), bytes by place, hit rate per GPU with max/min, gap to
  the lower bound. `ratio` is joint's seconds over the policy's: 1 is as good. `verified`: budgets
  and reads checked, bytes counted again without the evaluator; for joint also that a second run
  gives the same bytes.
- `policies_<graph>_<preset>_<global|sharded>_disk`: the same where every GPU has room for 10% and
  the host for 31%, on machines of two cliques of four; the rest is read from one disk of 3 GB/s.
- `song_jiang_*`, `las_*`, `cliques_*`: see policies_shapes.py.

No line holds a time of this machine, so two runs print the same bytes.
"""

import argparse
import hashlib
import sys
import time
from typing import Any

import numpy as np

from gnnplan.planner.placement.costs import PLACES
from gnnplan.planner.placement.evaluate import PlacementScore, score
from gnnplan.planner.placement.placement import Placement, check_placement
from gnnplan.planner.placement.policies.joint import JointPlacement, place_joint
from gnnplan.planner.placement.policies.policy import Knowledge, Reason
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES
from gnnplan.planner.placement.problem import PlacementProblem
from tests.benchmarks import policies_cases as cases, policies_shapes as shapes
from tests.benchmarks.common import record
from tests.support.placements import place_named

GRAPHS = ("github-repos", "mesh-mdual", "wordnet-synsets", "rmat-18", "rmat-21")
PRESETS = ("dgx-v100", "siton", "dgx-a100", "iowa-v100-bridge-2+2", "iowa-v100-bridge-2x4")
SHARDED = ("dgx-v100", "siton")
"""Legion's machines of several cliques, where its cut gives each clique a law of its own."""
CACHE_SHARE = 0.05
SPILL_PRESETS, SPILL_CACHE, SPILL_HOST = ("dgx-v100",), 0.1, 0.31
"""Where rows spill to disk: machines, and the shares that each GPU and the host have room for."""
BAR_GAP = 0.01


def short(value: float) -> float:
    """Six digits."""
    return float(f"{value:.6g}")


def digest(found: JointPlacement) -> str:
    """Of every id a layout names and of its bound."""
    made = hashlib.sha256(repr((found.bound, found.score.seconds)).encode())
    for held in found.placement.items:
        for array in (*held.own, *(held.fallback_places or ())):
            made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def verified(instance: PlacementProblem, layout: Placement, scored: PlacementScore) -> bool:
    """Whether budgets hold, every read finds its item, and another count gives the same bytes."""
    check_placement(instance, layout)
    again = cases.recount(instance, layout)
    return bool(np.allclose(scored.bytes, again, rtol=1e-6, atol=1e-6 * again.sum()))


def hits(scored: PlacementScore) -> dict[str, Any]:
    """Share of the feature reads served by the clique's GPUs: mean, each, greatest over least."""
    rates = scored.hit_rates()
    least = float(rates.min())
    return {
        "hit": short(float(rates.mean())),
        "hit_by_gpu": [round(float(r), 4) for r in rates],
        "hit_max_over_min": short(float(rates.max()) / least) if least > 0 else None,
    }


def table(graph: str, preset: str, drawing: str, *, spill: bool = False) -> None:
    """One line per policy of one graph on one machine, with `spill` of short memories."""
    found, candidate = cases.found(graph), cases.all_gpus(preset)
    num = candidate.num_ranks
    if drawing == "global":
        rows, lists = (x[None] for x in cases.global_law(graph))
        laws = (0,) * num
    else:
        rows, lists = cases.clique_laws(graph, candidate.cliques)
        laws = tuple(next(c for c, q in enumerate(candidate.cliques) if g in q) for g in range(num))
    total = found.num_nodes * (cases.ROW_BYTES + 8) + 4 * len(found.indices)
    instance = cases.make_instance(
        preset, candidate, rows, laws, int((SPILL_CACHE if spill else CACHE_SHARE) * total),
        lists=(lists, found.in_degree), host_bytes=int(SPILL_HOST * total) if spill else None,
    )  # fmt: skip
    joint, again = place_joint(instance), place_joint(instance)
    name = f"policies_{graph}_{preset}_{drawing}" + "_disk" * spill
    line(
        name,
        joint.placement,
        instance,
        joint.score,
        joint,
        gap_met=bool(joint.gap <= BAR_GAP),
        bound=short(joint.bound),
        solver=joint.relaxed.solver,
        repeated=digest(joint) == digest(again),
    )
    everyone(name, instance, cases.knowledge(graph, num), joint)


def everyone(name: str, instance: PlacementProblem, know: Knowledge, joint: JointPlacement) -> None:
    """The named policies' lines."""
    for policy in (p.name for p in PLACEMENT_POLICIES if p.function and p.name != "joint"):
        layout = place_named(policy, instance, know)
        if isinstance(layout, Reason):
            record(name, None, "s", policy=policy, reason=layout.why)
        else:
            line(name, layout, instance, score(instance, layout), joint)


def line(
    name: str,
    layout: Placement,
    instance: PlacementProblem,
    scored: PlacementScore,
    joint: JointPlacement,
    **extra: Any,
) -> None:
    """One policy's line."""
    ours = joint.score.seconds
    record(
        name,
        short(scored.seconds),
        "s",
        baseline=short(ours),
        ratio=short(ours / scored.seconds),
        policy=layout.policy,
        gap=round((scored.seconds - joint.bound) / joint.bound, 5),
        binding=scored.binding,
        bytes={
            place: round(v)
            for place, v in zip(PLACES, scored.bytes.sum(axis=(0, 1)).tolist(), strict=True)
            if v > 0
        },
        **hits(scored),
        verified=verified(instance, layout, scored),
        **extra,
    )


def main() -> None:
    """Every graph that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--only", choices=["table", "disk", "song-jiang", "las", "cliques"])
    args = parser.parse_args()
    for graph in args.graphs.split(","):
        if cases.topology(graph) is None:
            print(f"{graph}: left out, no such pack here", file=sys.stderr)
            continue
        start = time.monotonic()
        if args.only in (None, "table"):
            for preset in PRESETS:
                for drawing in ("global", "sharded") if preset in SHARDED else ("global",):
                    table(graph, preset, drawing)
        if args.only in (None, "disk"):
            for preset in SPILL_PRESETS:
                for drawing in ("global", "sharded"):
                    table(graph, preset, drawing, spill=True)
        if args.only in (None, "song-jiang"):
            shapes.song_jiang(graph)
        if args.only in (None, "las"):
            shapes.las(graph)
        if args.only in (None, "cliques"):
            shapes.cliques(graph)
        print(f"{graph}: {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
