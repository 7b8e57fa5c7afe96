"""Rules of NCCL for an emulated GPU's collectives, which gloo carries and would not hold.

Its calls must come in the same order on all ranks, which one thread alone can promise, and a rank
that calls something else than the others waits for ever. Each call is therefore looked at before it
is made: which thread makes it, and whether all ranks make the same one (DEC-112).
"""

import threading
from typing import Any

import torch
import torch.distributed as dist

from gnnplan.runtime.comm.collectives import job_timeout
from gnnplan.runtime.errors import CollectiveError


class CollectiveRules:
    """What one rank has called so far, and who may call."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._sides: dict[tuple[int, ...], Any] = {}
        self.calls = 0
        """Number of calls that kept the rules."""

    def issue_from(self, thread: int | None) -> None:
        """Let a thread make all calls from here on; None: the one that makes the next."""
        self._thread = thread

    def check(self, group: Any, call: str, tensor: torch.Tensor) -> None:
        """Refuse a call from another thread, or one that other ranks do not make now; collective.

        CollectiveError is raised on every rank where their calls differ.
        """
        here = threading.get_ident()
        if self._thread is None:
            self._thread = here
        if here != self._thread:
            raise CollectiveError(
                f"{call}: expected all collectives of a GPU to come from one thread, found one "
                f"from {threading.current_thread().name}; issue it by the order's thread"
            )
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        mine = self._signature(group, call, tensor)
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, mine, group=self._side(ranks))
        for rank, theirs in zip(ranks, found, strict=True):
            if theirs != found[0]:
                raise CollectiveError(
                    f"expected all ranks to make the same collective, found {found[0]} on rank "
                    f"{ranks[0]} and {theirs} on rank {rank}; issue them in one order"
                )
        self.calls += 1

    def _signature(self, group: Any, call: str, tensor: torch.Tensor) -> str:
        shape = list(tensor.shape)
        if call == "all_to_all":
            shape[:1] = []  # ranks send different numbers of rows
        whole: Any = dist.group.WORLD
        name = (group or whole).group_name
        return f"{call} of {tensor.dtype} {shape} in group {name}"

    def _side(self, ranks: tuple[int, ...]) -> Any:
        """Return the group by which these ranks compare, whichever group they call in."""
        if ranks not in self._sides:
            self._sides[ranks] = dist.new_group(
                list(ranks), backend="gloo", use_local_synchronization=True, timeout=job_timeout()
            )
        return self._sides[ranks]
