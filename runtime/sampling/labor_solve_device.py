"""The probabilities of LABOR-i and LABOR-* on a GPU, pass by pass as `labor_solve` makes them.

Rows are solved by a kernel each (`segments_triton.row_scales`), the maximum over a vertex's rows by
an atomic maximum, which does not depend on the order. LABOR-* waits once per pass, to see whether
the pass gained enough.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.sampling.labor_solve import MAX_PASSES
from runtime.sampling.relabel_triton import DeviceRelabel
from runtime.sampling.segment_sums_triton import segment_counts, segment_largest, segment_sums
from runtime.sampling.segments_triton import row_scales
from runtime.sampling.whole_rows_device import WholeRows


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every vertex that a row of the hop may draw, numbered once; known ones come first."""

    ids: Tensor
    """int64, global ids by number."""
    numbers: Tensor
    """int64, the candidate of every edge."""
    num_known: int

    @staticmethod
    def collect(whole: WholeRows, known: Tensor, device: torch.device) -> "Candidates":
        """Number the candidates of whole rows; waits for their number."""
        relabel = DeviceRelabel(device)
        relabel.add(known, torch.tensor([known.numel()], device=device), [])
        relabel.num_known = known.numel()
        total = torch.tensor([whole.values.numel()], device=device)
        local, new, sums = relabel.add(whole.values, total, [known])
        num_new = int(sums[-1]) if whole.values.numel() else 0
        ids = torch.cat([known, new[:num_new]])
        return Candidates(ids, local.to(torch.int64), known.numel())


class LaborPasses:
    """Runs the passes of one hop.

    Args:
        variant: number of passes, or "star" for as many as gain something.
        tolerance: relative gain in expected new vertices below which LABOR-* stops.
    """

    def __init__(self, variant: int | str, tolerance: float) -> None:
        self._passes = MAX_PASSES if variant == "star" else int(variant)
        self._star = variant == "star"
        self._tolerance = tolerance

    def solve(
        self,
        whole: WholeRows,
        found: Candidates,
        weight: Tensor | None,
        everything: Tensor,
        fanout: int,
    ) -> tuple[Tensor, Tensor]:
        """c_s of every row, and what it multiplies at each edge: p_t, or A_ts before any pass.

        Args:
            whole: the rows.
            found: their candidates.
            weight: float64, A_ts of each edge, or None.
            everything: bool [n], rows that are taken whole.
            fanout: k.
        """
        pi = torch.ones(found.ids.numel(), dtype=torch.float64, device=found.ids.device)
        excess, squares = _excess(whole, weight, everything, fanout)
        each = torch.ones_like(pi)[found.numbers] if weight is None else weight
        scale = _scales(whole, each, weight, squares, excess, everything)
        top = _highest(whole, found, scale, weight, each)
        expected = _expected_new(top, pi, found.num_known) if self._star else 0.0
        for _ in range(self._passes):
            pi = pi * top
            each = pi[found.numbers]
            scale = _scales(whole, each, weight, squares, excess, everything)
            top = _highest(whole, found, scale, weight, None)
            if self._star:
                before, expected = expected, _expected_new(top, pi, found.num_known)
                if before - expected <= self._tolerance * before:
                    break
        return scale, each


def _excess(
    whole: WholeRows, weight: Tensor | None, everything: Tensor, fanout: int
) -> tuple[Tensor, Tensor | None]:
    """a^2/k - a^2/d of each row that is not taken whole (else 0), and A^2 of each edge."""
    if weight is None:
        degree = whole.rows.degrees.to(torch.float64)
        excess, squares = degree * (degree / fanout) - degree, None
    else:
        total = segment_sums(whole.ptr, weight)
        able = segment_counts(whole.ptr, weight > 0).clamp(min=1).to(torch.float64)
        excess, squares = total * total * (1.0 / fanout - 1.0 / able), weight * weight
    return torch.where(everything, 0.0, excess), squares


def _scales(
    whole: WholeRows,
    each: Tensor,
    weight: Tensor | None,
    squares: Tensor | None,
    excess: Tensor,
    everything: Tensor,
) -> Tensor:
    inverse = 1.0 / each
    if weight is not None:
        inverse = torch.where(weight > 0, inverse, 0.0)
    solved = row_scales(whole.ptr, inverse, squares, excess, whole.widest)
    return torch.where(everything, segment_largest(whole.ptr, inverse), solved)


def _highest(
    whole: WholeRows,
    found: Candidates,
    scale: Tensor,
    weight: Tensor | None,
    each: Tensor | None,
) -> Tensor:
    """The maximum over the rows s of t of c_s, before any pass (`each` given) of c_s A_ts."""
    value = scale[whole.row_of]
    if weight is not None:
        value = value * (each if each is not None else (weight > 0).to(torch.float64))
    top = torch.zeros(found.ids.numel(), dtype=torch.float64, device=scale.device)
    return top.scatter_reduce_(0, found.numbers, value, "amax")


def _expected_new(top: Tensor, pi: Tensor, known: int) -> float:
    return float(torch.clamp(pi[known:] * top[known:], max=1.0).sum())
