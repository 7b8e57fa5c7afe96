"""The `gnnplan` command, one file per group of verbs."""

from runtime.moved import names_of

__getattr__ = names_of("planner.cli.main")
