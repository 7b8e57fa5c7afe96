"""GPUs of this machine: which there are, how they are joined, and what was measured on them."""

from gnnplan.moved import names_of

__getattr__ = names_of("gnnplan.planner.probe.gpu.measure")
