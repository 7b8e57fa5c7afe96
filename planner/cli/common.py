"""What every command shares: where output goes, sizes, and progress bars."""

import os
import sys
import textwrap
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gnnplan.planner.cost.memory import GIB
from gnnplan.runtime import codec

if TYPE_CHECKING:
    from gnnplan.runtime.launch.hosts import Place

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, all else on stderr.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """Flags of a command that several hosts run together."""

    node_rank: Annotated[
        int, typer.Option(help="Number of this host, from 0, where several take part.")
    ] = 0
    rdzv_endpoint: Annotated[
        str,
        typer.Option(help="HOST:PORT on host 0 where the hosts meet; the same text on every host."),
    ] = ""
    rdzv_timeout: Annotated[
        float, typer.Option(help="Longest wait for the other hosts, in seconds.")
    ] = 300.0

    def place(self) -> "Place":
        """This host's place in a job."""
        from gnnplan.runtime.launch.hosts import Place

        return Place(
            node_rank=self.node_rank, endpoint=self.rdzv_endpoint, wait_seconds=self.rdzv_timeout
        )


def console(as_json: bool = False) -> Console:
    """Where tables go: stdout, or stderr when stdout carries JSON."""
    return Console(stderr=as_json, highlight=False)


def print_text(text: str, *, as_json: bool = False) -> None:
    """Print text, its long lines broken between words at the terminal's width.

    Lines go on where they began, two columns further in. Where the width is not known, in a file
    or a pipe without $COLUMNS, lines stay whole.
    """
    screen = console(as_json)
    known = screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    lines = text.split("\n")
    if known:
        lines = [part for line in lines for part in wrapped(line, screen.width)]
    screen.print("\n".join(lines), markup=False, soft_wrap=True)


def wrapped(line: str, width: int) -> list[str]:
    """A line in parts of at most a width, broken between words; longer words stay whole.

    >>> wrapped("  memory: 10.0 GB of 80 GiB", 20)
    ['  memory: 10.0 GB of', '    80 GiB']
    """
    if len(line) <= width:
        return [line]
    start = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line.strip(),
        max(width, len(start) + 20),
        initial_indent=start,
        subsequent_indent=start + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def emit_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(codec.dumps(value))
    sys.stdout.flush()


@contextmanager
def progress_bar(title: str) -> Generator[ProgressCallback, None, None]:
    """A progress bar on stderr; silent where stderr is not a terminal."""
    screen = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as bar:
        task = bar.add_task(title, total=1.0)

        def update(what: str, share: float) -> None:
            bar.update(task, description=f"{title}: {what}", completed=min(share, 1.0))

        yield update


def bytes_text(value: float) -> str:
    """Bytes for a reader: 1.50 GB; memories of whole GiB as they are sold: 80 GiB."""
    if value >= GIB and value % GIB == 0:
        return f"{value // GIB:.0f} GiB"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    """Seconds for a reader: 12.3 ms."""
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.2f} ms"
    return f"{value * 1e6:.1f} us"
