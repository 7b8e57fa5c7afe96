"""Full-graph training over a partition: inner nodes, boundary nodes, and what crosses over.

    part -> epoch's draws -> blocks -> exchange -> aggregate -> model

A rank holds the nodes of its part and aggregates over all their in-neighbours; those of other parts
arrive once per layer (`boundary`), a sampled share of them, or slice by slice (`slices`).
"""
