"""Compute seconds and bytes of each stage of a step, by pure arithmetic."""
