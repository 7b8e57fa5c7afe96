"""gnnplan's REST service."""

from runtime.moved import find_moved_modules

find_moved_modules()
