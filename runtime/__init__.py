"""gnnplan's runtime: executes a plan. Verbs are imported from their modules."""
