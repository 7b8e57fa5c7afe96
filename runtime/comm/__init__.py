"""Communication between ranks: collectives, groups, and the way to other hosts."""
