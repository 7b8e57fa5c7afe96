"""Graph -> parts."""
