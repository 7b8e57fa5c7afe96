"""The folder in which the planner keeps what it has measured."""

import os
from pathlib import Path


def cache_path() -> Path:
    """$GNNPLAN_CACHE, or gnnplan in the user's cache folder, whether it is there or not."""
    given = os.environ.get("GNNPLAN_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "gnnplan"


def cache_folder() -> Path:
    """As `cache_path`; made if it is not there."""
    folder = cache_path()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
