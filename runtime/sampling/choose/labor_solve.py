"""The probabilities of LABOR-i and LABOR-* (formulas 5.3): fewer vertices at equal variance.

pi_ts = min(1, c_s p_ts). A pass raises p_t to p_t max_s c_s and solves every row's c_s anew, so
that sum_t A^2 / pi_ts keeps its target, that of neighbour sampling with the row's fan-out. LABOR-*
passes until the expected number of new vertices gains less than a tolerance.
"""

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.checks import read_only
from runtime.sampling.choose.labor import Candidates
from runtime.sampling.choose.poisson import row_scale, row_scale_weighted
from runtime.sampling.compiled import kernel

MAX_PASSES = 100
"""LABOR-* stops here even where it still gains; about ten passes are usual."""


@kernel
@no_type_check
def _solve_rows(row_ptr, num_rows, numbers, fanout, inverse, scratch, scale):
    """Every row's c_s without weights; rows of at most `fanout` edges get all pi = 1."""
    for row in range(num_rows):
        begin, degree = row_ptr[row], row_ptr[row + 1] - row_ptr[row]
        largest = 0.0
        for i in range(degree):
            scratch[i] = inverse[numbers[begin + i]]
            largest = max(largest, scratch[i])
        if fanout < 0 or degree <= fanout:
            scale[row] = largest
        else:
            scale[row] = row_scale(scratch, degree, degree * (degree / fanout))


@kernel
@no_type_check
def _solve_rows_weighted(
    row_ptr, num_rows, numbers, fanout, inverse, per_edge, starts, edge_weight, scratch, scale
):
    """`_solve_rows` with weights; p_ts is A_ts itself where `per_edge`, 1 / inverse otherwise."""
    for row in range(num_rows):
        begin, start = row_ptr[row], starts[row]
        count, total, largest = 0, 0.0, 0.0
        for i in range(row_ptr[row + 1] - begin):
            weight = np.float64(edge_weight[start + i])
            if weight > 0:
                one = 1.0 / weight if per_edge else inverse[numbers[begin + i]]
                scratch[0, count], scratch[1, count] = one, weight * weight
                total += weight
                largest = max(largest, one)
                count += 1
        if fanout < 0 or count <= fanout:
            scale[row] = largest
        else:
            excess = total * total * (1.0 / fanout - 1.0 / count)
            scale[row] = row_scale_weighted(scratch[0], scratch[1], count, excess)


@kernel
@no_type_check
def _highest_scale(row_ptr, num_rows, numbers, scale, weighted, per_edge, starts, edge_weight, top):
    """top_t = max over the rows s of t of c_s (of c_s A_ts where `per_edge`)."""
    for row in range(num_rows):
        for e in range(row_ptr[row], row_ptr[row + 1]):
            value = scale[row]
            if weighted:
                weight = np.float64(edge_weight[starts[row] + e - row_ptr[row]])
                value = value * weight if per_edge else value * (weight > 0)
            t = numbers[e]
            top[t] = max(top[t], value)


@kernel
@no_type_check
def _expected_new(top, pi, known, count):
    """Expected vertices that the hop adds: sum of min(1, p_t max_s c_s) over new candidates."""
    total = 0.0
    for t in range(known, count):
        total += min(1.0, pi[t] * top[t])
    return total


class LaborSolver:
    """Runs the passes of one hop over its candidates.

    Args:
        variant: Number of passes, or "star" for as many as gain something.
        tolerance: Relative gain in expected new vertices below which LABOR-* stops.
        edge_weight: float array [E] or None.
    """

    def __init__(
        self, variant: int | str, tolerance: float, edge_weight: NDArray[np.floating] | None
    ) -> None:
        self._passes = MAX_PASSES if variant == "star" else int(variant)
        self._star = variant == "star"
        self._tolerance = tolerance
        self._weighted = edge_weight is not None
        no_weight = read_only(np.zeros(0, dtype=np.float32))
        self._weight = no_weight if edge_weight is None else edge_weight

    def solve(
        self, candidates: Candidates, starts: NDArray[np.integer], fanout: int
    ) -> tuple[float, int]:
        """Fill `scale` and, after at least one pass, `pi`; rows begin at `starts` in the graph.

        Returns:
            The expected number of new vertices, and the passes made.
        """
        c = candidates
        c.pi[: c.count] = 1.0
        c.inverse[: c.count] = 1.0
        self._rows(c, starts, fanout, 0)
        expected = self._expect(c, starts, 0)
        for turn in range(1, self._passes + 1):
            c.pi[: c.count] *= c.top[: c.count]
            with np.errstate(divide="ignore"):
                np.divide(1.0, c.pi[: c.count], out=c.inverse[: c.count])
            self._rows(c, starts, fanout, turn)
            before, expected = expected, self._expect(c, starts, turn)
            if self._star and before - expected <= self._tolerance * before:
                return expected, turn
        return expected, self._passes

    def _rows(self, c: Candidates, starts: NDArray[np.integer], fanout: int, turn: int) -> None:
        rows = starts.shape[0]
        if self._weighted:
            _solve_rows_weighted(
                c.row_ptr, rows, c.numbers, fanout, c.inverse, turn == 0, starts, self._weight,
                c.row, c.scale,
            )  # fmt: skip
        else:
            _solve_rows(c.row_ptr, rows, c.numbers, fanout, c.inverse, c.row[0], c.scale)

    def _expect(self, c: Candidates, starts: NDArray[np.integer], turn: int) -> float:
        c.top[: c.count] = 0.0
        _highest_scale(
            c.row_ptr, starts.shape[0], c.numbers, c.scale, self._weighted, turn == 0, starts,
            self._weight, c.top,
        )  # fmt: skip
        return _expected_new(c.top, c.pi, c.num_known, c.count)
