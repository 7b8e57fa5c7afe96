"""Batches under a plan: the loader, its stages, and what each kind of batch has instead."""

from gnnplan.moved import names_of

__getattr__ = names_of("gnnplan.runtime.loader.loader")
