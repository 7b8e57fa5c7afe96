"""A byte budget that refuses: what a tier holds is reserved first, and the sum is always known."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import BudgetExceeded


class ByteBudget:
    """Named parts of a fixed number of bytes; safe to use from several threads."""

    def __init__(self, limit_bytes: int, name: str) -> None:
        self.limit_bytes = limit_bytes
        self.name = name
        self.peak_bytes = 0
        self._parts: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return sum(self._parts.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit_bytes - self.used_bytes

    def reserve(self, part: str, num_bytes: int) -> None:
        """Add bytes to a part.

        Raises:
            BudgetExceeded: the parts would pass the limit; the text is the sum, nothing changed.
        """
        if num_bytes < 0:
            raise ValueError(f"expected bytes of at least 0, found {num_bytes}")
        with self._lock:
            parts = dict(self._parts)
            parts[part] = parts.get(part, 0) + num_bytes
            needed_bytes = sum(parts.values())
            if needed_bytes > self.limit_bytes:
                raise BudgetExceeded(f"{self.name}: {_sum_text(parts)} > {self.limit_bytes} bytes")
            self._parts = parts
            self.peak_bytes = max(self.peak_bytes, needed_bytes)

    def release(self, part: str, num_bytes: int) -> None:
        """Give bytes of a part back."""
        with self._lock:
            left_bytes = self._parts.get(part, 0) - num_bytes
            if left_bytes < 0:
                raise ValueError(f"{self.name}: {part} gives back more than it holds")
            self._parts[part] = left_bytes

    @contextmanager
    def holding(self, part: str, num_bytes: int) -> Iterator[None]:
        """Reserve for the length of a `with` block."""
        self.reserve(part, num_bytes)
        try:
            yield
        finally:
            self.release(part, num_bytes)


def _sum_text(parts: dict[str, int]) -> str:
    """For example: buffers 8192 + index 160 = 8352."""
    held = {name: value for name, value in parts.items() if value}
    terms = " + ".join(f"{name} {value}" for name, value in held.items())
    return f"{terms} = {sum(held.values())}"
