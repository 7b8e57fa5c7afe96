"""`gnnplan train`, `launch` (for a user's own script), `compare` and `tune`."""

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from gnnplan.planner.cli import remote
from gnnplan.planner.cli.common import (
    EmitOptions,
    HostOptions,
    JsonFlag,
    changed_flags,
    console,
    emit_json,
    flag_words,
    make_request,
    option_fields,
    print_answer,
    print_text,
    progress_bar,
    seconds_text,
    table_of,
    with_options,
)
from gnnplan.planner.cli.remote import ServerOption
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.queries.tuned import TuneRequest, TuneResult, train_and_keep, train_dataset
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.codec import write_text_atomically
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.launch.config import TrainOptions, read_trials
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.plan.setting import Setting, flat_values

if TYPE_CHECKING:
    from gnnplan.planner.queries.compare import Comparison
    from gnnplan.runtime.report import RunReport

DATASET_FILE = "graph.json"
"""File that tells a dataset from a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Flags of `gnnplan launch` that its job file repeats."""

    max_restarts: Annotated[
        int, Setting(help="Times that all ranks are started again after one failed.")
    ] = 0
    hang_seconds: Annotated[
        float, Setting(help="End a rank without a sign of life for this long; 0: never.")
    ] = 60.0
    force: Annotated[bool, Setting(help="Run although graph or machine changed.")] = False
    oversubscribe: Annotated[bool, Setting(help="Start more ranks than there are cores.")] = False


def register(parent: typer.Typer) -> None:
    """Add the verbs to the top level."""
    parent.command("train")(train_command)
    parent.command("compare")(compare_command)
    parent.command("tune")(tune_command)
    parent.command("launch", cls=_ScriptCommand)(launch_command)


@with_options(options=None, hosts=None, job=None, settings=make_request)
def train_command(
    plan: Annotated[
        Path,
        typer.Argument(help="Plan folder, or dataset to plan first (with --server a plan's id)."),
    ],
    *,
    options: TrainOptions,
    hosts: HostOptions,
    executor: Annotated[
        Literal["torchrun", "ray"],
        typer.Option(help="What starts the ranks; ray needs the extra gnnplan[ray]."),
    ] = "torchrun",
    address: Annotated[
        str | None, typer.Option(help="Ray cluster for --executor ray; default: a local one.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Also write a timeline for ui.perfetto.dev: predicted and measured stages by rank."
        ),
    ] = None,
    job: EmitOptions,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Of a dataset: machine file or preset; without it this machine, at rates that "
            "were measured before or of such hardware."
        ),
    ] = None,
    settings: PlanSettings,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train under a plan on its ranks; writes report.json and the run into the plan folder.

    A dataset is planned first, by the flags of `gnnplan plan`, into --output (NAME-plan here). Then
    training of ten minutes or more (--thorough: any) tries the next candidates for some steps each
    and keeps the fastest; with --resume the same dataset and flags go on in --output. For a plan of
    several hosts, run the same command on each with its own --node-rank.
    """
    check_trace_file(trace)
    of_ranks = {"--executor": executor != "torchrun", "--address": address is not None}
    of_ranks |= dict.fromkeys([*changed_flags(hosts), *changed_flags(job)], True)
    if (plan / DATASET_FILE).is_file():
        elsewhere = {"--server": server is not None, "--hosts": (settings.hosts or 1) > 1}
        _refuse_flags(plan, elsewhere | of_ranks | {"--output": False})
        out = job.output or Path(f"{plan.resolve().name}-plan")
        report = train_here(plan, settings, options, machine=machine, out=out, as_json=as_json)
        if trace is not None:
            write_trace(trace, load_plan(out), report)
        print_trained(report, out, as_json=as_json)
        return
    _refuse_settings(plan, settings, machine)
    job.refuse_unused()
    if server is not None:
        remote.refuse_local(server, {"--resume": options.resume} | of_ranks)
    elif job.emit is not None:
        if trace is not None:
            raise SettingsError(
                "--trace: expected a run here, found --emit; after the job, write it with "
                "`gnnplan report PLAN --trace FILE`"
            )
        before = [*flag_words(options), f"--rdzv-timeout={hosts.rdzv_timeout:g}"]
        job.write(load_plan(plan), plan, verb="train", before=before, script=[])
        return
    else:
        load_plan(plan)  # what is none is refused before anything heavy is imported
    with training_events(as_json, options.epochs, here=server is None) as on_event:
        if server is not None:
            report = remote.train(server, plan, options, on_event)
        elif executor == "ray":
            from gnnplan.runtime.launch.ray import train_on_ray

            report = train_on_ray(plan, address=address, progress=on_event, **asdict(options))
        elif options.resume and read_trials(plan / "run") is not None:
            report = train_and_keep(
                plan, None, progress=on_event, say=console(as_json).print, **asdict(options)
            )
        else:
            from gnnplan.runtime.launch.launch import train

            report = train(plan, place=hosts.place(), progress=on_event, **asdict(options))
    if trace is not None and server is not None:
        write_text_atomically(trace, remote.trace(server, plan, None))
    elif trace is not None:
        write_trace(trace, load_plan(plan), report)
    print_trained(report, plan, as_json=as_json)


def print_trained(report: "RunReport", plan: Path, *, as_json: bool) -> None:
    """Print a run's report as JSON, or its step and where the report is."""
    if as_json:
        emit_json(report)
        return
    from gnnplan.runtime.report import REPORT_FILE

    place = f"report in {plan}" if (plan / REPORT_FILE).is_file() else f"run of plan {plan}"
    how = "emulated step, no GPU's," if report.emulated else "measured step"
    step = f"{how} {seconds_text(report.step_seconds.median)}"
    step = step if report.step_seconds.count else "no step was left to take"
    tested = "" if report.test_score is None else f"test {report.metric} {report.test_score:.4f}; "
    console().print(f"{step}; {tested}{place}")


