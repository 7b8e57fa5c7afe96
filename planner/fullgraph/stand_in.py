"""The ranks of a part, played by one process: what would arrive is rows of the right shape.

The runtime's own model and loop run on it unchanged; nothing is sent, so what is timed is a rank's
own work. How long a row is under way is priced from the machine's tables instead.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.comm.collectives import Communicator
from runtime.fullgraph.exchange import Exchange, Pending
from runtime.stages import Stage


class StandIn(Communicator):
    """A communicator of `size` ranks that answers for all others.

    Args:
        rank: the rank that is played.
        size: number of ranks.
        wanted: nodes that the others need of this rank, by receiver.
        wanted_counts: how many each needs.
    """

    def __init__(
        self, rank: int, size: int, wanted: NDArray[np.int64], wanted_counts: list[int]
    ) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._wanted = (torch.as_tensor(wanted), wanted_counts)
        self._rows: dict[int, Tensor] = {}

    def all_to_all_ids(
        self, ids: Tensor, counts: Sequence[int], *, stage: Stage = Stage.EXCHANGE_IDS
    ) -> tuple[Tensor, list[int]]:
        """What the others ask for when the parts are made."""
        del ids, counts, stage
        return self._wanted

    def all_to_all_rows(
        self,
        rows: Tensor,
        counts: Sequence[int],
        received_counts: Sequence[int],
        *,
        out: Tensor | None = None,
        stage: Stage = Stage.EXCHANGE_ROWS,
    ) -> Tensor:
        """Rows of the right number and width, in memory of their own, made once per width."""
        del counts, out, stage
        width, count = rows.shape[1], sum(received_counts)
        kept = self._rows.get(width)
        if kept is None or kept.shape[0] < count:
            kept = torch.randn(count, width, generator=torch.Generator().manual_seed(width))
            self._rows[width] = kept * 0.1
        return self._rows[width][:count]

    def all_reduce_sum(self, tensor: Tensor, *, stage: Stage = Stage.ALL_REDUCE) -> Tensor:
        """The tensor as it is."""
        del stage
        return tensor


@dataclass(slots=True)
class TimedPending(Pending):
    """Says how much work was done between the start of an exchange and the need for its rows."""

    started: float = 0.0

    def wait(self) -> Tensor:
        """The rows, and the window's end."""
        assert isinstance(self.exchange, TimedExchange)
        self.exchange.windows.append(time.perf_counter() - self.started)
        return Pending.wait(self)


class TimedExchange(Exchange):
    """An exchange that keeps the window of every call, in order."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.windows: list[float] = []

    def reset(self) -> None:
        """Start counting anew."""
        super().reset()
        self.windows = []

    def start(
        self, x: Tensor, send: Tensor | None, counts: Sequence[int], received_counts: Sequence[int]
    ) -> Pending:
        """Pack the rows as a rank does; the answer is there at once."""
        found = super().start(x, send, counts, received_counts)
        return TimedPending(self, found.rows, time.perf_counter())
