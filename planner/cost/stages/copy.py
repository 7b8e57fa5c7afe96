"""Stage `copy`: what the host hands a GPU for each batch, seconds."""

SEED_BYTES = 16
"""A seed's id and its label, 8 bytes each."""
COPIES = 2
"""Of seeds, and of labels."""


def copy_seconds(
    seeds: float, seconds_per_byte: float, kernel_seconds: float, *, seed_bytes: int = SEED_BYTES
) -> float:
    """Seeds and labels from the host to the device.

    T = 2 t_k + 16 B c

    Args:
        seeds: B, of this rank.
        seconds_per_byte: c, of copies while all ranks copy.
        kernel_seconds: t_k, of starting one of the two copies.
        seed_bytes: bytes per seed.

    Source: derived; rows are read by the GPU itself and stand in `gather`.

    >>> round(1e6 * copy_seconds(1000.0, 1e-10, 1e-5), 1)
    21.6
    """
    return COPIES * kernel_seconds + seed_bytes * seeds * seconds_per_byte