@contextmanager
def training_events(
    as_json: bool, epochs: int, *, here: bool = True
) -> Generator[Callable[[dict[str, object]], None]]:
    """Print a run's epochs and warnings, with a bar; gives what is called with each event.

    A run `here` that is stopped behind an epoch's end says how to go on.
    """
    screen, ended = console(as_json), False
    with progress_bar("train") as progress:

        def on_event(event: dict[str, object]) -> None:
            nonlocal ended
            ended |= event.get("event") == "epoch"
            if line := event_line(event):
                screen.print(line, markup=False)
            epoch, share = event.get("epoch"), event.get("share")  # the share is the epoch's
            if isinstance(epoch, int) and isinstance(share, float):
                progress(f"epoch {epoch}", (epoch + share) / epochs)

        try:
            yield on_event
        except KeyboardInterrupt:
            if here and ended:
                screen.print("epochs that ended are kept: add --resume to go on", markup=False)
            raise


def train_here(
    graph: Path,
    settings: PlanSettings,
    options: TrainOptions,
    *,
    machine: str | None,
    out: Path,
    as_json: bool,
) -> "RunReport":
    """Plan and train a dataset, and print what is said of it."""
    screen = console(as_json)

    def say(line: str) -> None:
        screen.print(line, markup=False, soft_wrap=True)

    with progress_bar("plan") as planning, training_events(as_json, options.epochs) as on_event:
        report = train_dataset(
            graph, settings, machine=machine, out=out, planning=planning, progress=on_event,
            say=say, **asdict(options),
        )  # fmt: skip
    if report.step_seconds.count:  # none where a run went on that had taken its last step
        from gnnplan.planner.queries.compare import compare

        plan = load_plan(out)
        for note in _add_factors(plan, report, compare(plan, report)).notes:
            say(f"note: {note}")
    return report


def _refuse_flags(graph: Path, given: dict[str, bool]) -> None:
    """Refuse what a training that plans for itself does not have."""
    if flags := [flag for flag, is_given in given.items() if is_given]:
        raise SettingsError(
            f"{graph}: expected a plan folder for {', '.join(flags)}, found a dataset; plan it "
            "first (gnnplan plan)"
        )


