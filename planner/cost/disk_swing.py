"""What two readings of a disk at two times say, where its speed swings.

Memory is as fast a minute later. A disk that others read as well is not: one of a virtual machine
was, over ten seconds, .8 to 1.3 times as fast as over the next, and neither the probe's reading nor
the profile's is the speed of a run. In 67 runs whose rows all lay on that disk, of eleven graphs
and six probes, the table was 12% off beside what it was for all runs of its probe (standard
deviation of logarithms), the profile's reading 13%, and their geometric mean 10%. How long a loader
thread reads beside steps, over reading between them, was 1.0 in 37 such runs, give or take 10%, and
no nearer to what the profile found of it: that was 14% off.
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
