"""gnnplan's runtime: executes a plan. Verbs are imported from their modules."""

from runtime.moved import find_moved_modules

find_moved_modules()
