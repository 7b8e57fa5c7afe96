"""What a partitioner is given: the graph, the number of parts, and what must be balanced."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError

MAX_PARTS = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Fractions by which the largest part may pass its share; None: any.

    The default is the usual imbalance of XtraPuLP and METIS (formulas 2.2).
    """

    nodes: float | None = 0.03
    training: float | None = 0.03
    edges: float | None = None
    """Fraction for the in-edges of a part's nodes, which its aggregation reads."""

    @property
    def tolerances(self) -> tuple[float, float, float]:
        """Fractions in that order; infinity for any."""
        given = (self.nodes, self.training, self.edges)
        return tuple(np.inf if t is None else t for t in given)  # pyright: ignore[reportReturnType]

    def __post_init__(self) -> None:
        given = (self.nodes, self.training, self.edges)
        if any(t is not None and not t > 0 for t in given):
            raise SettingsError(f"expected imbalances above 0 (e.g. 0.03) or none, found {given}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartitionProblem:
    """One partitioning task. The arrays are only read, and may be memory-mapped."""

    indptr: NDArray[np.int64]
    """Shape [N + 1]; in-neighbours of v are `indices[indptr[v]:indptr[v + 1]]`."""
    indices: NDArray[Any]
    """Shape [E], int32 or int64."""
    training: NDArray[np.bool_]
    """Whether each node is a training node, shape [N]."""
    weights: tuple[int, ...]
    """Share of each part as small integers: the sizes of the cliques, or ones."""
    seed: int = 0
    balance: Balance = field(default_factory=Balance)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of stored edges, E."""
        return len(self.indices)

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.weights)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of each part, summing to 1; shape [parts]."""
        weights = np.array(self.weights, np.float64)
        return weights / weights.sum()

    @property
    def totals(self) -> NDArray[np.float64]:
        """Nodes, training nodes and edges of the graph; shape [3]."""
        training = np.count_nonzero(self.training)
        return np.array([self.num_nodes, training, self.num_edges], np.float64)

    @property
    def limits(self) -> NDArray[np.float64]:
        """Most nodes, training nodes and edges of each part; shape [3, parts].

        At least the share rounded up, or some graphs of few nodes had no partition at all.
        """
        shares = self.totals[:, None] * self.shares[None, :]
        tolerances = np.array(self.balance.tolerances)[:, None]
        free = np.isinf(tolerances)
        scaled = shares * (1 + np.where(free, 0.0, tolerances))
        return np.where(free, np.inf, np.maximum(np.floor(scaled), np.ceil(shares)))


def make_problem(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    *,
    parts: int,
    training: NDArray[Any] | None = None,
    weights: Sequence[int] | None = None,
    seed: int = 0,
    balance: Balance | None = None,
) -> PartitionProblem:
    """State a partitioning task, with the arguments of `partition`, and check its numbers.

    Raises:
        SettingsError: a number is out of range or a shape does not match.
    """
    if not 1 <= parts <= MAX_PARTS:
        raise SettingsError(f"expected 1 to {MAX_PARTS} parts, found {parts}")
    weights = (1,) * parts if weights is None else tuple(weights)
    if len(weights) != parts or any(w < 1 for w in weights):
        raise SettingsError(f"expected {parts} weights of at least 1, found {weights}")
    num_nodes = len(indptr) - 1
    return PartitionProblem(
        indptr=_read_only(indptr),
        indices=_read_only(indices),
        training=_training_mask(training, num_nodes),
        weights=weights,
        seed=seed,
        balance=balance or Balance(),
    )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that kernels may not write to, so that one compiled form serves any graph."""
    view = np.asarray(array)[:]
    view.flags.writeable = False
    return view


def _training_mask(training: NDArray[Any] | None, num_nodes: int) -> NDArray[np.bool_]:
    if training is None:
        return np.zeros(num_nodes, np.bool_)
    if training.dtype == np.bool_:
        if training.shape != (num_nodes,):
            raise SettingsError(
                f"expected a training mask of shape {(num_nodes,)}, found {training.shape}"
            )
        return training
    if len(training) and (training.min() < 0 or training.max() >= num_nodes):
        raise SettingsError(
            f"expected training ids below {num_nodes}, found {training.min()}..{training.max()}"
        )
    mask = np.zeros(num_nodes, np.bool_)
    mask[training.ravel()] = True
    return mask
