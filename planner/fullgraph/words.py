"""What a full-graph plan says of itself: parts, p and why, memory of the fullest part."""

from planner.cost.memory import size_text
from runtime.plan import Plan

WORDS = ("keep", "partition")
"""Entries of a prediction's provenance that are sentences of their own."""


def summary(plan: Plan) -> str:
    """Ranks, partition, p and overlap in one line."""
    threads, settings = plan.strategy.threads, plan.strategy.full_graph
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    words = [f"the whole graph on {ranks}"]
    words.append(f"{threads.compute} compute thread{'s' if threads.compute > 1 else ''} each")
    if plan.num_ranks > 1:
        words.append(f"cut by {plan.strategy.partition}")
        words.append(f"boundary rows kept with p {settings.keep:.3g}")
        if settings.keep < 1:
            drawn = "for each layer" if settings.draws == "layer" else "once for all layers"
            words.append(f"drawn {drawn} ({settings.rounding})")
        words.append("exchanged beside compute" if threads.comm else "exchanged in line")
    if settings.precompute_first_layer:
        words.append("first layer aggregated once")
    return ", ".join(words)


def details(plan: Plan) -> list[str]:
    """Lines that only a full-graph plan has; none for mini-batches."""
    if plan.strategy.mode != "full-graph":
        return []
    said, memory = plan.prediction.provenance, plan.prediction.memory_bytes
    lines = [f"  {said[name]}" for name in WORDS if name in said]
    ranks = {name: use for name, use in memory.items() if name.startswith("rank")}
    totals = [use.total for use in ranks.values()]
    fullest = max(ranks, key=lambda name: ranks[name].total)
    mean = sum(totals) / len(totals)
    lines.append(
        f"  fullest: {fullest} with {size_text(max(totals))}, {max(totals) / mean:.2f} of the mean"
    )
    return lines
