"""What a loader is given: the plan's folder, and words that the plan has already said."""

import os
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import PlanError

PLAN_VARIABLE = "GNNPLAN_PLAN"
"""Environment variable that names the plan's folder to a script under `gnnplan launch`."""
_FLAGS = {
    "num_neighbors": "--fanouts",
    "batch_size": "--batch-size",
    "replace": "--sampler",
    "neg_sampling": "--negatives",
    "neg_sampling_ratio": "--negatives",
}
_DECIDED = {
    *_FLAGS, "data", "input_nodes", "input_time", "subgraph_type", "disjoint", "temporal_strategy",
    "time_attr", "weight_attr", "transform", "transform_sampler_output", "is_sorted",
    "filter_per_worker", "neighbor_sampler", "directed", "edge_label_index", "edge_label",
    "edge_label_time", "dataset", "shuffle", "sampler", "batch_sampler", "num_workers",
    "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "prefetch_factor",
    "persistent_workers", "generator", "multiprocessing_context", "pin_memory_device", "in_order",
}  # fmt: skip
"""Keywords of NeighborLoader, LinkNeighborLoader and torch's DataLoader."""


def refuse_others(names: Iterable[str]) -> None:
    """Raise TypeError for keywords that PlannedLoader does not have.

    >>> refuse_others(["shuffle", "batch_size"])
    Traceback (most recent call last):
    TypeError: PlannedLoader: batch_size, shuffle: the plan decides that; leave it out, or plan \
again (gnnplan plan --batch-size)
    """
    names = sorted(names)
    unknown = [name for name in names if name not in _DECIDED]
    if unknown:
        raise TypeError(f"PlannedLoader() got an unexpected keyword argument {unknown[0]!r}")
    if names:
        flags = sorted({_FLAGS[name] for name in names if name in _FLAGS})
        which = f" (gnnplan plan {', '.join(flags)})" if flags else ""
        raise TypeError(
            f"PlannedLoader: {', '.join(names)}: the plan decides that; leave it out, or plan "
            f"again{which}"
        )


def plan_folder(plan: object) -> Path:
    """The folder that is named, or the one that `gnnplan launch` left in the environment.

    Raises:
        TypeError: something else than a folder's name.
        PlanError: neither is there.
    """
    named = os.environ.get(PLAN_VARIABLE, "") if plan is None else plan
    if not isinstance(named, str | os.PathLike):
        raise TypeError(
            f"PlannedLoader: expected a plan folder, found {type(plan).__name__}; import the graph "
            "(gnnplan graph import), plan it, and name the plan's folder"
        )
    if not named:
        raise PlanError(
            f"expected a plan folder, or ${PLAN_VARIABLE}, found neither; name the folder or start "
            "the script with gnnplan launch"
        )
    return Path(named)
