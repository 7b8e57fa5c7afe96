"""Slower ways of doing what a plan says: taken with one warning, never silently.

Where a GPU lacks what its fast path wants (Triton's kernels, page-locked memory), the same plan
runs by the host's gather and samplers. Batches and losses are the same.
"""

import importlib.util
import threading
import warnings

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan

_said: set[str] = set()
_lock = threading.Lock()


class SlowerPathWarning(RuntimeWarning):
    """The plan runs on a slower path than it was made for; the text says why and what to do."""


def warn_once(key: str, text: str) -> None:
    """Warn for the first time that `key` comes in this process.

    Args:
        key: what the warning is about.
        text: what happens instead, why, and what to do.
    """
    with _lock:
        if key in _said:
            return
        _said.add(key)
    warnings.warn(text, SlowerPathWarning, stacklevel=3)


def forget_warnings() -> None:
    """Let every warning come again; for tests."""
    with _lock:
        _said.clear()


def has_triton() -> bool:
    """Whether the kernels' compiler is installed."""
    return importlib.util.find_spec("triton") is not None


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
