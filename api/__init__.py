"""gnnplan's REST service."""
