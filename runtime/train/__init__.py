"""Training loops, overlap, checkpoints and evaluation."""
