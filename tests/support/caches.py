"""Dynamic caches simulated slowly: plain Python collections, one row at a time."""

from collections import OrderedDict
from collections.abc import Iterable


class SlowLru:
    """Rows by the batch of their last touch; a batch never evicts what it touches itself."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.rows: OrderedDict[int, None] = OrderedDict()

    def touch(self, batch: Iterable[int]) -> tuple[int, int]:
        """Distinct rows of a batch, and how many of them were there."""
        distinct = list(dict.fromkeys(int(v) for v in batch))
        found = [v for v in distinct if v in self.rows]
        for v in found:
            self.rows.move_to_end(v)
        room = self.num_slots - len(found)
        for v in [v for v in distinct if v not in self.rows][:room]:
            self.rows[v] = None
            if len(self.rows) > self.num_slots:
                self.rows.popitem(last=False)
        return len(distinct), len(found)

    def held(self) -> set[int]:
        return set(self.rows)


class SlowClock:
    """Slots as a list of [row, hit since the hand passed], and the hand."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.ring: list[list[int]] = []
        self.hand = 0

    def touch(self, batch: Iterable[int]) -> tuple[int, int]:
        """Distinct rows of a batch, and how many of them were there."""
        distinct = list(dict.fromkeys(int(v) for v in batch))
        found = {v for v in distinct if v in self.held()}
        for entry in self.ring:
            if entry[0] in found:
                entry[1] = 1
        pinned = set(found)
        for v in distinct:
            if v in found:
                continue
            if len(self.ring) < self.num_slots:
                self.ring.append([v, 0])
            elif self.held() <= pinned:
                break
            else:
                self._replace(v, pinned)
            pinned.add(v)
        return len(distinct), len(found)

    def _replace(self, v: int, pinned: set[int]) -> None:
        while True:
            at, self.hand = self.hand, (self.hand + 1) % self.num_slots
            row, hit = self.ring[at]
            if row in pinned:
                continue
            if not hit:
                self.ring[at] = [v, 0]
                return
            self.ring[at][1] = 0

    def held(self) -> set[int]:
        return {row for row, _ in self.ring}
