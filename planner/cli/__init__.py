"""The `gnnplan` command, one file per group of verbs."""

from gnnplan.moved import names_of

__getattr__ = names_of("gnnplan.planner.cli.main")
