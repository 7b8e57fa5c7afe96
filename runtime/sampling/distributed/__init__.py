"""Sampling by several ranks together: cooperative batches, and the 1.5D grid."""
