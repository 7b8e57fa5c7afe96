"""Full-graph training over a partition: inner nodes, boundary nodes, and exchanged rows.

  part -> epoch's draws -> blocks -> exchange -> aggregate -> model

A rank holds the nodes of its part and aggregates over all their in-neighbours. Those of other parts
arrive once per layer: the sampled halo (`Boundary`), or slice by slice (`Slices`).
"""
