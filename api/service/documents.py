"""Documents of plans kept ready in memory: plans never change, so they are read once."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from runtime import codec

MOST_BYTES = 64 * 2**20


def as_json(value: Any) -> bytes:
    """A document in its own order, which is the one it is shown in; ours on disk are sorted."""
    return json.dumps(codec.to_plain(value), allow_nan=False).encode()


class Documents:
    """The documents asked for last, up to a number of bytes. Safe to use from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._size = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._forgotten = 0
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        """The document of that name, if it is here."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            return found

    def get_or_make(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The document of that name, made where it is not here."""
        found, forgotten = self.get(name), self._forgotten
        if found is None:
            found = make()
            self._put(name, found, forgotten)
        return found

    def forget(self, prefix: str) -> None:
        """Drop every document whose name begins so."""
        with self._lock:
            self._forgotten += 1
            for name in [n for n in self._kept if n.startswith(prefix)]:
                self._size -= len(self._kept.pop(name))

    def _put(self, name: str, document: bytes, forgotten: int) -> None:
        with self._lock:
            if forgotten != self._forgotten:
                return  # it may be of a plan that was removed while the document was made
            old = self._kept.pop(name, b"")
            self._kept[name] = document
            self._size += len(document) - len(old)
            while self._size > self._most:
                _, dropped = self._kept.popitem(last=False)
                self._size -= len(dropped)
