"""Typed collectives of one process group, which meter calls, bytes and seconds by stage.

A `Communicator` wraps a torch.distributed group (gloo between CPU ranks, nccl between GPUs). Every
rank calls the same collectives in the same order, with empty arguments where it has nothing to
send; a second thread needs a `duplicate`. One rank alone sends nothing and needs no
torch.distributed. On a GPU calls go to the current stream, and their seconds are those of handing
them over; bytes are exact everywhere.

A GPU's communicator has two lanes. Tensors of the GPU go by its own; objects, barriers and what the
host counts go by `host_lane`, over gloo. A tensor on the wrong lane is refused (DEC-112).

Between hosts an all-to-all goes message by message, with receives begun first. gloo sends data once
the receiver is ready, and its own all-to-all begins each send before the receive, so that the two
directions of a card follow each other (DEC-84; benchmark `tests.benchmarks.exchange`). Small
messages begin with the send: nothing then arrives meanwhile, which would busy a rank's only core.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.errors import CollectiveError
from gnnplan.runtime.process import batch_threads
from gnnplan.runtime.processor import EMULATED, processor_of
from gnnplan.runtime.stages import Stage

_log = logging.getLogger(__name__)
T = TypeVar("T")
RECEIVE_FIRST_BYTES = 1 << 20
"""Size from which a message's time on the link exceeds what is lost at its begin."""


def exchange_pairwise(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: Sequence[int],
    counts: Sequence[int],
    group: Any,
) -> None:
    """Fill `received` as `all_to_all_single` does; every rank of the group calls it.

    Both tensors are contiguous on the host, rows for or from rank 0 first; the group is gloo's.
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
"""Callable that gets each collective's stage, elapsed seconds and bytes sent by this rank."""


@dataclass(slots=True)
class Traffic:
    """Calls, bytes and seconds of one stage through a communicator."""

    calls: int = 0
    sent_bytes: int = 0
    """Bytes handed over for other ranks; an all-reduce counts its tensor once."""
    seconds: float = 0.0
    """Elapsed seconds, with the wait for the slowest rank."""


