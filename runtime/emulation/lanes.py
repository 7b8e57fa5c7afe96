"""Lanes of an emulated GPU: what each one's work comes after.

Work is done when it is issued, which hides what a GPU would show: a lane that reads what another
lane has not written yet. So lanes count their work, and know how much of each other's work comes
before their own. A wait for a mark hands that knowledge on, and a wait of the host gives it to the
host's thread, whose later work comes after it in whatever lane.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

Clock = dict[str, int]
"""By lane, how much of its work is known to be done or to be waited for."""


class OrderError(RuntimeError):
    """A GPU might do this before what it rests on: the lanes do not wait for each other."""


class DeviceLanes:
    """The lanes of one device; the lane named "" is the one that threads use without asking."""

    def __init__(self) -> None:
        self._seen: dict[str, Clock] = {}
        self._everyone: Clock = {}
        self._here = threading.local()
        self._lock = threading.RLock()

    @property
    def current(self) -> str:
        """The lane that this thread's work goes to."""
        return getattr(self._here, "lane", "")

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        """Send this thread's work to a lane."""
        before, self._here.lane = self.current, lane
        try:
            yield
        finally:
            self._here.lane = before

    def issue(self) -> Clock:
        """Count one more piece of work of the current lane; return what comes before it."""
        with self._lock:
            seen = self._known(self.current)
            seen[self.current] = seen.get(self.current, 0) + 1
            return dict(seen)

    def mark(self) -> Clock:
        """Return the point that the current lane's work has come to."""
        with self._lock:
            return dict(self._known(self.current))

    def wait(self, mark: Clock) -> None:
        """Let the current lane's further work come after a mark."""
        with self._lock:
            _join(self._known(self.current), mark)

    def tell_thread(self, mark: Clock) -> None:
        """Note that this thread of the host has waited for a mark."""
        known = self._thread()
        _join(known, mark)

    def tell_everyone(self) -> None:
        """Note that the host has waited for all work of all lanes."""
        with self._lock:
            for seen in self._seen.values():
                _join(self._everyone, seen)

    def host_knows(self, lane: str, count: int) -> bool:
        """Tell whether this thread of the host has waited for that much of a lane's work."""
        return max(self._thread().get(lane, 0), self._everyone.get(lane, 0)) >= count

    def lane_knows(self, lane: str, other: str, count: int) -> bool:
        """Tell whether a lane's next work comes after that much of another one's."""
        with self._lock:
            return self._known(lane).get(other, 0) >= count

    def _thread(self) -> Clock:
        if not hasattr(self._here, "known"):
            self._here.known = Clock()
        return self._here.known

    def _known(self, lane: str) -> Clock:
        seen = self._seen.setdefault(lane, {})
        _join(seen, self._everyone)
        _join(seen, self._thread())
        return seen


def _join(clock: Clock, other: Clock) -> None:
    for lane, count in other.items():
        clock[lane] = max(clock.get(lane, 0), count)
