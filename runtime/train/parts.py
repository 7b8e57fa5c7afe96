"""How a flat gradient is cut into the parts that are sent while the backward pass runs."""

PART_BYTES = 1 << 20
"""Least size of a part but the last: below, latency outweighs what is hidden."""


def most_parts(gradient_bytes: float) -> int:
    """Parts of a gradient of so many bytes, where its layers do not make them larger.

    >>> most_parts(900_000), most_parts(4 * 2**20)
    (1, 4)
    """
    return max(1, int(gradient_bytes // PART_BYTES))
