"""Starting a plan's ranks: under torchrun, on several hosts, through Ray, or a user's script."""

from gnnplan.moved import names_of

__getattr__ = names_of("gnnplan.runtime.launch.launch")
