"""Memory control groups with a limit, made for a test or a benchmark and removed again (Linux).

Both versions: under version 1 the group is a child of this process's own; under version 2 it is one
of a group whose children are given the memory controller.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gnnplan.runtime.limits import memory_group

EMPTY_SECONDS = 10.0
"""Wait for killed processes to leave their group."""


class NoGroups(Exception):  # noqa: N818  a state of the machine, told to the reader
    """Groups cannot be made here; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitedGroup:
    """A group with a limit."""

    folder: Path
    version: int

    def join_words(self) -> str:
        """What a shell says to enter it."""
        return f"echo $$ > {self.folder}/cgroup.procs"

    def processes(self) -> list[str]:
        """Process numbers of those in it now."""
        return (self.folder / "cgroup.procs").read_text().split()

    def kills(self) -> int:
        """Processes of it that the out-of-memory killer has ended."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        words = (self.folder / name).read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def charged_bytes(self) -> int:
        """Bytes it is charged now, pages of files included."""
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.folder / name).read_text())


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[LimitedGroup]:
    """A group with that limit.

    Raises:
        NoGroups: none can be made; the text says why.
    """
    own = memory_group()
    if own is None:
        raise NoGroups("control groups do not account memory here")
    if os.geteuid() != 0:
        raise NoGroups("only root may make a control group here")
    version = 1 if (own.folder / "memory.limit_in_bytes").exists() else 2
    folder = _parent(own.folder, version) / f"gnnplan-{uuid.uuid4().hex[:8]}"
    limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes))
    except OSError as error:
        raise NoGroups(f"{folder}: a control group cannot be made ({error})") from None
    group = LimitedGroup(folder=folder, version=version)
    try:
        yield group
    finally:
        end = time.monotonic() + EMPTY_SECONDS
        while group.processes() and time.monotonic() < end:
            time.sleep(0.02)
        folder.rmdir()


def _parent(own: Path, version: int) -> Path:
    """Where a group can be made whose memory is limited.

    Raises:
        NoGroups: version 2, and no group above hands the controller to its children.
    """
    if version == 1:
        return own
    # A group with processes of its own cannot limit its children, so this one's siblings are tried.
    for each in (own, own.parent):
        control = each / "cgroup.subtree_control"
        if control.exists() and "memory" in control.read_text().split():
            return each
    raise NoGroups(
        f"{own}: neither it nor its parent gives the memory controller to its children "
        "(cgroup.subtree_control)"
    )
