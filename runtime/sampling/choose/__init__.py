"""Choosing a hop's edges or vertices: uniform, LABOR and layer-wise laws."""

from gnnplan.moved import names_of

__getattr__ = names_of("gnnplan.runtime.sampling.choose.uniform")
