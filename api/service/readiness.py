"""Whether the service can do its work: keep what it is given, and run jobs."""

import threading
from collections.abc import Callable
from time import monotonic

from sqlalchemy.exc import SQLAlchemyError

KEPT_SECONDS = 2.0
"""An answer is given again for so long: whoever asks makes a disk wait otherwise."""


class Readiness:
    """The last answer, found anew by one caller at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[float, str] | None = None

    def why_not(self, check_writable: Callable[[], None]) -> str:
        """What cannot be written; empty where all can.

        Args:
            check_writable: writes, and raises OSError or SQLAlchemyError.
        """
        with self._lock:
            now = monotonic()
            if self._found is None or now - self._found[0] >= KEPT_SECONDS:
                self._found = now, _failure(check_writable)
            return self._found[1]


def _failure(check_writable: Callable[[], None]) -> str:
    try:
        check_writable()
    except OSError as error:
        return f"expected a data folder that can be written, found: {error.strerror or error}"
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or type(error).__name__).strip()
        return f"expected a database that can be written, found: {cause.splitlines()[0]}"
    return ""
