"""An all-to-all of unequal messages: what any schedule needs, and what turns by shifts take.

Symbols: P ranks, M_ij bytes from rank i to rank j (i != j), a seconds before a message moves, B
bytes per second that a rank sends and, at once, receives. Links that several ranks share come on
top of both: the most that crosses one of them, over what it carries.

Source: docs/formulas.md 8.4 [A4].
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = Sequence[Sequence[float]]
"""M_ij, one row per sender, P x P; the diagonal stays where it is and counts for nothing."""


def bound_bytes(sent: Matrix) -> float:
    """Bytes of the rank that sends or receives most: max(max_i sum_j M_ij, max_j sum_i M_ij).

    No schedule moves less through that rank's link; one that may interrupt messages attains it.

    >>> bound_bytes([[0, 60, 0], [10, 0, 20], [40, 0, 0]])
    60.0
    """
    moved = _moved(sent)
    return float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def shift_bytes(sent: Matrix) -> float:
    """Bytes one after the other in P - 1 turns: sum_r max_i M_{i,i+r}.

    In turn r every rank sends to the r-th after it, and the largest message ends the turn. Equal
    to the bound where every turn's messages are, and for two ranks.

    >>> shift_bytes([[0, 60, 0], [10, 0, 20], [40, 0, 0]])
    70.0
    """
    moved = _moved(sent)
    ranks = np.arange(len(moved))
    turns = [moved[ranks, (ranks + r) % len(moved)].max() for r in range(1, len(moved))]
    return float(sum(turns))


def bracket_seconds(
    sent: Matrix, *, latency_seconds: float, bytes_per_second: float
) -> tuple[float, float]:
    """Least seconds of any schedule, and those of the shifts: (P - 1) a + bytes / B.

    Args:
        sent: M_ij in bytes.
        latency_seconds: a.
        bytes_per_second: B.

    >>> sent = [[0, 60, 0], [10, 0, 20], [40, 0, 0]]
    >>> bracket_seconds(sent, latency_seconds=0.0, bytes_per_second=1.0)
    (60.0, 70.0)
    """
    started = (len(sent) - 1) * latency_seconds
    least, most = bound_bytes(sent), shift_bytes(sent)
    return started + least / bytes_per_second, started + most / bytes_per_second


def _moved(sent: Matrix) -> NDArray[np.float64]:
    found = np.array(sent, np.float64)
    np.fill_diagonal(found, 0.0)
    return found
