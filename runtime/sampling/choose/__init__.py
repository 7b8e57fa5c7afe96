"""Choosing a hop's edges or vertices: uniform, LABOR and layer-wise laws."""

from runtime.moved import names_of

__getattr__ = names_of("runtime.sampling.choose.uniform")
