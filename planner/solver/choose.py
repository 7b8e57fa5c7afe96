"""Ranking priced candidates: the winner, why the others lost, the bound, what more would buy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.cost.memory import require_fit, sum_text
from planner.errors import PlanDoesNotFit
from planner.machine import MachineModel, Table
from planner.solver.placing import Placed
from runtime.plan import Alternative, Certificate, Prediction

GIB = 2**30
MOST_ALTERNATIVES = 12
FASTER = 1.1
"""A link's bandwidth times this, for its shadow price."""
LINK_TABLES = {
    "memory": ("gather", "mapped_gather"),
    "disk": ("disk_read",),
    "exchange": ("all_reduce", "all_reduce_stepped", "all_to_all", "all_to_all_stepped"),
}
"""Tables of seconds that a faster link would shorten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A candidate with its placement and its price."""

    candidate: Candidate
    placed: Placed
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Predicted seconds per step."""
        return self.prediction.step_seconds.value

    @property
    def overflow(self) -> str:
        """The memory sum that does not fit; empty where all fit."""
        for name, memory in self.prediction.memory_bytes.items():
            if memory.headroom < 0:
                return sum_text(name, memory)
        return ""

    @property
    def own_rows(self) -> int:
        """Copies of rows over all ranks."""
        return sum(r.own_rows for r in self.placed.rows.ranks)


def choose(priced: Sequence[Priced], noise: float) -> Priced:
    """The fastest that fits; copies of rows must win by more than the noise to be worth keeping.

    Args:
        priced: simplest candidates first, which wins ties.
        noise: relative difference below which two step times are the same.

    Raises:
        PlanDoesNotFit: none fits; the text is the sum of the one that needs least.
    """
    feasible = [p for p in priced if not p.overflow]
    if not feasible:
        nearest = max(
            priced, key=lambda p: min(m.headroom for m in p.prediction.memory_bytes.values())
        )
        for name, memory in nearest.prediction.memory_bytes.items():
            require_fit(name, memory)
        raise PlanDoesNotFit("no candidate was priced")
    best = min(feasible, key=lambda p: p.seconds)
    lean = [
        p
        for p in feasible
        if p.own_rows < best.own_rows and p.seconds <= best.seconds * (1.0 + noise)
    ]
    return min(lean, key=lambda p: (p.own_rows, p.seconds)) if lean else best


def alternatives(priced: Sequence[Priced], chosen: Priced) -> list[Alternative]:
    """The others, fastest first and those that do not fit last, each with why it lost."""
    others = [p for p in priced if p.candidate != chosen.candidate]
    others.sort(key=lambda p: (bool(p.overflow), p.seconds))
    kept, seen = list[Priced](), set[Candidate]()
    for p in others:
        shape = replace(p.candidate, policy="")
        # The same ranks and threads once, but every policy on the chosen ones.
        if shape not in seen or shape == replace(chosen.candidate, policy=""):
            kept.append(p)
        seen.add(shape)
    return [
        Alternative(
            name=p.candidate.name,
            step_seconds=None if p.overflow else p.seconds,
            why=why_it_lost(p, chosen),
        )
        for p in kept[:MOST_ALTERNATIVES]
    ]


def why_it_lost(other: Priced, chosen: Priced) -> str:
    """One sentence: the sum that overflows, the copies that do not pay, or the slower stage."""
    if other.overflow:
        return f"does not fit: {other.overflow}"
    ratio = other.seconds / chosen.seconds - 1 if chosen.seconds > 0 else 0.0
    if ratio <= 0 or (abs(ratio) < 1e-9):
        if other.own_rows > chosen.own_rows:
            copies = other.own_rows - chosen.own_rows
            return f"{-ratio:.1%} faster, which is within the noise, for {copies} copies of rows"
        return "as fast; the simpler one is kept"
    ours, theirs = chosen.prediction.stages, other.prediction.stages
    names = sorted(set(ours) | set(theirs))
    stage = max(names, key=lambda n: theirs.get(n, 0.0) - ours.get(n, 0.0))
    slower = (theirs.get(stage, 0.0) - ours.get(stage, 0.0)) * 1e3
    return f"{ratio:.1%} slower: {stage} takes {slower:.2f} ms more"


def certificate(chosen: Priced, lower_bound: float, complete: bool) -> Certificate:
    """How far the plan can be from the best, within the model.

    Args:
        chosen: the plan's candidate.
        lower_bound: step seconds if every row came from its cheapest place and no memory bound.
        complete: every candidate was priced with every policy.
    """
    objective = chosen.seconds
    bound = min(lower_bound, objective)
    gap = (objective - bound) / objective if objective > 0 else 0.0
    tried = "optimal" if gap < 1e-9 else "feasible"
    extent = "all candidates priced" if complete else "policies tried on the fastest candidates"
    return Certificate(
        objective=objective,
        lower_bound=bound,
        gap=gap,
        solver="enumeration with song-jiang placement",
        status=f"{tried}: {extent}",
    )


def faster(machine: MachineModel, tables: Sequence[str]) -> MachineModel:
    """The machine with some links 10% faster: their seconds shrink by that."""
    found: dict[str, Table] = {}
    for name in tables:
        if name in machine.tables:
            table = machine.tables[name]
            found[name] = replace(table, values=[v / FASTER for v in table.values])
    return machine.with_tables(found)


def shadow_prices(
    seconds: float, priced_with: Callable[[str], float | None], names: Sequence[str]
) -> dict[str, float]:
    """Seconds per step saved by each relaxation, by pricing again.

    Args:
        seconds: of the plan.
        priced_with: seconds under the named relaxation; None where it does not apply.
        names: of the relaxations.
    """
    saved: dict[str, float] = {}
    for name in names:
        again = priced_with(name)
        if again is not None:
            saved[name] = max(0.0, seconds - again)
    return saved
