"""The files of a checkpoint folder, for those who need not read them: no torch here."""

import re
import shutil
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Folder within the run's."""
NAME = re.compile(r"checkpoint-(\d{10})-([0-9a-f]{12})\.pt")


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.name[:21], path.stat().st_mtime))


def newest_name(folder: Path) -> str:
    """File name of the newest checkpoint, whole or not; empty where there is none."""
    found = list_checkpoints(folder)
    return found[-1].name if found else ""


def set_aside(folder: Path) -> Path | None:
    """Move an earlier run's checkpoints away, so that a restart never takes them for its own.

    They lie in `<folder>.previous` then, in place of those that were set aside before.
    """
    if not list_checkpoints(folder):
        return None
    aside = folder.with_name(f"{folder.name}.previous")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside
