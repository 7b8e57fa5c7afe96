"""The second measured set: configurations drawn by the commit, planned and trained as users do.

    python -m tests.benchmarks.drawn --json [--seed TEXT] [--out RECORD.jsonl] [--configs 36]
        [--minutes 90] [--work FOLDER] [--data FOLDER] [--patience SECONDS] [--quick] [--list]
        [--summary]

The seed is the commit's hash ($GNNPLAN_COMMIT, else git's), so every commit draws new
configurations (`drawn_cases.py` states the distribution) and none can be tuned for. The first
complete run of a commit counts. Each configuration is planned by `gnnplan plan`, once more with
`--thorough` where the first answer was kept as an estimate; trained by `gnnplan train` for a
minute at most; and two in five of mini-batches are measured against their runners-up by `gnnplan
tune`. One line each is appended to RECORD, and a configuration that stands there is not run again:
a run that was stopped or killed goes on. No configuration is begun after --minutes.

Predictions are the planner's own, without factors. `calibrated` has what factors learnt from the
configurations before would have made of them (`gnnplan plan --calibrated`). Summary lines, once
all are done: step_ape_median, step_ape_p90, epoch_ape_median, epoch_ape_p90, regret_mean,
regret_worst, coverage90 (of steps; epochs beside) and failed. An interval is that of one run's
median, so each configuration is inside or not.
"""

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.assemble import candidate_of
from gnnplan.planner.machine.model import load_machine
from gnnplan.planner.profile.cache import load_record
from gnnplan.planner.queries.calibrate import calibrate_search, load_calibration, refit
from gnnplan.planner.queries.compare import Total, absolute_percentage_error, compare
from gnnplan.planner.queries.whatif import reopen
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import load_report
from tests.benchmarks.common import record
from tests.benchmarks.drawn_cases import Drawn, draw_case, make_graph
from tests.benchmarks.prediction import append, quiet
from tests.benchmarks.prediction_cases import default_data

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "tests" / "golden" / "benchmarks"
CONFIGURATIONS = 36
TUNED = (0, 2)
"""Numbers, modulo 5, that are measured against their runners-up, unless on whole graphs."""
MOST_SECONDS = 900.0
"""Of one command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long a configuration is measured."""

    steps: int
    """Least steps of a training."""
    seconds: float
    """Predicted seconds of a training, where that is more steps."""
    most_seconds: float
    tuned: int
    """Steps of a run of a runner-up."""
    rounds: int


FULL = Effort(steps=80, seconds=10.0, most_seconds=60.0, tuned=40, rounds=2)
QUICK = Effort(steps=12, seconds=0.5, most_seconds=5.0, tuned=2, rounds=1)
"""Shows that everything runs; its figures mean nothing."""


class CommandError(Exception):
    """A command ended otherwise than well."""


