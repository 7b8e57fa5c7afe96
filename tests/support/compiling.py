"""Test workers compile a kernel in turn: who waits for another one finds it in numba's cache."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

_held: set[str] = set()


def compile_in_turn(folder: Path) -> None:
    """Have this process hold a file in `folder` while it compiles a function.

    A function is compiled before those that call it, so that no two processes wait for each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numba_class: Any = Dispatcher
    compile_alone = numba_class.compile

    def compile_one(dispatcher: Any, signature: Any) -> Any:
        function = dispatcher.py_func
        name = f"{function.__module__}.{function.__qualname__}".replace("/", "_")
        with global_compiler_lock, _holding(folder / name):
            return compile_alone(dispatcher, signature)

    numba_class.compile = compile_one


@contextmanager
def _holding(path: Path) -> Iterator[None]:
    if path.name in _held:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _held.add(path.name)
        try:
            yield
        finally:
            _held.discard(path.name)
