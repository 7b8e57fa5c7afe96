"""Find the folder in which the planner keeps what it has measured."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

from gnnplan.runtime.errors import InputError

VARIABLE = "GNNPLAN_CACHE"


def cache_path() -> Path:
    """Return $GNNPLAN_CACHE, or gnnplan in the user's cache folder, whether it exists or not."""
    given = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "gnnplan"


def cache_folder() -> Path:
    """Return the folder of `cache_path`, made if it does not exist.

    Where the user's own cache folder cannot be written, a temporary folder takes its place until
    the process ends, and one line says so.

    Raises:
        InputError: GNNPLAN_CACHE names a folder that cannot be written.
    """
    folder = cache_path()
    why = _why_unusable(folder)
    if not why:
        return folder
    if os.environ.get(VARIABLE):
        raise InputError(
            f"{VARIABLE}: expected a folder that can be written, found {folder} ({why}); name "
            "another one, or unset it"
        )
    return _passing_folder(folder, why)


def _why_unusable(folder: Path) -> str:
    """Return why a folder cannot be made or written; empty where it can."""
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"


@functools.cache
def _passing_folder(folder: Path, why: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="gnnplan-cache-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    sys.stderr.write(
        f"gnnplan: {folder} cannot be used ({why}): planning without a cache, nothing measured is "
        f"kept; set {VARIABLE} to a folder that can be written\n"
    )
    return made
