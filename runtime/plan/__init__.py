"""The plan: contract between the planner, which writes it, and the runtime, which reads it."""

from typing import TYPE_CHECKING

from gnnplan.moved import names_of
from gnnplan.runtime.plan.schema import FullGraph, Links, Plan, Sampler, Strategy, Threads, Workload

if TYPE_CHECKING:
    from gnnplan.runtime.plan.io import PLAN_FILE, load_array, load_plan, save_plan

__all__ = [
    "PLAN_FILE",
    "FullGraph",
    "Links",
    "Plan",
    "Sampler",
    "Strategy",
    "Threads",
    "Workload",
    "load_array",
    "load_plan",
    "save_plan",
]

__getattr__ = names_of("gnnplan.runtime.plan.io")  # on use: the schema takes no numpy
