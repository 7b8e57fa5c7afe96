"""What a plan leaves aside of its dataset, said once: nothing is ignored without a word."""

from runtime.graph.dataset import Graph
from runtime.plan import Plan


def unused_weights(plan: Plan, graph: Graph) -> list[str]:
    """A line where the dataset has edge weights that neither sampler nor model reads.

    Args:
        plan: its mode and its sampler's parameter `weights`.
        graph: its dataset.
    """
    strategy = plan.strategy
    if graph.edge_weight is None or strategy.sampler.parameters.get("weights", "none") != "none":
        return []
    who = "full-graph training" if strategy.mode == "full-graph" else strategy.sampler.name
    return [
        f"{graph.name}: the edge weights are not used: {who} takes all edges alike; to draw by "
        "them plan again with --sampler NAME:weights=graph (see --allow)"
    ]
