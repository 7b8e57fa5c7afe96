"""The one evaluator: any placement of any kinds of items, in bytes, link seconds and step seconds.

Expected bytes are linear in the inclusion probabilities, so only they matter, whatever their joint
law (formulas 0). The step is the maximum over the rows of the objective (formulas 6.2):

    bytes[t, g, s] = read_bytes_t * sum_v heat_g(v) * [device g reads v from place s]
    link seconds   = sum over kinds, devices and places of bytes * seconds per byte on the link
    step           = max over rows k of constant_k + weights_k . bytes
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance, Layout, check_layout
from planner.placement.network import Goal, Rows, objective_rows
from planner.placement.reads import OWN, PEER, PLACES, count_reads


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    """What a layout is expected to read and take, per step."""

    policy: str
    seconds: float
    """Of the step under the objective (transactions, where that is the objective)."""
    binding: str
    """The link or device that sets it."""
    bytes: NDArray[np.float64]
    """By kind, device and place, shape [T, G, 5]; places as in `PLACES`."""
    link_seconds: dict[str, float]
    row_values: NDArray[np.float64]
    """Of every row of the objective, shape [K]."""

    def hit_rates(self, kind: int = 0) -> NDArray[np.float64]:
        """Share of each GPU's reads served by a GPU of its clique, shape [G]; 0 without reads."""
        total = self.bytes[kind].sum(axis=1)
        hits = self.bytes[kind][:, [OWN, PEER]].sum(axis=1)
        return np.divide(hits, total, out=np.zeros_like(hits), where=total > 0)

    def by_place(self) -> dict[str, float]:
        """Bytes over all kinds and devices."""
        total = self.bytes.sum(axis=(0, 1))
        return {place: float(total[s]) for s, place in enumerate(PLACES)}


def read_bytes(instance: Instance, layout: Layout) -> NDArray[np.float64]:
    """Expected bytes by kind, device and place, shape [T, G, 5]."""
    return np.stack(
        [
            kind.read_bytes
            * count_reads(kind.heat, kind.laws, held.own, held.elsewhere, instance.cliques)
            for kind, held in zip(instance.kinds, layout.held, strict=True)
        ]
    )


def score(
    instance: Instance,
    layout: Layout,
    goal: Goal = "pipelined",
    *,
    rows: Rows | None = None,
    check: bool = True,
) -> Score:
    """Score a placement.

    Args:
        instance: the problem.
        layout: the answer.
        goal: objective.
        rows: of that objective, where they are at hand.
        check: verify every budget and every read first.

    Raises:
        ValueError: a memory is overfull, or an item is read where it does not lie.
    """
    if check:
        check_layout(instance, layout)
    rows = objective_rows(instance.network, goal) if rows is None else rows
    found = read_bytes(instance, layout)
    missing = (found > 0) & ~np.isfinite(instance.network.alone)
    values = rows.values(found)
    if missing.any():
        values = np.where(rows.weights.any(axis=(1, 2, 3)), np.inf, values)
    worst = int(np.argmax(values))
    loads = np.einsum("tlgs,tgs->l", instance.network.loads, found)
    return Score(
        policy=layout.policy,
        seconds=float(values[worst]),
        binding=rows.names[worst],
        bytes=found,
        link_seconds=dict(zip(instance.network.links, map(float, loads), strict=True)),
        row_values=values,
    )
