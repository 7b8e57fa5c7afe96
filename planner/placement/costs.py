"""What reading one feature row costs from each place, and which rule follows from it.

C = row bytes / effective bandwidth (formulas 0). Rules are stated on net costs: C_loc, the cost of
a row in the GPU's own memory, is paid for every row and so cannot change a decision.
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class Case(StrEnum):
    """Which placement rule the costs call for (formulas 1.1, 1.3)."""

    NOTHING = "nothing"
    """C_cpu <= C_loc: an own copy saves no time; cache nothing."""
    REPLICATE = "replicate"
    """Case 1, C_gpu >= C_cpu: a peer is never read; each GPU keeps its own hottest rows."""
    TRADE = "trade"
    """Case 2, C_loc < C_gpu < C_cpu: coverage of the clique is traded against local copies."""
    DEAL = "deal"
    """C_gpu <= C_loc: a second copy never pays; deal every row once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCosts:
    """Seconds per feature row, gross (C_loc included); infinite where there is no such place."""

    local: float
    """C_loc: own memory of the reading device."""
    peer: float = math.inf
    """C_gpu: memory of another device of the clique."""
    host: float = math.inf
    """C_cpu: host memory."""
    disk: float = math.inf

    def __post_init__(self) -> None:
        costs = (self.local, self.peer, self.host, self.disk)
        if not (math.isfinite(self.local) and all(cost >= 0 for cost in costs)):
            raise ValueError(f"expected costs of at least 0 and a finite local one, found {self}")

    @classmethod
    def from_bandwidths(
        cls,
        row_bytes: int,
        *,
        local: float,
        peer: float = 0.0,
        host: float = 0.0,
        disk: float = 0.0,
    ) -> "RowCosts":
        """Costs from effective bandwidths in bytes per second; 0 where there is no such place.

        Example:
            >>> RowCosts.from_bandwidths(400, local=4e9, host=1e9).host
            4e-07
        """

        def cost(bandwidth: float) -> float:
            return row_bytes / bandwidth if bandwidth else math.inf

        return cls(local=cost(local), peer=cost(peer), host=cost(host), disk=cost(disk))

    @property
    def net_peer(self) -> float:
        """C_gpu - C_loc."""
        return self.peer - self.local

    @property
    def net_host(self) -> float:
        """C_cpu - C_loc."""
        return self.host - self.local

    @property
    def case(self) -> Case:
        """The rule these costs call for."""
        if self.net_host <= 0:
            return Case.NOTHING
        if self.peer >= self.host:
            return Case.REPLICATE
        return Case.TRADE if self.net_peer > 0 else Case.DEAL


def alpha(costs: RowCosts) -> float:
    """The published, selfish threshold: swap iff p(new) > alpha * p(old).

        alpha = (C_gpu - C_loc) / (C_cpu - C_loc)

    Returns:
        A number in [0, 1); 0 where C_gpu <= C_loc (deal everything).

    Raises:
        ValueError: C_gpu >= C_cpu or C_cpu <= C_loc; no swap is considered there (formulas 1.3).

    References:
        Song and Jiang, ICS 2022; formulas 1.1.

    Example:
        >>> round(alpha(RowCosts(local=0.1, peer=0.4, host=1.0)), 6)
        0.333333
    """
    _refuse_without_trade(costs)
    return max(0.0, costs.net_peer / costs.net_host)


def alpha_star(costs: RowCosts, num_devices: int) -> float:
    """The threshold that makes Algorithm 1 the exact optimum of the mean cost.

        alpha_star = (C_gpu - C_loc) / (n * C_cpu - (n - 1) * C_gpu - C_loc)

    The denominator is what the first copy of a row saves the n GPUs of a clique together, the
    numerator what each further copy saves.

    Args:
        costs: Gross costs per row.
        num_devices: n, the size of the clique.

    Returns:
        A number in [0, 1), at most `alpha(costs)`; 0 where C_gpu <= C_loc.

    Raises:
        ValueError: C_gpu >= C_cpu or C_cpu <= C_loc. The formula divides by zero at
            C_gpu / C_cpu = n / (n - 1) and would partition beyond, where replication is optimal.

    References:
        Derived, formulas 1.3.

    Example:
        >>> round(alpha_star(RowCosts(local=0.1, peer=0.4, host=1.0), 4), 6)
        0.111111
    """
    _refuse_without_trade(costs)
    n = num_devices
    # n*C_cpu - (n-1)*C_gpu - C_loc, written as a sum of positive terms
    first_copy = costs.net_host + (n - 1) * (costs.host - costs.peer)
    return max(0.0, costs.net_peer / first_copy)


def _refuse_without_trade(costs: RowCosts) -> None:
    if costs.case not in (Case.TRADE, Case.DEAL) or math.isinf(costs.host):
        raise ValueError(f"expected C_gpu < C_cpu and C_loc < C_cpu, both finite, found {costs}")
