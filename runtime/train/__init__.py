"""Training: loops, gradients, evaluation and recovery."""
