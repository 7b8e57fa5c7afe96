"""gnnplan plans the training of GNNs on several GPUs, and trains by the plan.

    import gnnplan

    gnnplan.plan("demo/graph", "my-plan", devices=2)
    print(gnnplan.explain("my-plan"))
    report = gnnplan.train("my-plan", epochs=3)

In a training script of one's own, `PlannedLoader("my-plan")` is the loader and `wrap_model(model)`
the model. Modules are `gnnplan.planner...`, `gnnplan.runtime...` and `gnnplan.api...`; in the
repository these three folders stand at the top and are linked from here.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnplan.moved import find_former_names

if TYPE_CHECKING:
    from gnnplan.facade import explain, plan, train
    from gnnplan.planner.settings import PlanSettings
    from gnnplan.runtime.loader.loader import PlannedLoader
    from gnnplan.runtime.models.planned import planned as wrap_model

__all__ = ["PlanSettings", "PlannedLoader", "explain", "plan", "train", "wrap_model"]

PLACES = {
    "PlanSettings": ("planner.settings", "PlanSettings"),
    "PlannedLoader": ("runtime.loader.loader", "PlannedLoader"),
    "explain": ("facade", "explain"),
    "plan": ("facade", "plan"),
    "train": ("facade", "train"),
    "wrap_model": ("runtime.models.planned", "planned"),
}
"""Module and name of each public name: imported when it is asked for, since torch takes seconds."""

if not (Path(__file__).parent / "planner").exists():
    __path__.append(str(Path(__file__).resolve().parents[1]))  # a copy that has lost its links

find_former_names()


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inside = PLACES[name]
    return getattr(import_module(f"gnnplan.{module}"), inside)
