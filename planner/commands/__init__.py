"""The verbs of the `gnnplan` command, one file per group."""