def run_gnnplan(*words: str) -> None:
    """Run the command that users run."""
    command = [sys.executable, "-m", "gnnplan.planner", *words, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise CommandError(f"gnnplan {words[0]} took more than {MOST_SECONDS:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise CommandError(f"gnnplan {words[0]} ended with {done.returncode}: {last}")


def epochs_of(plan: Plan, effort: Effort) -> int:
    """Epochs of a training: enough steps and seconds, and at least two where time allows."""
    epoch, steps = plan.prediction.epoch_seconds.value, plan.prediction.steps_per_epoch
    wanted = max(2, -(-effort.steps // max(1, steps)), round(effort.seconds / epoch))
    return max(1, min(wanted, int(effort.most_seconds / epoch)))


def held(total: Total) -> dict[str, Any]:
    """A predicted time beside the measured one."""
    return {
        "predicted": total.predicted,
        "low": total.low,
        "high": total.high,
        "measured": total.measured,
        "ape": total.ape,
        "inside": total.within_interval,
    }


def said(plan: Plan) -> dict[str, Any]:
    """A plan's own words of its step."""
    step = plan.prediction.step_seconds
    return {
        "step": step.value,
        "low": step.low,
        "high": step.high,
        "estimated": plan.prediction.estimated,
        "plan_id": plan.plan_id,
    }


def calibrated(plan: Plan) -> tuple[float | None, dict[str, float]]:
    """Step seconds with factors of the runs so far, and the factors; none for whole graphs."""
    if plan.strategy.mode == "full-graph":
        return None, {}
    factors = load_calibration(plan.machine.fingerprint).factors(plan.graph.fingerprint)
    search, settings = calibrate_search(reopen(plan), factors), load_record(plan).settings
    priced = search.price(candidate_of(plan, settings))
    return priced.prediction.step_seconds.value, factors


def tuned(plan: Plan, folder: Path, effort: Effort) -> dict[str, Any]:
    """The chosen plan's regret among the best predicted ones, and what all of them took."""
    steps = round(effort.seconds / plan.prediction.step_seconds.value)
    steps = max(5, min(effort.tuned, steps)) if effort is FULL else effort.tuned
    words = ["--top", "4", "--steps", str(steps), "--rounds", str(effort.rounds)]
    out = folder.with_name(f"{folder.name}-tuned")
    run_gnnplan("tune", str(folder), *words, "--output", str(out))
    found = json.loads((out / "tune.json").read_text())
    return {
        "regret": found["model_regret"],
        "candidates": {
            one["name"]: [one["predicted"]["value"], one["measured"]["median"]]
            for one in found["candidates"]
        },
    }


def measure(drawn: Drawn, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan, train and compare one configuration."""
    effort = QUICK if options.quick else FULL
    shutil.rmtree(work / "case", ignore_errors=True)
    graph, folder = work / "case" / "graph", work / "case" / "plan"
    graph.parent.mkdir(parents=True)
    make_graph(drawn, graph, options.data)
    asked = [str(graph), "-o", str(folder), "--machine", str(work / "machine.json"), *drawn.flags]
    run_gnnplan("plan", *asked)
    plan = load_plan(folder)
    first = said(plan)
    if plan.prediction.estimated:
        run_gnnplan("plan", *asked, "--thorough")
        plan = load_plan(folder)
    learnt, factors = calibrated(plan)
    run_gnnplan("train", str(folder), "--epochs", str(epochs_of(plan, effort)), "--eval-every", "0")
    report = load_report(folder)
    compared = compare(plan, report)
    total = compared.step_seconds
    line = {
        "value": total.measured,
        "unit": "s",
        "baseline": total.predicted,
        "ratio": total.predicted / total.measured,
        "step": held(total),
        "epoch": held(compared.epoch_seconds),
        "calibrated": learnt,
        "calibrated_ape": learnt and absolute_percentage_error(learnt, total.measured),
        "factors": factors,
        "first": first,
        "steps": report.step_seconds.count,
        "epochs": len(report.epochs),
        "load": report.noise.load_before,
        "steal": report.noise.steal_fraction,
        "notes": compared.notes,
    }
    if drawn.task != "full":
        refit(compared, report, plan, {})
        if drawn.number % 5 in TUNED:
            line |= tuned(plan, folder, effort)
    return line


def summarize(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What all configurations say together."""
    done = [line for line in lines if "step" in line]
    failed = [line["configuration"] for line in lines if "step" not in line]
    found = [record("failed", len(failed), "configurations", baseline=0, which=failed)]
    if not done:
        return found
    for of in ("step", "epoch"):
        errors = [line[of]["ape"] for line in done]
        learnt = [x for line in done if (x := line["calibrated_ape"]) is not None]
        for name, at, bar in (("median", 50, 0.10), ("p90", 90, 0.20)):
            beside = {"calibrated": float(np.percentile(learnt, at))} if of == "step" else {}
            found.append(
                record(f"{of}_ape_{name}", float(np.percentile(errors, at)), "share",
                       baseline=bar, configurations=len(done), **beside if learnt else {})
            )  # fmt: skip
    regrets = [line["regret"] for line in done if line.get("regret") is not None]
    for name, of, bar in (("mean", np.mean, 0.02), ("worst", np.max, 0.10)):
        if regrets:
            found.append(
                record(f"regret_{name}", float(of(regrets)), "share", baseline=bar,
                       configurations=len(regrets))
            )  # fmt: skip
    inside = {of: float(np.mean([line[of]["inside"] for line in done])) for of in ("step", "epoch")}
    found.append(
        record("coverage90", inside["step"], "share", baseline=0.9, epochs=inside["epoch"],
               configurations=len(done))
    )  # fmt: skip
    first = first_answers(done)
    if first:
        found.append(
            record("first_coverage90", float(np.mean(first)), "share", baseline=0.9,
                   configurations=len(first))
        )  # fmt: skip
    return found


def first_answers(lines: Sequence[dict[str, Any]]) -> list[bool]:
    """Tell of each configuration with an estimated first answer whether its interval held."""
    return [
        first["low"] <= line["value"] <= first["high"]
        for line in lines
        if (first := line.get("first")) and first["estimated"]
    ]


COLUMNS = (
    "| commit | planned | step off by, median / 90% | epoch | cost of the choice, mean / worst "
    "| steps in their interval | first answers in theirs |"
)


def table_row(out: Path) -> str:
    """Write a complete run's record as a row of docs/benchmarks.md."""
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    cases = [line for line in lines if "case" in line]
    done = [line for line in cases if "step" in line]
    step, epoch = ([line[of]["ape"] for line in done] for of in ("step", "epoch"))
    regrets = [line["regret"] for line in done if line.get("regret") is not None]
    first = first_answers(done)
    cells = [
        lines[0]["commit"][:8],
        f"{len(done)} of {len(cases)}",
        *(f"{np.median(of):.1%} / {np.percentile(of, 90):.1%}" for of in (step, epoch)),
        f"{np.mean(regrets):.1%} / {max(regrets):.1%} ({len(regrets)})",
        f"{sum(line['step']['inside'] for line in done)} of {len(done)}",
        f"{sum(first)} of {len(first)}",
    ]
    return f"| {' | '.join(cells)} |"


def read_lines(out: Path, seed: str) -> dict[int, dict[str, Any]]:
    """Finished configurations by number; a line cut off by a kill is left out."""
    found: dict[int, dict[str, Any]] = {}
    for text in out.read_text().splitlines() if out.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line.get("seed", seed) != seed:
            raise SystemExit(f"{out}: expected seed {seed}, found {line['seed']}; name another")
        if "case" in line:
            found[line["case"]] = line
    return found


def commit() -> str:
    """The commit that is measured."""
    named = os.environ.get("GNNPLAN_COMMIT")
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return named or subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def run(cases: Sequence[Drawn], out: Path, seed: str, options: argparse.Namespace) -> None:
    """Every configuration that is not finished, until the minutes are over."""
    until = time.monotonic() + 60 * options.minutes
    os.environ["GNNPLAN_CACHE"] = str(options.work / "cache")
    machine = options.work / "machine.json"
    if not machine.exists():
        quiet("the probe", options.patience)
        options.work.mkdir(parents=True, exist_ok=True)
        run_gnnplan("probe", "--output", str(machine), *["--quick"] * options.quick)
    if not out.exists():
        name = load_machine(machine).name
        facts = {"machine": name, "cores": os.cpu_count(), "quick": options.quick}
        when = datetime.datetime.now(datetime.UTC).date().isoformat()
        how = {"benchmark": "drawn", "date": when, "commit": commit(), "seed": seed}
        append(out, how | facts | {"configurations": len(cases)})
    for drawn in cases:
        if drawn.number in read_lines(out, seed) or time.monotonic() > until:
            continue
        pace, started = [quiet(drawn.name, options.patience)], time.monotonic()
        line = {"name": "drawn", "case": drawn.number, "configuration": drawn.name}
        try:
            line |= measure(drawn, options.work, options)
        except (CommandError, GnnplanError) as error:
            line |= {"why": str(error)}
        pace.append(quiet(drawn.name, 0.0))
        seconds = round(time.monotonic() - started, 1)
        append(out, line | {"drawn": drawn.facts(), "seconds": seconds, "pace": pace})
        words = line.get("why") or f"{line['baseline']:.4f} s predicted, {line['value']:.4f} s"
        print(f"{drawn.name}: {words}; {seconds:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Run what is missing, and sum up once nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON always")
    parser.add_argument("--seed", help="text that configurations are drawn by; default: the commit")
    parser.add_argument("--out", type=Path, help="record, appended to; default: by commit")
    parser.add_argument("--configs", type=int, default=CONFIGURATIONS, help="how many")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin none after so many")
    parser.add_argument("--work", type=Path, help="graphs, plans and profiles; default: a cache")
    parser.add_argument("--data", type=Path, default=default_data(), help="folder of .npz packs")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs")
    parser.add_argument("--list", action="store_true", help="print the configurations and end")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    seed = options.seed or commit()
    number = int(hashlib.sha256(seed.encode()).hexdigest()[:16], 16)
    cases = [draw_case(number, i) for i in range(options.configs)]
    if options.list:
        print("\n".join(drawn.name for drawn in cases))
        return
    out = options.out or RECORDS / f"drawn_{seed[:8]}.jsonl"
    options.work = options.work or Path.home() / ".cache" / "gnnplan" / f"drawn-{seed[:8]}"
    options.patience = 0.0 if options.quick else options.patience
    if not options.summary:
        run(cases, out, seed, options)
    finished = read_lines(out, seed)
    if len(finished) < len(cases) and not options.summary:
        print(f"{len(finished)} of {len(cases)} are done; run it again to go on", file=sys.stderr)
        return
    lines = summarize([finished[number] for number in sorted(finished)])
    if not options.summary:
        for line in lines:
            append(out, line)


if __name__ == "__main__":
    main()
