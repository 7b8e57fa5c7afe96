"""Checks that a plan's graph and machine are at hand, and that it reads all weights.

A scheduler gives a job some of a machine's cores, memory and GPUs. The machine is then the plan's
all the same, and what the job has must be what the plan needs.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnnplan.runtime.device import (
    GIB,
    HOST_DIGITS,
    VARIABLE,
    bare_uuid,
    machine_facts,
    machine_fingerprint,
    other_gpus,
)
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.limits import host_bytes
from gnnplan.runtime.plan.schema import Device, Plan
from gnnplan.runtime.report import EMULATED_NOTE

FORCE_VARIABLE = "GNNPLAN_FORCE"
"""Set by `gnnplan launch --force`: the user's script trains although the graph changed."""
NO_WORDS = ("", "0", "false", "no", "off")
"""Values of the variable by which nothing is forced."""


def open_planned_graph(plan: Plan) -> Graph:
    """Open the dataset that a plan was made for; refuse another one unless it is forced."""
    graph = open_graph(Path(plan.graph.path))
    why = _other_graph(plan, graph.fingerprint)
    if why and os.environ.get(FORCE_VARIABLE, "").strip().lower() in NO_WORDS:
        raise PlanError(why)
    return graph


def check_identity(plan: Plan, *, force: bool = False) -> list[str]:
    """Compare the fingerprints in a plan with those of its dataset and of this machine.

    A mismatch (`find_mismatches`) raises PlanError or, with `force`, becomes a note; so do emulated
    ranks, an equal machine's GPUs, and a share of the machine that is enough.
    """
    notes = find_mismatches(plan)
    if notes and not force:
        raise PlanError(notes[0])
    facts, anywhere = machine_facts(), plan.strategy.emulated
    if others := other_gpus(plan, facts):
        notes.append(others)
    if not anywhere and _is_share(plan, facts):
        notes.append(
            f"{_size_text(facts['cores'], facts['ram_bytes'])} may be used here, less than the "
            "machine has that the plan was made for: its rates were measured on the whole of it"
        )
    return [*notes, EMULATED_NOTE] if anywhere else notes


def find_mismatches(plan: Plan) -> list[str]:
    """Say how dataset and machine differ from those that a plan was made for, or fall short.

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
    elif not plan.strategy.emulated and (short := missing_share(plan, facts)):
        found.append(short)
    return found


def _other_graph(plan: Plan, fingerprint: str) -> str:
    """Explain a fingerprint that is not the plan's; return an empty text for the plan's own."""
    if fingerprint == plan.graph.fingerprint:
        return ""
    return (
        f"{plan.graph.path}: expected the graph the plan was made for (fingerprint "
        f"{plan.graph.fingerprint[:12]}), found {fingerprint[:12]}; plan again or use --force"
    )


def is_planned_machine(plan: Plan, facts: Mapping[str, Any]) -> bool:
    """Tell whether facts are of the machine that a plan was made for, or of one of its hosts.

    Cores, memory and GPUs may be others in number: a job's share, or what the driver may open.
    """
    if _is_whole(plan, facts):
        return True
    hosts = {each[:HOST_DIGITS] for each in plan.machine.fingerprint.split("+")}
    sizes = [{"cores": each.cores, "ram_gib": each.memory_gib} for each in plan.machine.hosts]
    found = {machine_fingerprint({**facts, **size})[:HOST_DIGITS] for size in [{}, *sizes]}
    return bool(found & hosts) and _has_its_gpus(plan, facts)


def _is_whole(plan: Plan, facts: Mapping[str, Any]) -> bool:
    return machine_fingerprint({**facts}) in plan.machine.fingerprint.split("+")


def _is_share(plan: Plan, facts: Mapping[str, Any]) -> bool:
    return bool(plan.machine.hosts) and all(
        facts["cores"] < each.cores or facts["ram_gib"] < each.memory_gib
        for each in plan.machine.hosts
    )


def _has_its_gpus(plan: Plan, facts: Mapping[str, Any]) -> bool:
    """Return whether GPUs here are the plan's own, or all of their model, or are not needed."""
    if not any(device.needs_gpu for device in plan.strategy.devices):
        return True
    planned = {bare_uuid(uuid) for uuid in plan.gpu_uuids}
    shown = facts["gpus"]
    if planned & {bare_uuid(gpu["uuid"]) for gpu in shown}:
        return True
    models = {each.gpu for each in plan.machine.hosts}
    return bool(shown) and {gpu["name"] for gpu in shown} <= models


def missing_share(plan: Plan, facts: Mapping[str, Any]) -> str:
    """Say what the plan needs and a share of its machine lacks; empty where there is enough."""
    if _is_whole(plan, facts):
        return ""
    hosts: dict[int, list[Device]] = {}
    for device in plan.strategy.devices:
        hosts.setdefault(device.host, []).append(device)
    # Which host this one is, nobody knows yet.
    cores = min(cores_of(plan, len(here)) for here in hosts.values())
    num_bytes = min(host_bytes(plan, here) or 0 for here in hosts.values())
    if facts["cores"] >= cores and facts["ram_bytes"] >= num_bytes:
        return ""
    return (
        f"expected {_size_text(cores, num_bytes)} for the plan's ranks, found "
        f"{_size_text(facts['cores'], facts['ram_bytes'])}, which is what this job or container "
        "may use; give it more, plan again within it, or use --force"
    )


def cores_of(plan: Plan, ranks: int) -> int:
    """Return the cores that some ranks of a host need: their threads', at most the host's."""
    threads = plan.strategy.threads
    wanted = ranks * (threads.compute + threads.sample)
    return min([wanted, *(each.cores for each in plan.machine.hosts if each.cores)])


def _size_text(cores: int, num_bytes: int) -> str:
    return f"{cores} cores and {num_bytes / GIB:.2f} GiB"


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
