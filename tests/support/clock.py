"""Clocks for tests: time passes only where a test says so.

A module that reads `time.perf_counter()` is given one in place of its name `time`.
"""

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest


class FakeClock(threading.local):
    """Stands for the module `time`: a thread's seconds pass by its own `sleep` and `work` alone."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def lasts(
        self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, seconds: float
    ) -> None:
        """Make a function or method take so many seconds, and do what it does."""
        done = getattr(owner, name)

        def takes(*arguments: Any, **named: Any) -> Any:
            self.work(seconds)
            return done(*arguments, **named)

        monkeypatch.setattr(owner, name, takes)

    def perf_counter(self) -> float:
        """Elapsed seconds."""
        return self.now

    monotonic = perf_counter

    def thread_time(self) -> float:
        """Seconds of work."""
        return self.worked

    def sleep(self, seconds: float) -> None:
        """Let time pass without work."""
        self.now += seconds

    def work(self, seconds: float) -> None:
        """Let time pass in which the thread works."""
        self.now += seconds
        self.worked += seconds


class TickingClock(threading.local):
    """Stands for the module `time`: each look at a thread's clock is a second after its last."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Elapsed seconds."""
        self.now += 1.0
        return self.now

    def thread_time(self) -> float:
        """Elapsed seconds, without a look at the clock."""
        return self.now

    monotonic = thread_time


class Simulation:
    """Threads in simulated time: one runs until it sleeps or waits, then the earliest that can.

    Stands for the module `time`, and `executor` for ThreadPoolExecutor. Threads that are not its
    own may not use it, but for the one that made it.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._order = 0
        self._ready: list[tuple[float, int, threading.Event]] = []
        self._turns = threading.local()
        self._turns.mine = threading.Event()

    def perf_counter(self) -> float:
        """Simulated seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Give the turn away until so many seconds have passed."""
        self._wake(self._turns.mine, seconds)
        self._give_away()

    def executor(self, threads: int, **_: Any) -> "SimulatedExecutor":
        """One thread of the simulation for each piece of work; pools have one thread here."""
        assert threads == 1
        return SimulatedExecutor(self)

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` by a new thread, from this moment on."""
        turn = threading.Event()

        def run() -> None:
            self._turns.mine = turn
            turn.wait()
            turn.clear()
            work()
            self._next()

        self._wake(turn, 0.0)
        threading.Thread(target=run, daemon=True).start()

    def wait(self, waiting: list[threading.Event]) -> None:
        """Give the turn away until `wake_all` is called with the same list."""
        waiting.append(self._turns.mine)
        self._give_away()

    def wake_all(self, waiting: list[threading.Event]) -> None:
        """Let those that wait go on, in their order, once this thread gives its turn away."""
        while waiting:
            self._wake(waiting.pop(0), 0.0)

    def _wake(self, turn: threading.Event, after: float) -> None:
        self._order += 1
        heapq.heappush(self._ready, (self.now + after, self._order, turn))

    def _give_away(self) -> None:
        mine = self._turns.mine
        self._next()
        mine.wait()
        mine.clear()

    def _next(self) -> None:
        self.now, _, turn = heapq.heappop(self._ready)
        turn.set()


class SimulatedExecutor(Executor):
    """What `concurrent.futures` has for one thread, in simulated time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin the work by a thread of its own; `result` waits for it in simulated time."""
        future = SimulatedFuture(self._simulation)

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            self._simulation.wake_all(future.waiting)

        self._simulation.start(run)
        return future


class SimulatedFuture(Future[Any]):
    """Waits in simulated time."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self.waiting: list[threading.Event] = []

    def result(self, timeout: float | None = None) -> Any:
        """The result, when it is there."""
        if not self.done():
            self._simulation.wait(self.waiting)
        return super().result(timeout)


class FairLock:
    """A lock of a simulation, given to who has waited longest."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._held = simulation, False
        self._waiting: list[threading.Event] = []

    def __enter__(self) -> None:
        if self._held:
            self._simulation.wait(self._waiting)  # handed over, never free between
        self._held = True

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            first = [self._waiting.pop(0)]
            self._simulation.wake_all(first)
        else:
            self._held = False
