"""How often a client may ask: a bucket of tokens each, refilled at a steady rate."""

import time
from dataclasses import dataclass

MOST_CLIENTS = 10_000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    seen: float


class RateLimit:
    """A rate for each of many names; bursts of twice a second's worth."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._most = max(1.0, 2 * per_second)
        self._buckets: dict[str, _Bucket] = {}

    def wait_seconds(self, name: str) -> float:
        """Take a token; 0 where there was one, else the seconds until there is."""
        now = time.monotonic()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= MOST_CLIENTS:
                self._forget(now)
            bucket = self._buckets[name] = _Bucket(self._most, now)
        bucket.tokens = min(self._most, bucket.tokens + (now - bucket.seen) * self._rate)
        bucket.seen = now
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return 0.0
        return (1.0 - bucket.tokens) / self._rate

    def _forget(self, now: float) -> None:
        """Drop whose bucket is full again; all of them where an attacker has filled the table."""
        full = self._most / self._rate
        self._buckets = {n: b for n, b in self._buckets.items() if now - b.seen < full}
        if len(self._buckets) >= MOST_CLIENTS:
            self._buckets.clear()