def _refuse_settings(plan: Path, settings: PlanSettings, machine: str | None) -> None:
    """Refuse planning flags beside a plan, which has them settled."""
    shared = {each.name for each in option_fields(TrainOptions)}
    before = flat_values(PlanSettings())
    flags = [
        each.flag
        for each in option_fields(PlanSettings)
        if each.name not in shared and flat_values(settings)[each.name] != before[each.name]
    ]
    if flags or machine is not None:
        raise SettingsError(
            f"{plan}: expected planning flags for a dataset alone, found "
            f"{', '.join(flags or ['--machine'])} and no {DATASET_FILE}; name the dataset, or plan "
            "again with them"
        )


def check_trace_file(file: Path | None) -> None:
    """Refuse a trace's file that is a folder, or whose folder is not there."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InputError(f"--trace {file}: expected a file in a folder that is there, found none")


def write_trace(file: Path, plan: Plan, report: "RunReport | None") -> None:
    """Write a plan's predicted steps, and a run's measured ones, for ui.perfetto.dev."""
    from gnnplan.planner.report.measured import chrome_trace

    write_text_atomically(file, json.dumps(chrome_trace(plan, report)) + "\n")


def event_line(event: dict[str, object]) -> str:
    """Return the line to print for an epoch, restart or warning; empty for other events."""
    if event.get("event") in ("restart", "warning", "ranks"):
        return str(event["line"])
    if event.get("event") != "epoch":
        return ""
    parts = [f"epoch {event['epoch']}"]
    for name in ("loss", "val", "test", "seconds"):
        value = event.get(name)
        if isinstance(value, float):
            parts.append(f"{name} {value:.4f}" if name != "seconds" else seconds_text(value))
    return "  ".join(parts)


class _ScriptCommand(TyperCommand):
    """A command that leaves all words after the script's name to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = self._script_at(args)
        # A user's own "--" before the script says the same.
        own = [] if "--" in args[:place] else ["--"]
        return super().parse_args(ctx, [*args[:place], *own, *args[place:]])

    def _script_at(self, args: Sequence[str]) -> int:
        """Return the position of the second word that is no option and no option's value."""
        flags = {name for p in self.params if getattr(p, "is_flag", False) for name in p.opts}
        words, takes_value = 0, False
        for place, word in enumerate(args):
            if word == "--" and not takes_value:
                return place + 1
            if takes_value:
                takes_value = False
            elif word.startswith("-") and word != "-":
                takes_value = word not in flags and "=" not in word and word != "--help"
            elif words:
                return place
            else:
                words += 1
        return len(args)


@with_options(options=None, hosts=None, job=None)
def launch_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder.")],
    script: Annotated[Path, typer.Argument(help="Training script, Python.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the script as they are.")
    ] = None,
    *,
    options: LaunchOptions,
    hosts: HostOptions,
    job: EmitOptions,
) -> int:
    """Run a training script on the plan's ranks; options come before the script's name.

    In the script, PlannedLoader() reads the plan. The exit code is that of the rank that failed
    first.
    """
    job.refuse_unused()
    found, words = load_plan(plan), arguments or []
    if job.emit is not None:
        before = [*flag_words(options), f"--rdzv-timeout={hosts.rdzv_timeout:g}"]
        job.write(found, plan, verb="launch", before=before, script=[str(script), *words])
        return 0
    from gnnplan.runtime.launch.script import launch_script

    return launch_script(plan, script, words, place=hosts.place(), **asdict(options))


