"""Eight shapes of machines as networks of links, and random placement problems on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import Goal, ReadNetwork, RowCosts
from gnnplan.planner.placement.evaluate import PlacementScore, RowReads, evaluate_rows, score
from gnnplan.planner.placement.placement import Placement
from gnnplan.planner.placement.policies.joint import JOINT, JointPlacement, place_joint
from gnnplan.planner.placement.policies.policy import Knowledge, Reason, place, place_by
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES, find_policy
from gnnplan.planner.placement.problem import Heat, ItemKind, PlacementProblem, rows_problem
from tests.support.gpu_networks import network_of_paths

GB = 1e9
SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], float, float, int]] = {
    # cliques; peer and PCIe bytes per second; devices behind one PCIe switch
    "one GPU": (((0,),), 0.0, 12 * GB, 1),
    "PCIe only, 4": (((0,), (1,), (2,), (3,)), 0.0, 12 * GB, 2),
    "bridged 2+2": (((0, 1), (2, 3)), 40 * GB, 12 * GB, 2),
    "hybrid cube mesh, 2 x 4": (((0, 1, 2, 3), (4, 5, 6, 7)), 60 * GB, 12 * GB, 2),
    "4 x 2": (((0, 1), (2, 3), (4, 5), (6, 7)), 200 * GB, 24 * GB, 2),
    "NVSwitch 8": ((tuple(range(8)),), 250 * GB, 24 * GB, 4),
    "unequal 3+1": (((0, 1, 2), (3,)), 50 * GB, 12 * GB, 4),
    "slow peers, 2": (((0, 1),), 5 * GB, 12 * GB, 1),
}


def shape_network(
    name: str, *, num_kinds: int = 2, across: bool = False, disk: bool = True
) -> ReadNetwork:
    """The network of a shape: HBM, NVLink ports, PCIe slots and switches, DRAM, NVMe."""
    cliques, peer, pcie, per_switch = SHAPES[name]
    num = sum(map(len, cliques))
    seconds = {"dram": 1 / (80 * GB), "nvme": 1 / (3 * GB)}
    paths: list[Sequence[Sequence[str] | None]] = []
    for g in range(num):
        size = next(len(c) for c in cliques if g in c)
        switch = f"switch{g // per_switch}"
        seconds[f"hbm{g}"] = 1 / (1500 * GB)
        seconds[f"pcie{g}"] = 1 / pcie
        seconds[switch] = 1 / (1.2 * pcie)
        nvlink: list[str] | None = None
        if size > 1:
            seconds[f"nvlink{g}"] = 1 / peer
            nvlink = [f"nvlink{g}"]
        to_host = [f"pcie{g}", switch]
        paths.append(
            [
                [f"hbm{g}"],
                nvlink,
                to_host if across and len(cliques) > 1 else None,
                [*to_host, "dram"],
                [*to_host, "nvme"] if disk else None,
            ]
        )
    return network_of_paths(paths, seconds, num_kinds=num_kinds)


def random_problem(
    rng: np.random.Generator,
    name: str,
    *,
    num_nodes: int = 150,
    laws: str = "shared",
    topology: bool = True,
    host: bool = False,
    across: bool = False,
) -> tuple[PlacementProblem, Knowledge]:
    """Pareto hotness and degrees; memory for a tenth to a half of all items.

    Args:
        rng: of everything random.
        name: shape.
        num_nodes: N.
        laws: shared | clique | device: who draws from laws of their own.
        topology: whether lists are placed too.
        host: whether host memory is short and the rest on disk.
        across: whether cliques can read each other.
    """
    cliques = SHAPES[name][0]
    num = sum(map(len, cliques))
    clique_of = {g: c for c, clique in enumerate(cliques) for g in clique}
    law = {
        "shared": (0,) * num,
        "clique": tuple(clique_of[g] for g in range(num)),
        "device": tuple(range(num)),
    }[laws]
    degree = np.minimum(1 + (rng.pareto(1.2, num_nodes) * 4).astype(np.int64), 5000)
    base = rng.pareto(rng.uniform(0.8, 2.0), num_nodes) + 0.01
    shift = np.exp(rng.normal(0, 1.0, (max(law) + 1, num_nodes)))
    heat = np.clip(base * shift / np.quantile(base, 0.98), 0, 1)
    rows = int(rng.choice([64, 256, 512]))
    kinds = [ItemKind(name="features", heat=heat, laws=law, size=rows, read_bytes=float(rows))]
    if topology:
        draws = heat * np.minimum(degree, 10) * rng.uniform(0.5, 1.5, heat.shape)
        size = 8 + 4 * degree
        kinds.append(ItemKind(name="topology", heat=draws, laws=law, size=size, read_bytes=64.0))
    total = sum(kind.total_bytes() for kind in kinds)
    problem = PlacementProblem(
        kinds=tuple(kinds),
        cliques=cliques,
        device_bytes=(int(total * rng.uniform(0.03, 0.4)),) * num,
        host_bytes=int(total * rng.uniform(0.3, 0.9)) if host else None,
        network=shape_network(name, num_kinds=len(kinds), across=across),
    )
    parts = (np.argsort(rng.random(num_nodes)) % num).astype(np.int32)
    know = Knowledge(
        out_degree=rng.poisson(5, num_nodes) + (base * 10).astype(np.int64),
        in_degree=degree,
        parts=lambda _: parts,
    )
    return problem, know


def placed_by(
    policy: str,
    hotness: Heat,
    costs: RowCosts | ReadNetwork,
    capacity_rows: Sequence[int],
    *,
    cliques: Sequence[Sequence[int]] | None = None,
    host_rows: int | None = None,
    out_degree: NDArray[np.int64] | None = None,
    parts: NDArray[np.int32] | None = None,
    seed: int = 0,
) -> tuple[Placement, RowReads]:
    """Place feature rows by a named policy, and evaluate what it leaves to read."""
    problem = rows_problem(hotness, costs, capacity_rows, cliques, host_rows)
    know = Knowledge(
        out_degree=out_degree, parts=None if parts is None else lambda _: parts, seed=seed
    )
    placement = place(policy, problem, know)
    return placement, evaluate_rows(problem, placement)


def place_named(name: str, problem: PlacementProblem, know: Knowledge) -> Placement | Reason:
    """Place a problem by a named policy, or say why it has no placement here."""
    return place_by(find_policy(name), problem, know)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Compared:
    """All policies on one problem, by the one evaluator."""

    scores: dict[str, PlacementScore]
    reasons: dict[str, str]
    """Why a policy has no placement."""
    joint: JointPlacement
    """The programme's own placement, before it is held against the others."""
    best: Placement


def compare_policies(
    problem: PlacementProblem,
    know: Knowledge,
    goal: Goal = "pipelined",
    *,
    names: Sequence[str] = (),
) -> Compared:
    """Score every named policy, or all, and joint."""
    joint = place_joint(problem, goal)
    scores, reasons = {JOINT: joint.score}, dict[str, str]()
    best = joint.placement
    every = [p.name for p in PLACEMENT_POLICIES if p.function and p.name != JOINT]
    for name in names or every:
        found = place_named(name, problem, know)
        if isinstance(found, Reason):
            reasons[name] = found.why
            continue
        scores[name] = score(problem, found, goal)
        if scores[name].seconds < scores[JOINT].seconds:
            best = replace(found, policy=JOINT, variant=f"{found.policy}: {found.variant}")
            scores[JOINT] = scores[name]
    return Compared(scores=scores, reasons=reasons, joint=joint, best=best)
