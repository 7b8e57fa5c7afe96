"""Stage `sample`: drawing neighbours and relabelling them, elapsed seconds per batch."""


def sample_seconds(
    edges: float, vertices: float, seconds_per_edge: float, seconds_per_vertex: float
) -> float:
    """Seconds one thread takes to sample one batch.

    T = E * c_e + V * c_v

    Args:
        edges: E, edges drawn over all hops, per batch.
        vertices: V, distinct vertices relabelled, per batch.
        seconds_per_edge: c_e at this topology's bytes and number of concurrent samplers.
        seconds_per_vertex: c_v at the relabelling table's bytes and the same samplers.

    Returns:
        Elapsed seconds, equal to core-seconds: one thread samples a batch.

    Source: both rates are measured by the probe with the real sampler on generated graphs.

    >>> sample_seconds(edges=1e6, vertices=2e5, seconds_per_edge=10e-9, seconds_per_vertex=50e-9)
    0.02
    """
    return edges * seconds_per_edge + vertices * seconds_per_vertex
