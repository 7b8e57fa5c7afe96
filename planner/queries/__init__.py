"""Answer questions about plans: why, what if, what changed, what was measured."""
