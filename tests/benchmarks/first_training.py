"""What `gnnplan train DATASET` costs and gains: seconds to the first step and to the plan it keeps.

    python -m tests.benchmarks.first_training --json [--graphs NAME,...] [--epochs 50]
        [--candidates 6] [--minutes M [--whole]] [--work FOLDER] [--data FOLDER]

Per graph, in processes of their own: a job of so many epochs under a plan that was there before
(nobody planned: what training alone takes), the same job by `gnnplan train DATASET`, and afterwards
short runs of the plan it kept and of the next candidates that train the same (all of them with
--candidates 999), those near the fastest once more in the other order.

Three lines per graph: seconds until the first step beside those of the job without planning;
seconds of the whole job beside it; and the step of the kept plan beside that of the best candidate
(`ratio` 1: nothing was faster; left out with --candidates 0). GNNPLAN_CACHE decides what is known
of the machine before.

With --minutes one line per graph instead, for a job of that predicted length: seconds until it
keeps a plan (`value`), those in which the job without planning comes to the same step (`baseline`),
and the difference as a share of the whole job. Both jobs are ended there. With --whole as well both
jobs run to their end, and `share` is by how much the planned one took longer.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gnnplan.planner.assemble import assemble
from gnnplan.planner.queries.compare import compare
from gnnplan.planner.queries.tune import shortlist
from gnnplan.planner.queries.whatif import reopen
from gnnplan.planner.search.choose import choose
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import check_alike
from gnnplan.runtime.launch.launch import EVENTS_FILE, train
from gnnplan.runtime.plan.io import copy_plan, load_plan, save_plan
from tests.benchmarks.common import record
from tests.benchmarks.first_answer import graphs
from tests.benchmarks.prediction_cases import default_data

PACKS = "amazon-computers,coauthor-physics,github-social,facebook-pages,wordnet-synsets"
STEPS = 40
CLI = (sys.executable, "-m", "gnnplan.planner")
NEAR = 1.25
"""Steps up to so many times the fastest are measured twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """One job, as seen from outside; seconds since its process began."""

    first_step: float
    kept: float | None
    """None where it tried nothing."""
    whole: float


