"""Bulk sampling: k batches at once as sparse matrix products (Tripathy et al., MLSys 2024)."""
