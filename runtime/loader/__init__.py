"""Batches under a plan: the loader, its stages, and the stages of special batches."""

from gnnplan.moved import names_of

__getattr__ = names_of("gnnplan.runtime.loader.loader")
