"""The `gnnplan` command: groups the verbs, and turns every failure into a line and an exit code.

Exit codes: 0 fine, 2 wrong input, 3 no feasible plan, 130 and 143 ended by SIGINT (Ctrl-C) or
SIGTERM, 1 anything else. `--json` prints one JSON document on stdout; everything else goes to
stderr.

A start imports the verb that is asked for and no other: `VERBS` says where each is.
"""

import errno
import importlib
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.runtime.errors import GnnplanError, InputError, did_you_mean

OF_PATHS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR,
    errno.EISDIR,
)  # fmt: skip
"""Errors of a path that cannot be what it is named for."""
HELP = "Plans and runs multi-GPU training of graph neural networks."
VERBS = {
    "doctor": ("machines", "What this machine can do, what is missing, what to change."),
    "probe": ("machines", "Measure this machine: memory, disk, exchange between ranks, sampling."),
    "estimate": (
        "machines",
        "What a training would take on each known machine, and cost; nothing is measured.",
    ),
    "plan": ("planning", "Find the plan with the lowest predicted time per step."),
    "explain": (
        "planning",
        "Why this many ranks, what fills memory, what would be faster; where the time goes.",
    ),
    "simulate": (
        "planning",
        "Count exactly what the plan's batches read, and model their time on a machine.",
    ),
    "why-not": (
        "planning",
        "Price the plan with another placement or other settings, and say what it would cost.",
    ),
    "diff": ("planning", "What two plans decide and predict differently."),
    "whatif": (
        "planning",
        "Plan again with something changed, by what is known; nothing is timed or written.",
    ),
    "report": ("planning", "Write a plan as one self-contained page: pictures, tables, reasons."),
    "train": (
        "training",
        "Train under a plan on its ranks; writes report.json and the run into the plan folder.",
    ),
    "compare": ("training", "Predicted against measured, per stage."),
    "tune": (
        "training",
        "Measure the best candidates briefly, in turn, and keep the fastest.",
    ),
    "launch": (
        "training",
        "Run a training script on the plan's ranks; options come before the script's name.",
    ),
    "demo": (
        "demo",
        "Generate a graph, probe, plan, train, and hold the prediction against what was measured.",
    ),
    "graph": ("graphs", "Generate, import and look at graph datasets."),
    "machine": ("machines", "Machines: presets and probed files."),
}
"""Module and first line of help of each verb."""


@cache
def _load(verb: str) -> Any:
    """Import a verb's module and make the command."""
    module = importlib.import_module(f"gnnplan.planner.cli.{VERBS[verb][0]}")
    alone = typer.Typer(rich_markup_mode=None, callback=_no_start)
    module.register(alone)
    alone.registered_commands = [x for x in alone.registered_commands if x.name == verb]
    alone.registered_groups = [x for x in alone.registered_groups if x.name == verb]
    return get_group(alone).commands[verb]


class _Verbs(Mapping[str, Any]):
    """Commands by verb, each imported when it is asked for."""

    def __getitem__(self, verb: str) -> Any:
        return _load(verb)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class _LazyGroup(TyperGroup):
    """Verbs that are listed without being imported."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Verbs()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the verb that is asked for; None where there is none."""
        del ctx
        return _load(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs with the first lines of their help."""
        listed = {v: TyperCommand(name=v, help=words) for v, (_, words) in VERBS.items()}
        TyperGroup(commands=dict(listed)).format_commands(ctx, formatter)


def _no_start() -> None:
    """Do nothing before a verb."""


app = typer.Typer(
    name="gnnplan",
    cls=_LazyGroup,
    help=HELP,
    callback=_no_start,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Behind `launch` a word may be the script's own.
    ours = 2 if "launch" in arguments[:2] else len(arguments)
    debug = "--debug" in arguments[:ours]
    arguments = [a for a in arguments[:ours] if a != "--debug"] + arguments[ours:]
    with _stop_signals() as came:
        try:
            code = app(arguments, standalone_mode=False)
        except KeyboardInterrupt:
            return _stopped(came[-1] if came else signal.SIGINT)
        except Exception as error:
            if debug:
                traceback.print_exc()
            return _stopped(came[-1]) if came else _report(error)
        return _stopped(came[-1]) if came else code if isinstance(code, int) else 0


@contextmanager
def _stop_signals() -> Generator[list[signal.Signals]]:
    """Let SIGTERM end a command as Ctrl-C does, so that it cleans up; give what came."""
    came, before = list[signal.Signals](), dict[signal.Signals, object]()

    def stop(number: int, _: FrameType | None) -> None:
        came.append(signal.Signals(number))
        raise KeyboardInterrupt

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    except ValueError:
        pass  # in a thread: signals are the main thread's
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]


def _stopped(number: signal.Signals) -> int:
    _say("interrupted" if number == signal.SIGINT else f"ended by {number.name}")
    return 128 + number


def run() -> None:
    """Run the command line of this process: entry point of the console script."""
    if "--debug" not in sys.argv:  # a user is told what is the matter, not the line that saw it
        warnings.formatwarning = _plain_warning
    if "probe" in sys.argv:  # which counts what its start took
        from gnnplan.planner.cli import machines
        from gnnplan.runtime.process import age_seconds

        with suppress(OSError, AttributeError):  # not on Linux
            machines.process_began = time.monotonic() - age_seconds()
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe went away (gnnplan ... | head): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)


def _plain_warning(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {message}\n"


def _report(error: Exception) -> int:
    usage = getattr(error, "format_message", None)
    if usage is not None:
        text = " ".join(str(usage()).split())
        if not text:  # `gnnplan` alone: the help was printed already
            return 2
        _say(f"{text}{_guess(text)} (see gnnplan --help)")
        return 2
    for kind, code in ((PlanDoesNotFit, 3), (InputError, 2), (GnnplanError, 1)):
        if isinstance(error, kind):
            _say(str(error))
            return code
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; the disk is full, nothing was written" if full else ""
        _say(f"{error.strerror or error}: {error.filename or ''}{advice}".replace(": ;", ";"))
        return 2 if full or error.errno in OF_PATHS else 1
    _say(f"{type(error).__name__}: {error} (run again with --debug for the traceback)")
    return 1


def _guess(text: str) -> str:
    """Return what a flag's word that is not among its choices may have meant."""
    found = re.search(r"'([^']*)' is not one of (.*)", text)
    return did_you_mean(found[1], re.findall(r"'([^']*)'", found[2])) if found else ""


def _say(text: str) -> None:
    sys.stderr.write(f"gnnplan: {text}\n")