def watch(command: list[str], run: Path) -> Watched:
    """Run a job, and note when its events say that it trains and that it keeps a plan."""
    seen, over = dict[str, float](), threading.Event()
    begun = time.perf_counter()

    def follow() -> None:
        place = 0
        while not over.is_set():
            with contextlib.suppress(FileNotFoundError), (run / EVENTS_FILE).open() as file:
                file.seek(place)
                lines, place = file.readlines(), file.tell()
                for event in ("step", "epoch", "kept"):
                    if any(f'"event": "{event}"' in line for line in lines):
                        seen.setdefault(event, time.perf_counter() - begun)
            over.wait(0.05)

    thread = threading.Thread(target=follow)
    thread.start()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    whole = time.perf_counter() - begun
    over.set()
    thread.join()
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    first = min(seen[each] for each in ("step", "epoch") if each in seen)
    return Watched(first_step=first, kept=seen.get("kept"), whole=whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Where a job was left: steps it had taken, and seconds since its process began."""

    steps: int
    seconds: float


def leave_at(command: list[str], run: Path, steps: int | None) -> Reached:
    """Run a job until it keeps a plan, or has taken so many steps, and end it there."""
    begun, events = time.perf_counter(), run / EVENTS_FILE
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while job.poll() is None:
            lines = events.read_text().splitlines()[:-1] if events.is_file() else []
            told = [json.loads(line) for line in lines if line.strip()]
            seconds = time.perf_counter() - begun
            for event in told:
                if steps is None and event["event"] == "kept":
                    return Reached(steps=int(event["step"]), seconds=seconds)
                if steps is not None and event["event"] == "step":
                    taken = event["epoch"] * event["steps"] + event["step"]
                    if taken >= steps:
                        return Reached(steps=taken, seconds=seconds)
            time.sleep(0.05)
        _, words = job.communicate()
        raise SystemExit(f"{' '.join(command)}: ended before: {words.strip()[-300:]}")
    finally:
        job.send_signal(signal.SIGINT)
        job.wait()


def plan_first(graph: Graph, work: Path) -> tuple[Path, Path]:
    """Write the plan of a job for which nobody plans; return it, and a free place for the other."""
    before, out = work / "before", work / "kept"
    for each in (before, out):
        shutil.rmtree(each, ignore_errors=True)
    subprocess.run(
        [*CLI, "plan", str(graph.path), "-o", str(before), "--quick"],
        check=True, capture_output=True,
    )  # fmt: skip
    return before, out


def epochs_of(minutes: float, before: Path) -> int:
    """Return the epochs of a job of so many minutes, by what its plan predicts."""
    return int(60 * minutes / load_plan(before).prediction.epoch_seconds.value) + 1


def hold_long(graph: Graph, name: str, work: Path, minutes: float) -> None:
    """Print what planning costs a job of so many minutes."""
    before, out = plan_first(graph, work)
    epochs = epochs_of(minutes, before)
    flags = [f"--epochs={epochs}"]
    planned = leave_at([*CLI, "train", str(graph.path), "-o", str(out), *flags], out / "run", None)
    plain = leave_at([*CLI, "train", str(before), *flags], before / "run", planned.steps)
    later = planned.seconds - plain.seconds
    record(
        f"{name}: planning of {minutes:g} minutes", planned.seconds, "s", baseline=plain.seconds,
        later=later, share=later / (60 * minutes), steps=planned.steps, baseline_steps=plain.steps,
        epochs=epochs, load=os.getloadavg()[0],
    )  # fmt: skip


def hold_whole(graph: Graph, name: str, work: Path, minutes: float) -> None:
    """Print what planning cost a job of so many minutes that ran to its end."""
    before, out = plan_first(graph, work)
    epochs = epochs_of(minutes, before)
    flags = [f"--epochs={epochs}"]
    planned = watch([*CLI, "train", str(graph.path), "-o", str(out), *flags], out / "run")
    plain = watch([*CLI, "train", str(before), *flags], before / "run")
    record(
        f"{name}: whole job of {minutes:g} minutes", planned.whole, "s", baseline=plain.whole,
        share=(planned.whole - plain.whole) / plain.whole, kept_after=planned.kept, epochs=epochs,
        load=os.getloadavg()[0],
    )  # fmt: skip


def alike(out: Path, most: int) -> list[Path]:
    """Write the first candidates that train the same as the kept plan, itself first."""
    kept = load_plan(out)
    search = reopen(kept)
    explored = search.explore()
    chosen = choose(explored.priced, search.request.machine.noise)
    place = out / "afterwards"
    shutil.rmtree(place, ignore_errors=True)
    made = [copy_plan(out, place / "0")]
    for each in shortlist(explored.priced, chosen, len(explored.priced)):
        if len(made) > most:
            break
        if each.refusal:
            continue
        plan = save_plan(*assemble(search, explored, each), place / str(len(made)))
        with contextlib.suppress(InputError):
            check_alike([kept, plan])
            if plan.plan_id not in {other.plan_id for other in made}:
                made.append(plan)
    return [place / str(number) for number in range(len(made))]


def step_seconds(place: Path) -> float:
    """Return a short run's median step."""
    plan = load_plan(place)
    epochs = -(-2 * STEPS // max(1, plan.prediction.steps_per_epoch))
    return compare(plan, train(place, epochs=epochs, max_steps=2 * STEPS)).step_seconds.measured


def measure_steps(places: list[Path]) -> list[float]:
    """Measure each plan's step once, and once more, backwards, what is the kept plan or near it."""
    rounds = [[step_seconds(place)] for place in places]
    near = NEAR * min(measured[0] for measured in rounds)
    for place, measured in reversed(list(zip(places, rounds, strict=True))):
        if measured[0] <= near or place is places[0]:
            measured.append(step_seconds(place))
    return [median(measured) for measured in rounds]


def hold(graph: Graph, name: str, work: Path, epochs: int, most: int) -> None:
    """Print the lines of one graph."""
    before, out = plan_first(graph, work)
    flags = [f"--epochs={epochs}"]
    plain = watch([*CLI, "train", str(before), *flags], before / "run")
    planned = watch([*CLI, "train", str(graph.path), "-o", str(out), *flags], out / "run")
    load = os.getloadavg()[0]
    record(
        f"{name}: first step", planned.first_step, "s", baseline=plain.first_step,
        later=planned.first_step - plain.first_step, kept_after=planned.kept, load=load,
    )  # fmt: skip
    record(
        f"{name}: whole job", planned.whole, "s", baseline=plain.whole,
        ratio=planned.whole / plain.whole, epochs=epochs,
    )  # fmt: skip
    if most == 0:
        return
    seconds = measure_steps(alike(out, most))
    tried = json.loads((out / "tune.json").read_text()) if (out / "tune.json").is_file() else None
    record(
        f"{name}: kept step", seconds[0], "s", baseline=min(seconds),
        ratio=seconds[0] / min(seconds), candidates=seconds,
        tried=None if tried is None else len(tried["candidates"]),
    )  # fmt: skip


def main() -> None:
    """Print three JSON objects per graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", required=True)
    parser.add_argument("--graphs", default=f"{PACKS},rmat-17,rmat-16")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--candidates", type=int, default=6)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--whole", action="store_true", help="with --minutes: to the job's end")
    parser.add_argument("--work", type=Path, default=Path("first_trainings"))
    parser.add_argument("--data", type=Path, default=default_data())
    options = parser.parse_args()
    for name, graph in graphs(options.graphs.split(","), options.work, options.data):
        if options.minutes is None:
            hold(graph, name, options.work, options.epochs, options.candidates)
        elif options.whole:
            hold_whole(graph, name, options.work, options.minutes)
        else:
            hold_long(graph, name, options.work, options.minutes)


if __name__ == "__main__":
    main()
