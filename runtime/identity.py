"""Is this the graph, and is this the machine, that the plan was made for?"""

import os
from pathlib import Path

from gnnplan.runtime.device import VARIABLE, machine_fingerprint
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import EMULATED_NOTE

FORCE_VARIABLE = "GNNPLAN_FORCE"
"""Set by `gnnplan launch --force`: the user's script trains although the graph changed."""


def open_planned_graph(plan: Plan) -> Graph:
    """Open the dataset that a plan was made for.

    Raises:
        PlanError: another dataset is there, and nobody asked for it to be taken all the same.
        DatasetError: the dataset is gone or damaged.
    """
    graph = open_graph(Path(plan.graph.path))
    why = _other_graph(plan, graph.fingerprint)
    if why and not os.environ.get(FORCE_VARIABLE):
        raise PlanError(why)
    return graph


def check_identity(plan: Plan, *, force: bool = False) -> list[str]:
    """Compare the fingerprints in a plan with those of its dataset and of this machine.

    A machine of several hosts has one fingerprint for each, joined by "+"; any of them will do.

    Call before the process is pinned to cores: the cores it may use are part of the machine.

    Args:
        plan: the plan.
        force: go on with a note instead of raising.

    Returns:
        A note for each mismatch (only with `force`; else empty), and one where ranks are emulated.

    Raises:
        PlanError: the graph or the machine is another one.
        DatasetError: the dataset is gone or damaged.
    """
    notes: list[str] = []
    found_graph = open_graph(Path(plan.graph.path), validate=False).fingerprint
    if why := _other_graph(plan, found_graph):
        notes.append(why)
    found_machine = machine_fingerprint()
    anywhere = plan.strategy.emulated  # by any machine's cores
    if not anywhere and found_machine not in plan.machine.fingerprint.split("+"):
        notes.append(
            f"expected the machine the plan was made for ({plan.machine.name}, fingerprint "
            f"{plan.machine.fingerprint[:12]}), found {found_machine[:12]}{_visible()}; probe and "
            "plan again or use --force"
        )
    if notes and not force:
        raise PlanError(notes[0])
    return [*notes, EMULATED_NOTE] if anywhere else notes


def _other_graph(plan: Plan, fingerprint: str) -> str:
    """What is wrong with a dataset of that fingerprint; empty where it is the plan's."""
    if fingerprint == plan.graph.fingerprint:
        return ""
    return (
        f"{plan.graph.path}: expected the graph the plan was made for (fingerprint "
        f"{plan.graph.fingerprint[:12]}), found {fingerprint[:12]}; plan again or use --force"
    )


def _visible() -> str:
    text = os.environ.get(VARIABLE)
    return "" if text is None else f" (with the GPUs that {VARIABLE}={text} shows)"
