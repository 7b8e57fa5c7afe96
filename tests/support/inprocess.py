"""Collectives between threads of this process: grids of more ranks than a test may start.

The interface and the metering are the communicator's; a rank is a thread, and what it hands over
is copied, as over a wire.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from gnnplan.runtime.comm.collectives import Communicator, Pending
from gnnplan.runtime.stages import Stage

T = TypeVar("T")
PATIENCE_SECONDS = 300.0


class _Board:
    """Where the ranks of one group lay down what they send."""

    def __init__(self, size: int, turn: Any = None) -> None:
        self.size, self.turn = size, turn
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.parts: dict[tuple[int, tuple[int, ...]], _Board] = {}
        self.lock = threading.Lock()

    def part(self, turn: int, ranks: tuple[int, ...]) -> "_Board":
        """The board of a group, the same for all its ranks; `turn` numbers the splits."""
        with self.lock:
            return self.parts.setdefault((turn, ranks), _Board(len(ranks), self.turn))

    def meet(self) -> None:
        """Wait for all ranks of the group, which compute meanwhile."""
        if self.turn is not None:
            self.turn.release()
        try:
            self.barrier.wait(PATIENCE_SECONDS)
        finally:
            if self.turn is not None:
                self.turn.acquire()

    def abort(self) -> None:
        """Wake every rank that waits, here and in the groups."""
        self.barrier.abort()
        for part in self.parts.values():
            part.abort()


class InProcessCommunicator(Communicator):
    """One thread's rank."""

    def __init__(self, board: _Board, rank: int) -> None:
        super().__init__()
        self._board, self.rank, self.size = board, rank, board.size
        self._splits = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def _exchange(self, value: Any) -> list[Any]:
        board = self._board
        board.slots[self.rank] = value
        board.meet()
        values = list(board.slots)
        board.meet()
        return values

    def duplicate(self) -> "InProcessCommunicator":
        return self.split([range(self.size)])

    def split(self, groups: Sequence[Sequence[int]]) -> "InProcessCommunicator":
        ranks = next(tuple(group) for group in groups if self.rank in group)
        self._splits += 1
        return InProcessCommunicator(self._board.part(self._splits, ranks), ranks.index(self.rank))

    def close(self) -> None:
        """Threads hold nothing."""

    def all_reduce_sum(
        self, tensor: torch.Tensor, *, stage: Stage = Stage.ALL_REDUCE
    ) -> torch.Tensor:
        with self._metered(stage, tensor.nbytes if self.size > 1 else 0):
            parts = self._exchange(tensor.clone())
            tensor.copy_(torch.stack(parts).sum(0))
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor, *, stage: Stage = Stage.ALL_REDUCE) -> Pending:
        self.all_reduce_sum(tensor, stage=stage)
        return Pending()

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int], *, stage: Stage = Stage.EXCHANGE_IDS
    ) -> tuple[torch.Tensor, list[int]]:
        if len(counts) != self.size or sum(counts) != ids.shape[0]:
            raise ValueError(f"expected {self.size} counts with sum {ids.shape[0]}, found {counts}")
        with self._metered(stage, 8 * (self.size - 1)):
            received = [int(each[self.rank]) for each in self._exchange(list(counts))]
        return self.all_to_all_rows(ids, counts, received, stage=stage), received

    def all_to_all_rows(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        received_counts: Sequence[int],
        *,
        out: torch.Tensor | None = None,
        stage: Stage = Stage.EXCHANGE_ROWS,
    ) -> torch.Tensor:
        row_bytes = rows.element_size() * int(np.prod(rows.shape[1:]))
        sent_bytes = row_bytes * (sum(counts) - counts[self.rank])
        with self._metered(stage, sent_bytes):
            sent = self._exchange(list(torch.split(rows.clone(), list(counts))))
            parts = [each[self.rank] for each in sent]
            assert [part.shape[0] for part in parts] == list(received_counts)
            received = torch.cat(parts)
        return received if out is None else out.copy_(received)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._exchange(value)

    def broadcast(
        self, tensor: torch.Tensor, source: int = 0, *, stage: Stage | None = None
    ) -> torch.Tensor:
        del stage
        return tensor.copy_(self._exchange(tensor.clone())[source])

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self._exchange(value)[source]

    def barrier(self) -> None:
        self._exchange(None)


def run_in_process(
    size: int, body: Callable[[Communicator], T], *, in_turn: bool = False
) -> list[T]:
    """Run body(comm) as every rank, each on a thread; the results by rank.

    With `in_turn` one rank computes at a time, as Triton's interpreter needs.
    The first error of a rank is raised here; the others are woken from their collectives.
    """
    turn = threading.Lock() if in_turn else None
    board = _Board(size, turn)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            with turn or nullcontext():
                results[number] = body(InProcessCommunicator(board, number))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError) or not errors:
                errors.append(error)
            board.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results
