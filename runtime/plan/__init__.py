"""The plan: contract between the planner, which writes it, and the runtime, which reads it."""

from gnnplan.runtime.plan.io import PLAN_FILE, load_array, load_plan, save_plan
from gnnplan.runtime.plan.schema import FullGraph, Links, Plan, Sampler, Strategy, Threads, Workload

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
