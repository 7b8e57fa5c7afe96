"""Thin typed collectives that meter their stage: calls, bytes sent and elapsed seconds.

A `Communicator` wraps one torch.distributed process group (gloo between CPU ranks, nccl between
GPUs). Every rank must call the same collectives in the same order, with empty arguments where it
has nothing to send. With one rank nothing is sent and torch.distributed need not be initialised.

Beside the training thread, a thread with a `duplicate` of its own keeps its own order. On a GPU,
calls go to the current stream (`with torch.cuda.stream(side)`), and their seconds are those of
handing them over; bytes are exact everywhere.

An all-to-all between hosts, message by message: both directions of a card at once.

gloo sends data when the receiver's "ready" has come, and sends its own "ready" when a receive is
begun. Its all-to-all begins each send before the receive, so that the rank that comes last answers
with its data and lets its own "ready" wait behind them: the two directions then follow each other.
With the receives begun first they run side by side (DEC-84; benchmark `tests.benchmarks.exchange`).

Small messages begin with the send. Then nothing arrives while it is written, which would keep a
rank's only core busy with asking for it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gnnplan.runtime.cores import batch_threads
from gnnplan.runtime.processor import EMULATED, processor_of
from gnnplan.runtime.stages import Stage

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


MeterHook = Callable[[Stage, float, int], None]
"""Called after each collective with its stage, elapsed seconds and bytes sent by this rank."""


@dataclass(slots=True)
class Traffic:
    """What one stage sent through a communicator."""

    calls: int = 0
    sent_bytes: int = 0
    """Bytes this rank handed over for other ranks (an all-reduce counts its tensor once)."""
    seconds: float = 0.0
    """Elapsed, the wait for the slowest rank included."""


class Pending:
    """A collective that is under way."""

    def __init__(self, work: Any = None) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when its result may be used: by the host, or on a GPU by the current stream."""
        if self._work is not None:
            self._work.wait()


