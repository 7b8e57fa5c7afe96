"""Samplers and the mini-batch they make."""
