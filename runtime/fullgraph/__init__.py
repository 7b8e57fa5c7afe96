"""Full-graph training over a partition: inner nodes, boundary nodes, and exchanged rows.

  part -> epoch's draws -> blocks -> exchange -> aggregate -> model

A rank holds the nodes of its part and aggregates over all their in-neighbours. Those of other parts
arrive once per layer: the sampled halo (`Boundary`), or slice by slice (`Slices`).
"""

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.plan.schema import FullGraph

MODELS = ("sage", "gcn", "gat")


def check_settings(settings: FullGraph, model: str, task: str) -> None:
    """Raise PlanError where the plan's settings cannot be trained with this model and task."""
    where = "full-graph training"
    if model not in MODELS:
        raise PlanError(f"{where}: expected model {', '.join(MODELS)}, found {model!r}")
    if task == "link":
        raise PlanError(f"{where}: expected a node task, found link; plan mini-batches instead")
    if not 0 <= settings.keep <= 1:
        raise PlanError(f"{where}: expected keep in [0, 1], found {settings.keep}; plan again")
    if settings.exchange == "broadcast" and (settings.keep < 1 or model == "gat"):
        raise PlanError(
            f"{where}: broadcast sends whole slices for sage and gcn, expected keep 1, found model "
            f"{model} with keep {settings.keep}; use exchange boundary"
        )
    if settings.drop == "edges" and settings.keep < 1 and settings.precompute_first_layer:
        raise PlanError(
            f"{where}: a first layer that is computed once cannot drop edges anew each epoch; "
            "use drop boundary-edges or nodes, or leave precompute_first_layer out"
        )
