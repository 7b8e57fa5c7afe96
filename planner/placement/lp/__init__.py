"""The placement as a linear programme: relaxed, solved, rounded, improved and bounded."""
