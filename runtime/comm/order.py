"""One thread that issues all collectives of a GPU rank, in one order that the ranks share.

NCCL wants the collectives of a GPU issued in the same order on all ranks. The thread that makes
batches and the one that trains come as they come, so neither issues any: a third thread does, in
the order

    X0 X1 R0 X2 R1 X3 R2 ...

where Xt are the meetings of batch t with the other ranks (exchanges of rows, common draws), and Rt
all that training sends in step t. So the exchange of batch t + 1 runs beside the compute of step t,
each on its caller's stream, and one NCCL communicator serves both (DEC-113).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gnnplan.runtime.errors import GnnplanError

T = TypeVar("T")
JOIN_SECONDS = 5.0


class _Turn:
    """Call for the issuing thread, with its outcome once it is done."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self.body = body
        self.taken = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.result = self.body()
        except BaseException as error:
            self.error = error


class CollectiveOrder:
    """Issuer of a rank's collectives; outside of an iteration, training's come as they come."""

    def __init__(self, meetings: int, enter: Callable[[], None]) -> None:
        """Start the thread, which calls `enter` first; each batch has `meetings` of them."""
        self._meetings = meetings
        self._enter = enter
        self._changed = threading.Condition()
        self._steps = self._met = self._trained = 0
        self._active = self._leaving = self._closed = False
        self._failure: BaseException | None = None
        self._batches: dict[int, _Turn] = {}
        """Meetings that are asked for, by their number in the iteration."""
        self._training: list[_Turn] = []
        self._thread = threading.Thread(target=self._issue, name="collectives", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        """Identifier of the issuing thread."""
        return self._thread.ident

    def begin(self, steps: int) -> None:
        """Begin an iteration over that many batches."""
        with self._changed:
            self._steps, self._met, self._trained = steps, 0, 0
            self._active, self._leaving, self._failure = True, False, None

    def next_step(self) -> None:
        """End what training sends in a step."""
        with self._changed:
            self._trained += 1
            self._changed.notify_all()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """End the iteration; in the body batches under way meet, and training sends nothing."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._active = False
                self._changed.notify_all()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Make a batch; where that fails, training does not wait for its meetings."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            raise

    def meet(self, step: int, place: int, body: Callable[[], T]) -> T:
        """Carry out meeting number `place` of the iteration's batch `step`, in its turn."""
        task = _Turn(body)
        with self._changed:
            self._batches[step * self._meetings + place] = task
            return self._wait_for(task)

    def train(self, body: Callable[[], T]) -> T:
        """Carry out a collective of the training thread, or of a meeting, in its turn."""
        if threading.current_thread() is self._thread:
            return body()
        task = _Turn(body)
        with self._changed:
            if not self._closed:
                self._training.append(task)
                return self._wait_for(task)
        return body()

    def close(self) -> bool:
        """End the thread; return False where it is stuck in a collective and left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()

    def _wait_for(self, task: _Turn) -> Any:
        self._changed.notify_all()
        while not task.done:
            if not task.taken and self._closed:
                raise GnnplanError("the loader was closed before its batch met the other ranks'")
            if task in self._training and self._failure is not None and not self._may_train():
                self._training.remove(task)
                raise GnnplanError("a batch ahead cannot be made") from self._failure
            self._changed.wait()
        if task.error is not None:
            raise task.error
        return task.result

    def _may_train(self) -> bool:
        ahead = self._meetings * min(self._trained + 2, self._steps)
        return not self._active or (not self._leaving and self._met >= ahead)

    def _may_meet(self) -> bool:
        turn = self._met // self._meetings
        return not self._active or self._leaving or turn <= self._trained + 1

    def _next(self) -> _Turn | None:
        if self._training and self._may_train():
            return self._training.pop(0)
        if self._met in self._batches and self._may_meet():
            self._met += 1
            return self._batches.pop(self._met - 1)
        return None

    def _issue(self) -> None:
        self._enter()
        while True:
            with self._changed:
                while self._closed or (task := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                task.taken = True
            task.run()
            with self._changed:
                task.done = True
                self._changed.notify_all()
            del task  # what it made must not live until the next one comes
