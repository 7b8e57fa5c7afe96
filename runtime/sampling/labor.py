"""LABOR sampling: as many neighbours as neighbour sampling, of fewer vertices (formulas 5).

Balin and Catalyurek, "Layer-Neighbor Sampling" (NeurIPS 2023). All rows of a hop share one random
number r_t per vertex t, and t is drawn for s where r_t < pi_ts. LABOR-0 takes pi_ts = min(1, k /
d_s); LABOR-i and LABOR-* move probability to vertices that many rows share, at equal variance.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.checks import RELABEL_BUDGET_BYTES, check_edge_weight, read_only
from gnnplan.runtime.sampling.choose.labor import (
    PER_EDGE,
    PER_VERTEX,
    UNIFORM,
    CandidateRows,
    Candidates,
    ChosenEdges,
    LaborSolver,
    choose_by_number,
    weigh_rows,
)
from gnnplan.runtime.sampling.choose.poisson import scan_rows
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.frontier import HopwiseSampler, Weights
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose
from gnnplan.runtime.sampling.statistics import Estimator
from gnnplan.runtime.sampling.workspace import Workspace


class Form(StrEnum):
    """How many neighbours a row gets."""

    POISSON = "poisson"
    """min(k, d) on average, each neighbour with its own probability."""
    EXACT_K = "exact_k"
    """Exactly min(k, d), those with the smallest r_t / pi_ts."""


class LaborSampler(HopwiseSampler):
    """Samples by LABOR-0, LABOR-i or LABOR-*, Poisson or with exactly k neighbours.

    Args (others as in `HopSampler`):
        fanouts: k per hop, the hop next to the seeds first; -1 takes all.
        variant: 0, a number of passes, or "star".
        form: Poisson or exactly k.
        estimator: Meaning of each block's `weight`. Plain: None, the layer takes the mean of what
            was drawn. Horvitz-Thompson: A / (a_s pi_ts), a_s the full row's sum of A. Hajek: A /
            pi_ts over its sum in the sample.
        edge_weight: A, float [E] non-negative; a weight of 0 is never drawn. None: all 1.
        tolerance: Relative gain in expected new vertices below which LABOR-* stops.
        streams: Fields of `StreamPolicy`: seed, kappa, dependence and others.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        variant: int | float | str = 0,
        form: str = Form.POISSON,
        estimator: Estimator = Estimator.HAJEK,
        edge_weight: NDArray[np.floating] | None = None,
        tolerance: float = 1e-4,
        dialect: Dialect = Dialect.EVERY_HOP,
        edge_ids: bool = False,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
        purpose: Purpose = Purpose.VERTEX,
        **streams: Any,
    ) -> None:
        super().__init__(
            indptr,
            indices,
            fanouts,
            streams=StreamPolicy(purpose=purpose, **streams),
            dialect=dialect,
            edge_ids=edge_ids,
            relabel_budget_bytes=relabel_budget_bytes,
        )
        self.variant = check_variant(variant)
        self.form = check_form(form)
        self.estimator = Estimator(estimator)
        self.edge_weight = check_edge_weight(edge_weight, int(self.indices.shape[0]))
        self._solver = LaborSolver(self.variant, check_tolerance(tolerance), self.edge_weight)
        no_weight = read_only(np.zeros(0, dtype=np.float32))
        self._weight = no_weight if self.edge_weight is None else self.edge_weight

    def _choose(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        if self.variant == 0 and self.edge_weight is None and streams.plain:
            return self._scan(w, streams, hop, first, last)
        return self._solve(w, streams, hop, first, last)

    def _scan(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        fanout, exact = self.fanouts[hop], self.form is Form.EXACT_K

        def choose(node: int, row: int, edge: int) -> tuple[int, int]:
            return scan_rows(
                self.indptr, self.indices, streams.first[hop], fanout, exact, w.node_ids, node,
                last, row, edge, w.row_ptr, w.positions,
            )  # fmt: skip

        self._choose_rows(w, hop, first, last, choose)
        return self._weigh(w, hop, first, last, np.zeros(0, dtype=np.float64))

    def _solve(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        fanout = self.fanouts[hop]
        c = self._of_thread("candidates", self._make_candidates)
        c.collect(self.indptr, self.indices, w.node_ids, first, last, streams, hop)
        uniform = self.variant == 0 and self.edge_weight is None
        rule = UNIFORM if uniform else PER_EDGE if self.variant == 0 else PER_VERTEX
        if not uniform:
            self._solver.solve(c, self.indptr[w.node_ids[first:last]], fanout)
        rows = CandidateRows(
            self.indptr, self._weight, c.row_ptr, c.numbers, c.words, c.pi, c.scale, c.row[0],
            rule, fanout, self.form is Form.EXACT_K,
        )  # fmt: skip

        def choose(node: int, row: int, edge: int) -> tuple[int, int]:
            out = ChosenEdges(w.row_ptr, w.positions, self._edge_numbers(w, edge))
            return choose_by_number(rows, w.node_ids, first, node, last, out, row, edge)

        self._choose_rows(w, hop, first, last, choose)
        return self._weigh(w, hop, first, last, self._edge_numbers(w, int(w.edge_ends[hop + 1])))

    def _weigh(
        self, w: Workspace, hop: int, first: int, last: int, chances: NDArray[np.float64]
    ) -> Weights | None:
        if self.estimator is Estimator.PLAIN:
            return None
        out = np.empty(int(w.edge_ends[hop + 1] - w.edge_ends[hop]), dtype=np.float32)
        weigh_rows(
            self.indptr, w.node_ids, first, last, int(w.row_ends[hop]), w.row_ptr, w.positions,
            chances, self._weight, self.fanouts[hop], self.estimator is Estimator.HAJEK, out,
        )  # fmt: skip
        return out

    def _make_candidates(self) -> Candidates:
        return Candidates(self.num_nodes, self.indices.dtype, dense=self.dense_table)


def check_variant(variant: int | float | str) -> int | str:
    """Return the variant, which must be a number of passes or "star"."""
    if variant == "star":
        return "star"
    if isinstance(variant, int) and variant >= 0:
        return variant
    raise SamplerError(
        f"expected a LABOR variant of 0, a positive number of passes, or 'star', found "
        f"{variant!r}; choose one"
    )


def check_tolerance(tolerance: float) -> float:
    """Return the tolerance, which must be at least 0."""
    if tolerance >= 0:
        return tolerance
    raise SamplerError(
        f"expected a tolerance of at least 0, found {tolerance}; 1e-4 is usual, 1e-3 faster"
    )


def check_form(form: str) -> Form:
    """Return the form of that name."""
    if form not in list(Form):
        raise SamplerError(
            f"expected a form among {', '.join(Form)}, found {form!r}; choose one of them"
        )
    return Form(form)
