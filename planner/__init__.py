"""gnnplan's planner: graph + machine -> plan. Verbs are imported from their modules."""
