"""Graph -> parts: one interface over all partitioners, quality numbers, cliques."""
