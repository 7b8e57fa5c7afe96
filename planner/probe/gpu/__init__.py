"""GPUs of this machine: which there are, how they are joined, and what was measured on them."""

from runtime.moved import names_of

__getattr__ = names_of("planner.probe.gpu.measure")