class Communicator:
    """The collectives of one process group, metered by stage."""

    def __init__(
        self,
        group: Any = None,
        *,
        meter: MeterHook | None = None,
        between_hosts: bool = False,
        give_way: bool = True,
    ) -> None:
        """Wrap a process group; None is the default group, or one rank alone where none exists.

        Args:
            group: of torch.distributed.
            meter: told of every collective.
            between_hosts: some of the ranks are on other hosts: rows go pair by pair (`pairwise`).
            give_way: network threads of further groups push nobody off a core (`batch_threads`).
        """
        self._group = group
        self._between_hosts = between_hosts
        self._give_way = give_way
        self._meter = meter
        self._joined = dist.is_available() and dist.is_initialized()
        self._lock = threading.Lock()
        self._traffic: dict[Stage, Traffic] = {}
        self._owned = False
        self.rank = dist.get_rank(group) if self._joined else 0
        self.size = dist.get_world_size(group) if self._joined else 1

    @property
    def device(self) -> torch.device:
        """Where tensors must lie to be sent: the GPU with nccl or emulated, else the CPU."""
        if self._joined and dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return EMULATED if processor_of(EMULATED).emulated else torch.device("cpu")

    @property
    def traffic(self) -> dict[Stage, Traffic]:
        """Calls, bytes and seconds so far, by stage (a copy)."""
        with self._lock:
            return {
                stage: Traffic(each.calls, each.sent_bytes, each.seconds)
                for stage, each in self._traffic.items()
            }

    def duplicate(self) -> "Communicator":
        """A communicator of the same ranks on a process group of its own.

        Two threads of a rank may each use one, without having to agree on an order. Collective:
        every rank of the job must call it.
        """
        if self.size == 1:
            return Communicator(self._group, meter=self._meter)
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        (group,) = self._new_groups([ranks])
        twin = Communicator(
            group,
            meter=self._meter,
            between_hosts=self._between_hosts,
            give_way=self._give_way,
        )
        twin._owned = True
        return twin

    def split(
        self, groups: Sequence[Sequence[int]], *, on_one_host: bool = False
    ) -> "Communicator":
        """A communicator, on a process group of its own, of the ranks that this rank is among.

        Collective: every rank calls it with the same groups, which hold each rank once.

        Args:
            groups: ranks of this communicator; a rank's place in its group is its new number.
            on_one_host: no group has ranks of several hosts.
        """
        if self.size == 1:
            return Communicator(self._group, meter=self._meter)
        members = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        made = self._new_groups([[members[rank] for rank in group] for group in groups])
        place = next(place for place, group in enumerate(groups) if self.rank in group)
        part = Communicator(
            made[place],
            meter=self._meter,
            between_hosts=self._between_hosts and not on_one_host,
            give_way=self._give_way,
        )
        part._owned = True
        return part

    def _new_groups(self, groups: Sequence[Sequence[int]]) -> list[Any]:
        """Process groups of these ranks of the job, by the backend that the job has."""
        gloo = dist.get_backend() == "gloo"
        with batch_threads() if gloo and self._give_way else nullcontext():
            return [dist.new_group(list(ranks)) for ranks in groups]

    def close(self) -> None:
        """Destroy the process group, if `duplicate` or `split` made it."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._owned = False

    def all_reduce_sum(
        self, tensor: torch.Tensor, *, stage: Stage = Stage.ALL_REDUCE
    ) -> torch.Tensor:
        """Replace a tensor by its sum over ranks, in place; returns it."""
        with self._metered(stage, tensor.nbytes if self.size > 1 else 0):
            if self.size > 1:
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, *, stage: Stage = Stage.ALL_REDUCE) -> Pending:
        """As `all_reduce_sum`, under way until the pending's `wait`.

        Its seconds are those of handing it over.
        """
        work = None
        with self._metered(stage, tensor.nbytes if self.size > 1 else 0):
            if self.size > 1:
                work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return Pending(work)

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int], *, stage: Stage = Stage.EXCHANGE_IDS
    ) -> tuple[torch.Tensor, list[int]]:
        """Send `counts[r]` ids to each rank r, and learn how many each rank sent here.

        Args:
            ids: int64, shape (sum(counts),), those for rank 0 first.
            counts: one per rank; zeros are allowed.
            stage: where the call is metered.

        Returns:
            The ids received, those of rank 0 first, and how many came from each rank.
        """
        sizes = torch.tensor(counts, dtype=torch.int64)
        if sizes.shape != (self.size,) or int(sizes.sum()) != ids.shape[0]:
            raise ValueError(f"expected {self.size} counts with sum {ids.shape[0]}, found {counts}")
        if self.size == 1:
            with self._metered(stage, 0):
                return ids, list(counts)
        with self._metered(stage, _sent_bytes(sizes.reshape(-1, 1), [1] * self.size, self.rank)):
            wanted = torch.empty_like(sizes, device=self.device)
            dist.all_to_all_single(wanted, sizes.to(self.device), group=self._group)
            received_counts = wanted.tolist()
        received = ids.new_empty(sum(received_counts))
        self._all_to_all(received, ids, received_counts, counts, stage)
        return received, received_counts

    def all_to_all_rows(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        received_counts: Sequence[int],
        *,
        out: torch.Tensor | None = None,
        stage: Stage = Stage.EXCHANGE_ROWS,
    ) -> torch.Tensor:
        """Send `counts[r]` rows to each rank r and receive `received_counts[r]` from it.

        Args:
            rows: shape (sum(counts), ...), those for rank 0 first.
            counts: rows to send, per rank.
            received_counts: rows to receive, per rank.
            out: shape (sum(received_counts), ...), filled and returned; allocated where None.
            stage: where the call is metered.
        """
        if out is None:
            out = rows.new_empty((sum(received_counts), *rows.shape[1:]))
        if self.size == 1:
            with self._metered(stage, 0):
                return out.copy_(rows)
        self._all_to_all(out, rows, received_counts, counts, stage)
        return out

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value (picklable), in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_gather_array(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """Every rank's array, in rank order; lengths may differ, dtype and width may not."""
        return [np.asarray(each) for each in self.all_gather_objects(np.ascontiguousarray(array))]

    def broadcast(
        self, tensor: torch.Tensor, source: int = 0, *, stage: Stage | None = None
    ) -> torch.Tensor:
        """Overwrite a tensor with that of rank `source` of this group; returns it.

        With a stage it is metered there: the source counts its tensor once, the others nothing.
        """
        if stage is None:
            return self._broadcast(tensor, source)
        with self._metered(stage, tensor.nbytes if self.size > 1 and self.rank == source else 0):
            return self._broadcast(tensor, source)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value (picklable) of rank `source` of this group."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=source)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self._group)

    def _all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        counts: Sequence[int],
        stage: Stage,
    ) -> None:
        """All-to-all into `received`, by way of the device the group sends from."""
        into, splits = received, (list(received_counts), list(counts))
        with self._metered(stage, _sent_bytes(sent, counts, self.rank)):
            if sent.device != self.device:
                into, sent = torch.empty_like(received, device=self.device), sent.to(self.device)
            if self._between_hosts and self.device.type == "cpu":
                exchange_pairwise(into, sent.contiguous(), *splits, self._group)
            else:
                dist.all_to_all_single(into, sent, *splits, group=self._group)
            if into is not received:
                received.copy_(into)

    @contextmanager
    def _metered(self, stage: Stage, sent_bytes: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        with self._lock:
            each = self._traffic.setdefault(stage, Traffic())
            each.calls += 1
            each.sent_bytes += sent_bytes
            each.seconds += seconds
        if self._meter is not None:
            self._meter(stage, seconds, sent_bytes)


def _sent_bytes(sent: torch.Tensor, counts: Sequence[int], rank: int) -> int:
    """Bytes of the rows that leave this rank."""
    row_bytes = sent.element_size() * int(np.prod(sent.shape[1:]))
    return row_bytes * (sum(counts) - counts[rank])
