"""Checks that a plan's graph and machine are at hand, and that it reads all weights."""

import os
from pathlib import Path

from gnnplan.runtime.device import (
    VARIABLE,
    is_planned_machine,
    machine_facts,
    machine_fingerprint,
    other_gpus,
)
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import EMULATED_NOTE

FORCE_VARIABLE = "GNNPLAN_FORCE"
"""Set by `gnnplan launch --force`: the user's script trains although the graph changed."""


def open_planned_graph(plan: Plan) -> Graph:
    """Open the dataset that a plan was made for; refuse another one unless it is forced."""
    graph = open_graph(Path(plan.graph.path))
    why = _other_graph(plan, graph.fingerprint)
    if why and not os.environ.get(FORCE_VARIABLE):
        raise PlanError(why)
    return graph


def check_identity(plan: Plan, *, force: bool = False) -> list[str]:
    """Compare the fingerprints in a plan with those of its dataset and of this machine.

    A mismatch (`find_mismatches`) raises PlanError or, with `force`, becomes a note; so do emulated
    ranks, and an equal machine's GPUs.
    """
    notes = find_mismatches(plan)
    if notes and not force:
        raise PlanError(notes[0])
    if others := other_gpus(plan, machine_facts()):
        notes.append(others)
    return [*notes, EMULATED_NOTE] if plan.strategy.emulated else notes


def find_mismatches(plan: Plan) -> list[str]:
    """Say how dataset and machine differ from those that a plan was made for.

    A machine of several hosts has their fingerprints, joined by "+"; any of them will do. Call
    before the process is pinned to cores: its cores are part of the machine.
    """
    found: list[str] = []
    fingerprint = open_graph(Path(plan.graph.path), validate=False).fingerprint
    if why := _other_graph(plan, fingerprint):
        found.append(why)
    facts = machine_facts()
    if not plan.strategy.emulated and not is_planned_machine(plan, facts):  # any machine's cores do
        found.append(
            f"expected the machine the plan was made for ({plan.machine.name}, fingerprint "
            f"{plan.machine.fingerprint[:12]}), found {machine_fingerprint(facts)[:12]}{_visible()}"
            "; probe and plan again or use --force"
        )
    return found


def _other_graph(plan: Plan, fingerprint: str) -> str:
    """Explain a fingerprint that is not the plan's; return an empty text for the plan's own."""
    if fingerprint == plan.graph.fingerprint:
        return ""
    return (
        f"{plan.graph.path}: expected the graph the plan was made for (fingerprint "
        f"{plan.graph.fingerprint[:12]}), found {fingerprint[:12]}; plan again or use --force"
    )


def _visible() -> str:
    text = os.environ.get(VARIABLE)
    return "" if text is None else f" (with the GPUs that {VARIABLE}={text} shows)"


def unused_weights(plan: Plan, graph: Graph) -> list[str]:
    """Return a line where the dataset has edge weights that neither sampler nor model reads."""
    strategy = plan.strategy
    if graph.edge_weight is None or strategy.sampler.parameters.get("weights", "none") != "none":
        return []
    who = "full-graph training" if strategy.mode == "full-graph" else strategy.sampler.name
    return [
        f"{graph.name}: the edge weights are not used: {who} takes all edges alike; to draw by "
        "them plan again with --sampler NAME:weights=graph (see --allow)"
    ]
