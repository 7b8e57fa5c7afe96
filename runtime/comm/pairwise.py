"""An all-to-all between hosts, message by message: both directions of a card at once.

gloo sends data when the receiver's "ready" has come, and sends its own "ready" when a receive is
begun. Its all-to-all begins each send before the receive, so that the rank that comes last answers
with its data and lets its own "ready" wait behind them: the two directions then follow each other.
With the receives begun first they run side by side (DEC-84; benchmark `tests.benchmarks.exchange`).

Small messages begin with the send. Then nothing arrives while it is written, which would keep a
rank's only core busy with asking for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

RECEIVE_FIRST_BYTES = 1 << 20
"""From this size on a message's time on the link is longer than what is lost at its begin."""


def exchange_pairwise(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: Sequence[int],
    counts: Sequence[int],
    group: Any,
) -> None:
    """Fill `received` as `all_to_all_single` does; every rank of the group calls it.

    Args:
        received: contiguous, on the host, shape (sum(received_counts), ...).
        sent: likewise, shape (sum(counts), ...), the rows for rank 0 first.
        received_counts: rows that come from each rank; what that rank sends.
        counts: rows for each rank.
        group: a gloo group, None for the default one.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    incoming = torch.split(received, list(received_counts))
    outgoing = torch.split(sent, list(counts))
    works: list[Any] = []
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        into, data = incoming[source], outgoing[target]

        def receive(into: torch.Tensor = into, source: int = source) -> None:
            if into.nbytes:
                works.append(dist.irecv(into, group=group, group_src=source))

        def send(data: torch.Tensor = data, target: int = target) -> None:
            if data.nbytes:
                works.append(dist.isend(data, group=group, group_dst=target))

        first, second = receive, send
        if max(into.nbytes, data.nbytes) < RECEIVE_FIRST_BYTES:
            first, second = send, receive
        first()
        second()
    incoming[rank].copy_(outgoing[rank])
    for work in works:
        work.wait()
