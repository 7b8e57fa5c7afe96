"""Seconds, memory and traffic of a rank by its processor, and of ranks that work together."""