def compare_command(
    plan: Annotated[
        Path, typer.Argument(help="Plan folder that was trained (with --server also an id).")
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a run's report.json (with --server: a run's id); default: the "
            "plan's own (with --server: its newest that has succeeded)."
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Predicted against measured, per stage."""
    if server is not None:  # that machine's factors are learnt there, not here
        result = remote.comparison(server, plan, run)
    else:
        from gnnplan.planner.queries.compare import compare
        from gnnplan.runtime.report import load_report

        found, report = load_plan(plan), load_report(plan if run is None else run)
        result = _add_factors(found, report, compare(found, report))
    print_answer(result, print_comparison, as_json=as_json)


def _add_factors(plan: Plan, report: "RunReport", result: "Comparison") -> "Comparison":
    """Add the machine's updated calibration factors, and alarms as notes."""
    if plan.strategy.mode == "full-graph" or plan.strategy.emulated:
        return result  # factors are those of mini-batches on this machine's own processors
    from gnnplan.planner.profile.cache import load_record, record_path
    from gnnplan.planner.queries.calibrate import refit

    used = load_record(plan).factors if record_path(plan.plan_id).is_file() else {}
    try:
        factors, alarms = refit(result, report, plan, used)
    except OSError as error:
        return replace(result, notes=[*result.notes, f"factors were not kept: {error}"])
    return replace(result, factors=factors, notes=[*result.notes, *alarms])


def print_comparison(result: "Comparison") -> None:
    """Print predicted and measured seconds per stage, step and epoch."""
    found = "emulated" if result.emulated else "measured"
    rows = [
        (name, seconds_text(row.predicted), seconds_text(row.measured), f"{row.ape:.0%}")
        for name, row in result.stages.items()
    ]
    for name, total in (("step", result.step_seconds), ("epoch", result.epoch_seconds)):
        interval = f" ({seconds_text(total.low)} - {seconds_text(total.high)})"
        predicted = seconds_text(total.predicted) + interval
        rows.append((name, predicted, seconds_text(total.measured), f"{total.ape:.0%}"))
    console().print(table_of(("", "predicted", found, "off by"), rows))
    if result.minor_stages:
        rows = [
            f"{name} {seconds_text(row.predicted)} / {seconds_text(row.measured)}"
            for name, row in result.minor_stages.items()
        ]
        print_text("below 2% of the step: " + ", ".join(rows))
    for note in result.notes:
        sys.stderr.write(f"note: {note}\n")


def tune_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder.")],
    top: Annotated[int, typer.Option(help="Candidates to measure.")] = 3,
    to_accuracy: Annotated[
        float | None,
        typer.Option(
            help="Instead of seconds per step: seconds of training until this validation score, "
            "for candidates whose statistics differ."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Whole batches of each run after its warm-up.")] = 40,
    rounds: Annotated[int, typer.Option(help="Runs of each candidate, taken in turn.")] = 2,
    epochs: Annotated[int, typer.Option(help="Most epochs of a run with --to-accuracy.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the order in which candidates run.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Plan folder to write; default: replace PLAN."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the best candidates briefly, in turn, and keep the fastest."""
    asked = TuneRequest(
        top=top, steps=steps, rounds=rounds, seed=seed, target=to_accuracy, epochs=epochs
    )
    from gnnplan.planner.request import check_output

    load_plan(plan)
    output = output or plan
    check_output(output, in_place=True)
    from gnnplan.planner.queries.tune import tune

    with progress_bar("tune") as progress:
        found = tune(plan, asked, output=output, progress=progress)
    print_answer(found, lambda it: print_tuned(it, output), as_json=as_json)


def print_tuned(found: TuneResult, folder: Path) -> None:
    """Print predicted and measured seconds per candidate, and which one is kept."""
    rows = list[tuple[str, ...]]()
    for row in found.candidates:
        way = row.to_accuracy
        reached = "" if way is None else "never" if way.seconds is None else f"{way.seconds:.1f} s"
        name = ("* " if row.plan_id == found.plan_id else "  ") + row.name
        predicted, measured = seconds_text(row.predicted.value), seconds_text(row.measured.median)
        rows.append((name, predicted, measured, f"{row.ape:.0%}", reached))
    console().print(table_of(("", "predicted", "measured", "off by", "to score"), rows))
    print_text(f"kept, in {folder}: {found.kept}")
    regret = found.model_regret
    words = "never got to the score" if regret is None else f"measured {regret:.1%} longer"
    if found.model_choice == found.kept:
        words = "is the one that is kept"
    print_text(f"the model's choice {words}: {found.model_choice}")
    for note in found.notes:
        sys.stderr.write(f"note: {note}\n")
