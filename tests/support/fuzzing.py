"""What every fuzz test holds a reader to: no surprise, no hang, no flood, no trace.

`$GNNPLAN_FUZZ_EXAMPLES` asks for that many examples of each test, drawn anew on each run; without
it a few are drawn, always the same ones.
"""

import os
import signal
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from gnnplan.runtime.errors import InputError

VARIABLE = "GNNPLAN_FUZZ_EXAMPLES"
MOST_SECONDS = 30.0
"""Processor time of one reading, so that a busy machine does not count."""
MOST_BYTES = 64 << 20
"""Memory of one reading; every source is under a mebibyte."""
LONGEST_LINE = 4000
WRITES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate")


def fuzzed(few: int) -> Callable[[Any], Any]:
    """Settings of a fuzz test that draws `few` examples unless more are asked for."""
    asked = os.environ.get(VARIABLE)
    return settings(
        max_examples=int(asked) if asked else few,
        derandomize=not asked,
        deadline=None,  # limits here are of processor time
        database=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        phases=(Phase.explicit, Phase.generate),
    )


def refused(read: Callable[[], Any], *, inside: Path | None = None) -> str | None:
    """The one line that a reader refuses its file with; None where it takes it.

    Args:
        read: the reading.
        inside: the only folder in which it may write.
    """
    text = None
    with limited(), watching_writes() as wrote, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except InputError as error:
            text = str(error)
    outside = [path for path in wrote if inside is None or not path.is_relative_to(inside)]
    assert outside == []
    assert text is None or (text and "\n" not in text and len(text) < LONGEST_LINE)
    return text


@contextmanager
def limited(*, memory: bool = True) -> Iterator[None]:
    """An error where what is inside takes too much processor time or memory.

    Args:
        memory: count it, which makes what allocates much take several times as long.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"more than {MOST_SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    most = 0
    if memory:
        tracemalloc.start()
    try:
        yield
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert most < MOST_BYTES, f"{most} bytes of memory"


_watchers: list[list[Path]] = []


@contextmanager
def watching_writes() -> Iterator[list[Path]]:
    """Paths that are opened for writing, made, renamed or removed inside."""
    if not _hooked:
        sys.addaudithook(_note)
        _hooked.append(True)
    wrote: list[Path] = []
    _watchers.append(wrote)
    try:
        yield wrote
    finally:
        _watchers.remove(wrote)


_hooked: list[bool] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook; it cannot be taken away again, so it looks who is watching."""
    if not _watchers:
        return
    paths: tuple[Any, ...] = ()
    if event == "open":
        path, mode, flags = arguments
        writes = any(c in "wax+" for c in mode or "") or bool(
            flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        paths = (path,) if writes else ()
    elif event in WRITES and not any(isinstance(a, int) and a >= 0 for a in arguments[-1:]):
        # A name beside a folder's descriptor is one inside a folder that was opened before.
        paths = tuple(a for a in arguments if isinstance(a, str | bytes | Path))
    for path in paths:
        # A number is a descriptor that was opened before; compiled kernels and code are caches.
        text = os.fsdecode(path) if isinstance(path, str | bytes | Path) else ""
        if text and "__pycache__" not in text and text != os.devnull:
            _watchers[-1].append(Path(text).absolute())
