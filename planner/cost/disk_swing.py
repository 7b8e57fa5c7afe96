"""What two readings of a disk at two times say, where its speed swings.

Memory is as fast a minute later. A disk that others read too is not, so neither the probe's
reading nor the profile's is the speed of a run; their geometric mean is nearest to it (DEC-49). A
loader thread reads beside steps as fast as between them (DEC-50).
"""

import math

SWING = 0.3
"""Logarithm of what two readings of one disk are apart and may both be of: more is no swing."""


def between(factor: float) -> float:
    """What is expected of a disk that was read twice: `factor` times as long the second time.

    Half of the way, as neither time is better than the other. What is more than a disk's swing is
    the second's own (this graph may lie on another disk than the probe's file).

    >>> [round(between(f), 3) for f in (1.0, 1.21, 0.81, 4.0)]
    [1.0, 1.1, 0.9, 3.872]
    """
    return math.sqrt(factor * beyond(factor))


def beyond(factor: float) -> float:
    """What a disk's swing leaves of a factor between two readings; 1 where it explains it.

    >>> [round(beyond(f), 3) for f in (1.3, 0.8, 2.0, 4.0)]
    [1.0, 1.0, 1.756, 3.749]
    """
    apart = math.log(factor)
    if abs(apart) <= SWING:
        return 1.0
    return math.exp(apart * (1.0 - (SWING / apart) ** 2))
