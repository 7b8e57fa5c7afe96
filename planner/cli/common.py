"""What commands share: flags of hosts, job files and settings, output, units and progress bars."""

import functools
import inspect
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_type_hints

import typer

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import PlanSettings, change_settings, check_values
from gnnplan.planner.units import AUTO, default_text, flag_help, is_repeated, is_text, read_texts
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.plan.setting import SettingField, make_from, setting_fields

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gnnplan.runtime.launch.hosts import Place

Answer = TypeVar("Answer")
Make = Callable[[Mapping[str, Any]], Any]
ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and its share that is done, 0 to 1."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, all else on stderr.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """Flags of commands that several hosts run together."""

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
        """Return this host's place in the job."""
        from gnnplan.runtime.launch.hosts import Place

        return Place(
            node_rank=self.node_rank, endpoint=self.rdzv_endpoint, wait_seconds=self.rdzv_timeout
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmitOptions:
    """Flags of a job file that is written in place of running."""

    emit: Annotated[
        Literal["slurm", "kubernetes"] | None,
        typer.Option("--emit", help="Write a job file for this scheduler instead of running."),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for --emit; default: stdout.")
    ] = None
    image: Annotated[
        str, typer.Option(help="Container image with gnnplan, for --emit kubernetes.")
    ] = "gnnplan:latest"
    claim: Annotated[
        str, typer.Option(help="Volume claim that holds the job's folders, for --emit kubernetes.")
    ] = "gnnplan-data"

    def refuse_unused(self) -> None:
        """Refuse flags of which nothing is in the job file, or that no job file is written for."""
        used = {None: (), "slurm": ("--output",), "kubernetes": ("--output", "--image", "--claim")}
        known = ["--emit", *used[self.emit]]
        if flags := [flag for flag in changed_flags(self) if flag not in known]:
            wanted = "--emit" if flags == ["--output"] else "--emit kubernetes"
            found = f"--emit {self.emit}" if self.emit else "none"
            raise SettingsError(
                f"{', '.join(flags)}: expected {wanted} beside it, found {found}; leave it out (a "
                "run is written into its plan's folder)"
            )

    def write(
        self, plan: Plan, folder: Path, *, verb: str, before: list[str], script: list[str]
    ) -> None:
        """Write the job that runs `gnnplan VERB [before] PLAN [script]` on the plan's hosts."""
        from gnnplan.planner.emit import JobSpec, kubernetes_job, slurm_script

        folder = folder.resolve()
        folders = [folder, Path(plan.graph.path)]
        if script:
            path = Path(script[0]).resolve()
            folders.append(path.parent)
            script = [str(path), *script[1:]]
        job = JobSpec(
            plan=plan,
            name=folder.name,
            verb=verb,
            arguments=[*before, str(folder), *script],
            resumes=verb == "train",
            folders=sorted(set(folders)),
        )
        if self.emit == "slurm":
            text = slurm_script(job)
        else:
            text = kubernetes_job(job, image=self.image, claim=self.claim)
        if self.output is None:
            sys.stdout.write(text)
        else:
            codec.write_text_atomically(self.output, text)


def changed_flags(options: Any) -> list[str]:
    """List the flags, of a dataclass of typer's own options, that are not at their default.

    >>> changed_flags(HostOptions(node_rank=1))
    ['--node-rank']
    """
    return [
        f"--{each.name.replace('_', '-')}"
        for each in fields(options)
        if getattr(options, each.name) != each.default
    ]


def with_options(**makers: Make | None) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Let a command take the fields of some of its parameters as options.

    Args:
        **makers: for each such parameter, what makes it of the given values; None: its class.

    A field of two of them is one flag, the first's.
    """

    def decorate(command: Callable[..., Answer]) -> Callable[..., Answer]:
        hints = get_type_hints(command, include_extras=True)

        own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**given: Any) -> Answer:
            made = {each.name: given[each.name] for each in own if each.name not in makers}
            for name, maker in makers.items():
                kind = hints[name]
                texts = {each.name: given[each.name] for each in _parameters(kind)}
                values = read_texts(kind, {k: v for k, v in texts.items() if v is not None})
                if maker is not None:
                    made[name] = maker(values)
                elif setting_fields(kind):
                    made[name] = make_from(kind, values)
                    check_values(made[name])
                else:
                    made[name] = kind(**texts)
            return command(**made)

        parameters: dict[str, inspect.Parameter] = {}
        for each in own:
            found = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            for one in _parameters(hints[each.name]) if each.name in makers else found:
                parameters.setdefault(one.name, one)
        run.__signature__ = inspect.Signature([*parameters.values()])  # pyright: ignore[reportAttributeAccessIssue] - what inspect reads
        return run

    return decorate


def make_request(values: Mapping[str, Any]) -> PlanSettings:
    """Make the request of the flags' values; full-graph training needs all neighbours."""
    asked = dict(values)
    if asked["mode"] == "full-graph" and asked["fanouts"] == Workload().fanouts:
        hops = asked.get("num_layers", len(asked["fanouts"]))
        asked["fanouts"] = [-1] * hops
    return change_settings(PlanSettings(), asked)


def option_fields(kind: type) -> Iterator[SettingField]:
    """Return the settings of a dataclass that are flags."""
    return (each for each in setting_fields(kind) if each.setting.surface != "service")


def _parameters(kind: type) -> list[inspect.Parameter]:
    """Return a command's parameters for a dataclass of settings or of typer's own options."""
    if settings := [_parameter(each) for each in option_fields(kind)]:
        return settings
    declared = inspect.signature(kind, eval_str=True).parameters.values()
    return [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in declared]


def flag_words(options: object) -> list[str]:
    """Return the flags that mean some settings; one that is None or False needs none.

    >>> from gnnplan.runtime.launch.config import TrainOptions
    >>> flag_words(TrainOptions(epochs=3, resume=True, eval_fanouts=[5, 3]))[:3]
    ['--epochs=3', '--resume', '--eval-fanouts=5,3']
    """
    words = list[str]()
    for field in option_fields(type(options)):
        value = getattr(options, field.name)
        if isinstance(value, bool):
            words += [field.flag] * value
        elif isinstance(value, list):
            words.append(f"{field.flag}={','.join(map(str, cast('list[int]', value)))}")
        elif value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            words.append(f"{field.flag}={shown}")
    return words


def _parameter(field: SettingField) -> inspect.Parameter:
    flag, default, hint = field.flag, field.default, field.hint
    if is_repeated(field):
        hint, default = list[str] | None, None
    elif is_text(field):
        hint = str
        default = default_text(field) or AUTO
    elif default is None:
        hint = hint | None
    elif default is True:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, typer.Option(flag, help=flag_help(field))],
    )