class Pending:
    """Collective under way."""

    def __init__(self, work: Any = None) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when its result may be used by the host, or on a GPU by the current stream."""
        if self._work is not None:
            self._work.wait()


class Communicator:
    """Collectives of one process group, metered by stage."""

    def __init__(
        self,
        group: Any = None,
        *,
        device: torch.device | None = None,
        meter: MeterHook | None = None,
        between_hosts: bool = False,
        give_way: bool = True,
    ) -> None:
        """Wrap a process group; None is the default group, or one rank alone where none exists.

        `device` is the rank's; None takes the current GPU where the group serves GPUs alone, else
        the CPU. `between_hosts` makes rows go pair by pair. With `give_way`, network threads of
        further groups push nobody off a core (`batch_threads`).
        """
        self._group = group
        self._between_hosts = between_hosts
        self._give_way = give_way
        self._meter = meter
        self._joined = dist.is_available() and dist.is_initialized()
        self._lock = threading.Lock()
        self._traffic: dict[Stage, Traffic] = {}
        self._owned = False
        self._host_lane: Communicator | None = None
        self._order: CollectiveOrder | None = None
        self.rank = dist.get_rank(group) if self._joined else 0
        self.size = dist.get_world_size(group) if self._joined else 1
        self._device = _sending_device(group, device) if self._joined else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Device of tensors to send: the rank's GPU with nccl, else the CPU."""
        return self._device

    @property
    def between_gpus(self) -> bool:
        """Whether it sends tensors of GPUs, which all ranks must do in one order."""
        return self.size > 1 and processor_of(self.device).is_gpu

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph may hold its collectives.

        gloo's are the host's work; those of an order come in its turns, which a replay cannot keep.
        """
        return self.size == 1 or (self.between_gpus and self._order is None)

    def follow(self, order: CollectiveOrder | None) -> None:
        """Issue further collectives of tensors by an order's thread; None: by the caller's."""
        self._order = order
        thread = None if order is None else order.thread_id
        processor_of(self.device).issue_collectives_from(thread)

    def _issue(self, call: str, tensor: torch.Tensor, body: Callable[[], T]) -> T:
        """Make a call that carries a tensor: between GPUs in the order's turn, by their rules."""
        if not self.between_gpus:
            return body()
        processor = processor_of(self.device)
        if not processor.holds(tensor):
            raise CollectiveError(
                f"expected a tensor on {self.device} to send between GPUs, found one on "
                f"{tensor.device}; move it there, or send it by the host's lane"
            )

        def checked() -> T:
            processor.check_collective(self._group, call, tensor)
            return body()

        return checked() if self._order is None else self._order.train(checked)

    def enter_thread(self) -> None:
        """Make the GPU current in this thread; a thread other than the first calls this first."""
        processor_of(self.device).enter_thread()

    @property
    def host_lane(self) -> "Communicator":
        """Communicator of the same ranks for tensors of the host, metered with this one.

        Its first use makes a group, where this one's serves GPUs alone: collective.
        """
        if not self.between_gpus:
            return self
        if self._host_lane is None:
            lane = Communicator(
                self._host_group(),
                device=torch.device("cpu"),
                meter=self._meter,
                between_hosts=self._between_hosts,
                give_way=self._give_way,
            )
            lane._lock, lane._traffic = self._lock, self._traffic
            self._host_lane = lane
        return self._host_lane

    def _host_group(self) -> Any:
        """Return the group where it serves processors too, else a new one of its ranks."""
        if "cpu" in devices_served(self._group):
            return self._group
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        with batch_threads() if self._give_way else nullcontext():
            # Only its own ranks call it, perhaps while others make other groups.
            return dist.new_group(
                ranks, backend="gloo", use_local_synchronization=True, timeout=job_timeout()
            )

    @property
    def traffic(self) -> dict[Stage, Traffic]:
        """Copy of the calls, bytes and seconds so far, by stage."""
        with self._lock:
            return {
                stage: Traffic(each.calls, each.sent_bytes, each.seconds)
                for stage, each in self._traffic.items()
            }

    def stage_seconds(self, stage: Stage) -> float:
        """Return the elapsed seconds of a stage's collectives so far."""
        with self._lock:
            return self._traffic[stage].seconds if stage in self._traffic else 0.0

    def duplicate(self) -> "Communicator":
        """Make a communicator of the same ranks, with traffic of its own; collective.

        It has its own process group: two threads of a rank may each use one without agreeing on an
        order. Between GPUs it shares the group, and a `CollectiveOrder` keeps threads apart.
        """
        if self.size == 1:
            return Communicator(self._group, meter=self._meter)
        if self.between_gpus:
            return self._of_group(self._group, owned=False)
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        (group,) = self._new_groups([ranks])
        return self._of_group(group)

    def split(self, groups: Sequence[Sequence[int]]) -> "Communicator":
        """Make a communicator of this rank's group among `groups`; collective.

        Every rank passes the same groups, which hold each rank once. A rank's place in its group is
        its new number.
        """
        if self.size == 1:
            return Communicator(self._group, meter=self._meter)
        members = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        made = self._new_groups([[members[rank] for rank in group] for group in groups])
        place = next(place for place, group in enumerate(groups) if self.rank in group)
        return self._of_group(made[place])

    def _of_group(self, group: Any, *, owned: bool = True) -> "Communicator":
        made = Communicator(
            group,
            device=self.device,
            meter=self._meter,
            between_hosts=self._between_hosts,
            give_way=self._give_way,
        )
        made._owned = owned
        return made

    def _new_groups(self, groups: Sequence[Sequence[int]]) -> list[Any]:
        gloo = "gloo" in dist.get_backend_config(self._group)
        backend = None if self._group is None else dist.get_backend_config(self._group)
        with batch_threads() if gloo and self._give_way else nullcontext():
            limit = job_timeout()
            return [dist.new_group(list(ranks), backend=backend, timeout=limit) for ranks in groups]

    def close(self) -> None:
        """Destroy the process groups that this object, `duplicate` or `split` made."""
        lane, self._host_lane = self._host_lane, None
        if not dist.is_initialized():
            return
        if lane is not None and lane._group is not self._group:
            dist.destroy_process_group(lane._group)
        if self._owned:
            dist.destroy_process_group(self._group)
            self._owned = False

    def all_reduce_sum(
        self, tensor: torch.Tensor, *, stage: Stage = Stage.ALL_REDUCE
    ) -> torch.Tensor:
        """Replace a tensor by its sum over ranks, in place; return it."""
        with self._metered(stage, tensor.nbytes if self.size > 1 else 0):
            if self.size > 1:
                self._issue(
                    "all_reduce", tensor, lambda: dist.all_reduce(tensor, group=self._group)
                )
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, *, stage: Stage = Stage.ALL_REDUCE) -> Pending:
        """Begin an `all_reduce_sum`; metered seconds are those of handing it over."""
        work = None
        with self._metered(stage, tensor.nbytes if self.size > 1 else 0):
            if self.size > 1:
                work = self._issue(
                    "all_reduce",
                    tensor,
                    lambda: dist.all_reduce(tensor, group=self._group, async_op=True),
                )
        return Pending(work)

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int], *, stage: Stage = Stage.EXCHANGE_IDS
    ) -> tuple[torch.Tensor, list[int]]:
        """Send `counts[r]` ids to each rank r, and learn how many each rank sent here.

        Returns the received ids and their number by rank; ids for or from rank 0 come first.
        """
        sizes = torch.tensor(counts, dtype=torch.int64)
        if sizes.shape != (self.size,) or int(sizes.sum()) != ids.shape[0]:
            raise ValueError(f"expected {self.size} counts with sum {ids.shape[0]}, found {counts}")
        if self.size == 1:
            with self._metered(stage, 0):
                return ids, list(counts)
        with self._metered(stage, _sent_bytes(sizes.reshape(-1, 1), [1] * self.size, self.rank)):
            wanted, own = torch.empty_like(sizes, device=self.device), sizes.to(self.device)
            self._issue(
                "counts", own, lambda: dist.all_to_all_single(wanted, own, group=self._group)
            )
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

        Rows for or from rank 0 come first. `out` (sum(received_counts), ...) is filled and
        returned; None allocates it.
        """
        if out is None:
            out = rows.new_empty((sum(received_counts), *rows.shape[1:]))
        if self.size == 1:
            with self._metered(stage, 0):
                return out.copy_(rows)
        self._all_to_all(out, rows, received_counts, counts, stage)
        return out

    def start_all_to_all_rows(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        received_counts: Sequence[int],
        *,
        stage: Stage = Stage.EXCHANGE_ROWS,
    ) -> tuple[torch.Tensor, Pending]:
        """Begin an `all_to_all_rows` between GPUs; return the rows, which are there after a wait.

        Metered seconds are those of handing it over.
        """
        out = rows.new_empty((sum(received_counts), *rows.shape[1:]))
        splits = list(received_counts), list(counts)
        with self._metered(stage, _sent_bytes(rows, counts, self.rank)):
            work = self._issue(
                "all_to_all",
                rows,
                lambda: dist.all_to_all_single(
                    out, rows, *splits, group=self._group, async_op=True
                ),
            )
        return out, Pending(work)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_lane._group)
        return values

    def broadcast(
        self, tensor: torch.Tensor, source: int = 0, *, stage: Stage | None = None
    ) -> torch.Tensor:
        """Overwrite a tensor with that of this group's rank `source`; return it.

        With a stage it is metered there: the source counts its tensor once, the others nothing.
        """
        if stage is None:
            return self._broadcast(tensor, source)
        with self._metered(stage, tensor.nbytes if self.size > 1 and self.rank == source else 0):
            return self._broadcast(tensor, source)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if self.size > 1:
            self._issue(
                "broadcast",
                tensor,
                lambda: dist.broadcast(tensor, group=self._group, group_src=source),
            )
        return tensor

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the picklable value of this group's rank `source`."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.host_lane._group, group_src=source)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1 and not self.between_gpus:
            dist.barrier(group=self._group)
        elif self.size > 1:  # torch's barrier of a group that is bound to a GPU is the GPU's
            dist.all_reduce(torch.zeros(1), group=self.host_lane._group)

    def _all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        counts: Sequence[int],
        stage: Stage,
    ) -> None:
        into, splits = received, (list(received_counts), list(counts))
        with self._metered(stage, _sent_bytes(sent, counts, self.rank)):
            if sent.device != self.device:
                into, sent = torch.empty_like(received, device=self.device), sent.to(self.device)
            self._issue("all_to_all", sent, lambda: self._send_all(into, sent, *splits))
            if into is not received:
                received.copy_(into)

    def _send_all(
        self, into: torch.Tensor, sent: torch.Tensor, received: list[int], counts: list[int]
    ) -> None:
        if self._between_hosts and self.device.type == "cpu":
            exchange_pairwise(into, sent.contiguous(), received, counts, self._group)
        else:
            dist.all_to_all_single(into, sent, received, counts, group=self._group)

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


def job_timeout() -> timedelta | None:
    """Return the longest wait of the job's own group, which torch hands down to no other group.

    Only torch's private fields hold it: where they are gone, a line says so and None is returned.
    """
    world: Any = dist.group.WORLD
    why = "no backend for cpu or cuda"
    for place in ("cpu", "cuda"):
        try:
            return world._get_backend(torch.device(place)).options._timeout
        except RuntimeError:  # the group serves no such device
            continue
        except AttributeError as error:
            why = str(error)
    _log.warning(
        "the job's longest wait cannot be read from torch %s (%s): groups made later wait torch's "
        "default", torch.__version__, why,
    )  # fmt: skip
    return None


def devices_served(group: Any = None) -> set[str]:
    """Return the kinds of device whose tensors a group sends."""
    return {each.partition(":")[0] for each in dist.get_backend_config(group).split(",")}


def _sending_device(group: Any, device: torch.device | None) -> torch.device:
    """Return where a rank's tensors must lie to be sent: gloo takes a GPU's from the CPU."""
    for_gpus = "cpu" not in devices_served(group)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if for_gpus else EMULATED
    processor = processor_of(device)
    by_nccl = f"{device.type}:nccl" in dist.get_backend_config(group)
    return device if for_gpus or by_nccl or processor.emulated else torch.device("cpu")


def _sent_bytes(sent: torch.Tensor, counts: Sequence[int], rank: int) -> int:
    row_bytes = sent.element_size() * int(np.prod(sent.shape[1:]))
    return row_bytes * (sum(counts) - counts[rank])
