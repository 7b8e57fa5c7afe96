"""Samplers on a GPU: the batches of the samplers on cores, seed for seed."""