def console(as_json: bool = False) -> "Console":
    """Return where tables go: stdout, or stderr when stdout carries JSON."""
    from rich.console import Console  # on use: a start prints no table

    return Console(stderr=as_json, highlight=False)


def print_text(text: str, *, as_json: bool = False) -> None:
    """Print text, its long lines broken between words at the terminal's width.

    A broken line goes on two columns further in. Lines stay whole where the width is unknown, as in
    a file or a pipe without $COLUMNS.
    """
    screen = console(as_json)
    known = screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    lines = text.split("\n")
    if known:
        lines = [part for line in lines for part in wrap_line(line, screen.width)]
    screen.print("\n".join(lines), markup=False, soft_wrap=True)


def wrap_line(line: str, width: int) -> list[str]:
    """Break a line between words into parts of at most a width; longer words stay whole.

    >>> wrap_line("  memory: 10.0 GB of 80 GiB", 20)
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


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]], **looks: Any) -> "Table":
    """Make a table without borders; what is too long for a column goes on in its next line."""
    from rich.table import Column, Table

    headed = (Column(each, overflow="fold") for each in columns)
    table = Table(*headed, box=None, **looks)
    for row in rows:
        table.add_row(*row)
    return table


WIDE = 160
"""Columns of a wide table where the output is no terminal."""


def print_wide(*tables: "Table") -> None:
    """Print tables on wide lines where the output is no terminal and nobody says how wide it is."""
    screen = console()
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = WIDE
    for table in tables:
        screen.print(table)


def emit_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(codec.dumps(value))
    sys.stdout.flush()


def print_answer(found: Answer, describe: Callable[[Answer], str | None], *, as_json: bool) -> None:
    """Print an answer as JSON, or as `describe` says, which returns a text or prints it itself."""
    if as_json:
        emit_json(found)
    elif (text := describe(found)) is not None:
        print_text(text)


FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 5.0
"""Seconds of a job before its first line of progress, and between lines, where no terminal is."""


@contextmanager
def progress_bar(title: str) -> Generator[ProgressCallback, None, None]:
    """Show on stderr what is done, for how long and how long still: a bar, or lines elsewhere."""
    screen = console(as_json=True)
    if not screen.is_terminal:
        yield _line_progress(title, time.monotonic)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=screen,
        transient=True,
    ) as bar:
        pace, task = Pace(), bar.add_task(title, total=1.0, left="")

        def update(what: str, share: float) -> None:
            left = pace.left_words(time.monotonic(), share)
            bar.update(task, description=f"{title}: {what}", completed=min(share, 1.0), left=left)

        yield update


def _line_progress(title: str, clock: Callable[[], float]) -> ProgressCallback:
    """Return progress that prints a line now and then."""
    pace, begun = Pace(), clock()
    due = begun + FIRST_LINE_SECONDS

    def update(what: str, share: float) -> None:
        nonlocal due
        left = pace.left_words(now := clock(), share)
        if now < due:
            return
        due = now + LINE_SECONDS
        words = f"{title}: {what}; {now - begun:.0f} s so far{f', {left}' if left else ''}"
        print_text(words, as_json=True)

    return update


class Pace:
    """Pace of a job in the later half of the time since its first report.

    So the start of ranks, epochs before an interruption, and slow first steps are no part of it.
    """

    LEAST_SHARE = 0.05
    """Share of what was to do at the first report, of which the pace is told."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._seen: deque[tuple[float, float]] = deque()
        """Readings of the clock with the share done, from the later half's first on."""

    def left_words(self, now: float, share: float) -> str:
        """Write how long the job still takes; empty where too little is done to tell.

        >>> pace = Pace()  # 8 s of a start and 4 s of the first of ten steps, then 1 s each
        >>> pace.left_words(12.0, 0.1), pace.left_words(13.0, 0.2), pace.left_words(14.0, 0.3)
        ('', 'about 8 s left', 'about 7 s left')
        """
        first, begun = self._first = self._first or (now, share)
        self._seen.append((now, share))
        while self._seen[0][0] < (first + now) / 2 and self._seen[1][0] <= (first + now) / 2:
            self._seen.popleft()
        if share - begun < self.LEAST_SHARE * (1.0 - begun) or share >= 1.0:
            return ""
        since, done = self._seen[0] if self._seen[0][1] < share else (first, begun)
        return f"about {(now - since) * (1.0 - share) / (share - done):.0f} s left"


def bytes_text(value: float) -> str:
    """Write bytes for people: 1.50 GB; whole GiB, in which memories are sold: 80 GiB."""
    if value >= 2**30 and value % 2**30 == 0:
        return f"{value // 2**30:.0f} GiB"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    """Write seconds for people: 12.3 ms."""
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.2f} ms"
    return f"{value * 1e6:.1f} us"
