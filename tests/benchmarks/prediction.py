"""How well the planner predicts, and how much its choice loses: the prediction bar.

    python -m tests.benchmarks.prediction --json --out RESULTS.jsonl [--machine MACHINE.json]
        [--configs 0-9] [--minutes M] [--work FOLDER] [--data FOLDER] [--list] [--summary] [--quick]
        [--patience SECONDS]

Each configuration (`prediction_cases.py`) is planned, its candidates run in turn by real ranks, and
one line is appended to RESULTS: a configuration that stands there is not run again, so the
benchmark may be stopped and continued, or split. The machine is probed once, in full, and kept in
MACHINE; so is the 1 Gbit/s link beside it. The disk alone is measured again, in a few seconds,
before each configuration that reads it: those of virtual machines swing within minutes. The first
configurations calibrate: a reported one is run only when all of those are in RESULTS, and its
predictions, made before it runs, use their factors. Profiles are measured while planning and kept
in FOLDER, so keep MACHINE, FOLDER and RESULTS of one quiet machine together. Where neighbours slow
the machine down, each configuration waits for them to end, for --patience at most; how much a
small step was slowed down before and after it stands in its line.

The last lines are the summary over everything in RESULTS: step_ape_median, step_ape_p90,
stage_ape_<stage>, kendall_tau, regret_mean, regret_worst, coverage90, width90, and one `pair` line
per configuration. Links between hosts need root.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gnnplan.planner.array_cache import cache_folder
from gnnplan.planner.machine.model import MachineModel, load_machine, save_machine
from gnnplan.planner.probe.probe import probe, with_disk_again
from gnnplan.planner.probe.quiet import SLOW, disturbance
from gnnplan.runtime.device import machine_fingerprint
from tests.benchmarks.prediction_cases import CASES, default_data, open_case_graph
from tests.benchmarks.prediction_link import link_machine
from tests.benchmarks.prediction_measure import FULL, QUICK, measure_case
from tests.benchmarks.prediction_summary import factors_for, summarize

PAUSE_SECONDS = 5.0
"""For which equal work is timed."""


def read_lines(out: Path) -> dict[int, dict[str, Any]]:
    """Finished configurations by number; a line cut off by a kill is left out."""
    found: dict[int, dict[str, Any]] = {}
    for text in out.read_text().splitlines() if out.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            print(f"{out}: a line is cut off; its configuration is run again", file=sys.stderr)
            continue
        if CASES[line["case"]].name == line["name"]:
            found[line["case"]] = line
    return found


def append(out: Path, line: dict[str, Any]) -> None:
    """Add one line, on a line of its own also after a cut-off one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a+") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != "\n"
        file.write(("\n" if torn else "") + json.dumps(line) + "\n")


def machine_in(path: Path, patience_seconds: float) -> MachineModel:
    """The machine in the file; probed in full, in a quiet moment, where there is none."""
    if path.exists():
        machine = load_machine(path)
        if machine.fingerprint != machine_fingerprint():
            raise SystemExit(f"{path}: expected this machine, found another; choose another file")
        return machine
    print(f"probing this machine into {path}", file=sys.stderr)
    quiet("the probe", patience_seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = probe()
    save_machine(machine, path)
    return machine


def quiet(what: str, patience_seconds: float) -> float:
    """Wait for a quiet machine; a small step's seconds over those of good moments in the end."""
    end = time.monotonic() + patience_seconds
    with disturbance(cache_folder()) as looks:
        while (found := looks.slowdown()) >= SLOW and time.monotonic() + PAUSE_SECONDS < end:
            print(f"{what} waits: a small step takes {found:.2f} times its best", file=sys.stderr)
            time.sleep(PAUSE_SECONDS)
    return found


def numbers(text: str) -> list[int]:
    """Configurations named as 0-9,12."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return [each for each in found if each < len(CASES)]


def run(wanted: list[int], out: Path, options: argparse.Namespace) -> None:
    """Every wanted configuration that is not finished, until the minutes are over."""
    machine_path = options.machine or options.work / "machine.json"
    machine = machine_in(machine_path, options.patience)
    effort = QUICK if options.quick else FULL
    until = time.monotonic() + 60 * options.minutes
    teachers = {i for i, case in enumerate(CASES) if case.role == "calibrate"}
    for number in wanted:
        finished = read_lines(out)
        case = CASES[number]
        if number in finished or time.monotonic() > until:
            continue
        if case.role == "report" and not teachers <= finished.keys():
            missing = sorted(teachers - finished.keys())
            raise SystemExit(f"expected configurations {missing} in {out} first; run them")
        pace = [quiet(case.name, options.patience)]
        started = time.monotonic()
        graph = open_case_graph(case.graph, options.work / "graphs", options.data)
        here = machine
        if case.tier == "link":
            here = link_machine(machine, machine_path.with_suffix(".link.json"))
        if case.tier in ("disk", "link"):
            here = with_disk_again(here)
        factors = {}
        if case.role == "report":
            factors = factors_for(case.tier, list(finished.values()))
        line = {"case": number} | measure_case(case, graph, here, factors, effort, options.patience)
        seconds = time.monotonic() - started
        pace.append(quiet(case.name, 0.0))
        append(out, line | {"seconds": seconds, "pace": pace})
        words = " and ".join(f"{each:.2f}" for each in pace)
        print(f"{number} {case.name}: {seconds:.0f} s, pace {words}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON always")
    parser.add_argument("--out", type=Path, help="results, appended to; default: in FOLDER")
    parser.add_argument("--machine", type=Path, help="machine file; default: in FOLDER")
    parser.add_argument("--work", type=Path, help="graphs and profiles; default: in the cache")
    parser.add_argument("--configs", default="", help="numbers, as in 0-9,12; default: all")
    parser.add_argument("--minutes", type=float, default=1e9, help="start none after so long")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for quiet, each time"
    )
    parser.add_argument("--data", type=Path, default=default_data(), help="folder of .npz packs")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs")
    parser.add_argument("--list", action="store_true", help="print the configurations and end")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.list:
        for number, case in enumerate(CASES):
            print(f"{number:3d} {case.role:9s} {case.name}")
        return
    options.work = options.work or Path.home() / ".cache" / "gnnplan" / "prediction"
    os.environ["GNNPLAN_CACHE"] = str(options.work / "cache")
    out = options.out or options.work / "results.jsonl"
    if options.quick:
        options.patience = 0.0
    if not options.summary:
        run(numbers(options.configs) if options.configs else list(range(len(CASES))), out, options)
    finished = read_lines(out)
    summarize([finished[number] for number in sorted(finished)])


if __name__ == "__main__":
    main()
