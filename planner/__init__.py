"""gnnplan's planner: graph + machine -> plan. Verbs are imported from their modules."""

from runtime.moved import find_moved_modules

find_moved_modules()
