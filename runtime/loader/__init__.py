"""Batches under a plan: the loader, its stages, and what each kind of batch has instead."""

from runtime.moved import names_of

__getattr__ = names_of("runtime.loader.loader")
