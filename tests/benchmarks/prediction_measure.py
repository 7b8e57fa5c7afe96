"""One configuration of `prediction`: its candidates planned, then run in turn by real ranks.

A virtual machine's host moves its cores apart for seconds or minutes, or gives others a part of
them, and steps are up to half as long again meanwhile (planner/probe/quiet.py). So turns are
short, those that were disturbed are taken once more while patience lasts and left out otherwise,
and what is made of the rest is said in `prediction_rounds.py`. Several rounds make a repeat, which
is what intervals are held against: all of them, slow ones too.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import cache_folder
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.quiet import disturbance
from gnnplan.planner.probe.timing import DISTURBED
from gnnplan.planner.queries.compare import factor_names, in_stacks, window_means
from gnnplan.planner.queries.tune import draw_turns
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.process import host_state, noise_between, with_huge_pages
from gnnplan.runtime.report import over_ranks
from gnnplan.runtime.train.minibatch import STEP
from tests.benchmarks.common import RandomReadLimit, steady
from tests.benchmarks.prediction_cases import RATE_BITS_PER_SECOND, Case
from tests.benchmarks.prediction_options import Option, options_of, write
from tests.benchmarks.prediction_rounds import (
    MOST_ROUNDS,
    TakenTurns,
    less_rounds,
    rounds_in_common,
    standard_error,
    steady_rounds,
    undisturbed_turns,
)
from tests.hosts import Hosts
from tests.support.ranks import free_port


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long each candidate is measured."""

    repeats: int
    seconds: float
    """Predicted seconds of one candidate in one repeat."""
    turn_seconds: float
    """Of them in one turn, before the next candidate has its own."""
    least_steps: int
    most_steps: int
    discard: int
    """Steps at the start of each turn that are not counted."""
    warm_up: int
    """And so many more in the first round."""


FULL = Effort(
    repeats=6,
    seconds=1.0,
    turn_seconds=0.25,
    least_steps=8,
    most_steps=100,
    discard=3,
    warm_up=8,
)
QUICK = Effort(
    repeats=1,
    seconds=0.05,
    turn_seconds=0.05,
    least_steps=2,
    most_steps=4,
    discard=1,
    warm_up=0,
)
"""Shows that everything runs; its figures mean nothing."""
PORT = 29520
Seconds = dict[str, list[float]]
"""Of one turn of one rank: each step's, whole and by stage."""


def measure_case(
    case: Case,
    graph: Graph,
    machine: MachineModel,
    factors: Mapping[str, float],
    effort: Effort,
    patience_seconds: float,
) -> dict[str, Any]:
    """Predict and measure every candidate; one JSON object."""
    options, chosen = options_of(case, graph, machine, factors)
    limit = RandomReadLimit(1 << 22)
    before, limits = host_state(), [limit.measure()]
    with tempfile.TemporaryDirectory() as folder:
        plans = [write(option, Path(folder) / str(i)) for i, option in enumerate(options)]
        with disturbance(cache_folder()) as before_turns:
            disturbed = {"seen": before_turns.seen, "patience": patience_seconds}
            found = run(case, options, Path(folder), effort, disturbed)
    names = [str(i) for i, _ in enumerate(options)]
    taken = [[one["turns"][name] for one in found if name in one["turns"]] for name in names]
    levels = [found[0]["levels"][name] for name in names]
    kept = undisturbed_turns(levels)
    seconds = [windows(plan, ranks) for plan, ranks in zip(plans, taken, strict=True)]
    medians = [[float(np.median(turn)) for turn in each] for each in seconds]
    shared = rounds_in_common(medians, kept)
    steady_ones = steady_rounds(shared, kept)
    limits.append(limit.measure())
    noise = noise_between(before, host_state())
    return {
        "name": case.name,
        "role": case.role,
        "graph": case.graph,
        "tier": case.tier,
        "ranks": list(case.ranks),
        "share": case.share,
        "factors": dict(factors),
        "chosen": chosen,
        "candidates": [
            line(
                option,
                plan,
                ranks,
                TakenTurns(each, less_rounds(each, shared), keep, steady_ones),
                effort.repeats,
            )
            for option, plan, ranks, each, keep in zip(
                options, plans, taken, seconds, kept, strict=True
            )
        ],
        "rounds_in_common": shared.tolist(),
        "rounds_left_out": int((~steady_ones).sum()),
        "standard_error": standard_error(medians, levels),
        "disturbed": float(np.mean(np.array(levels) >= DISTURBED)),
        "load": noise.load_before,
        "steal": noise.steal_fraction,
        "steady": steady(*limits),
    }


def run(
    case: Case,
    options: Sequence[Option],
    folder: Path,
    effort: Effort,
    disturbed: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """What every rank measured, by candidate; `disturbed` holds looks so far, and patience."""
    jobs = {
        str(i): {
            "plan": str(folder / str(i)),
            "ranks": option.priced.candidate.num_ranks,
            "stack": option.priced.candidate.bulk_batches,
            "steps": steps_of(option.priced.seconds, effort, option.priced.candidate.bulk_batches),
        }
        for i, option in enumerate(options)
    }
    planned = rounds_of(jobs, options, effort)
    asked = {
        "jobs": jobs,
        "rounds": [
            [str(i) for i in turn]
            for turn in draw_turns(range(len(jobs)), MOST_ROUNDS * planned, seed=0)
        ],
        "planned": planned,
        "repeats": effort.repeats,
        "discard": effort.discard,
        "warm_up": effort.warm_up,
        "between_hosts": case.tier == "link",
        **disturbed,
    }
    path = folder / "jobs.json"
    path.write_text(json.dumps(asked))
    size = max(case.ranks)
    outs = [folder / f"rank{rank}.json" for rank in range(size)]
    words = [sys.executable, "-m", "tests.benchmarks.prediction_rank"]

    def command(rank: int, address: str, port: int) -> list[str]:
        return [*words, str(rank), str(size), address, str(port), str(path), str(outs[rank])]

    if case.tier == "link":
        with Hosts(["a", "b"], rate_bits_per_second=RATE_BITS_PER_SECOND) as hosts:
            end([
                hosts.start(
                    name,
                    command(rank, hosts.address("a"), PORT),
                    env=with_huge_pages({"GLOO_SOCKET_IFNAME": "eth0"}),
                )
                for rank, name in enumerate(("a", "b"))
            ])  # fmt: skip
    else:
        port = free_port()
        end([
            subprocess.Popen(command(rank, "127.0.0.1", port), env=with_huge_pages(os.environ))
            for rank in range(size)
        ])  # fmt: skip
    return [json.loads(out.read_text()) for out in outs]


def rounds_of(
    jobs: Mapping[str, Mapping[str, Any]], options: Sequence[Option], effort: Effort
) -> int:
    """Rounds of a configuration: as many to a repeat as its longest turn has room for."""
    longest = max(
        job["steps"] * option.priced.seconds
        for job, option in zip(jobs.values(), options, strict=True)
    )
    most = max(1, round(effort.seconds / effort.turn_seconds))
    return effort.repeats * min(most, max(1, round(effort.seconds / longest)))


def windows(plan: Plan, ranks: list[list[Seconds]]) -> list[NDArray[np.float64]]:
    """Step seconds of rank 0, turn by turn; means over stacks where batches are drawn so."""
    return [np.array(window_means(turn[STEP], plan.strategy.bulk_batches)) for turn in ranks[0]]


def steps_of(seconds: float, effort: Effort, stack: int) -> int:
    """Steps of one turn of a candidate: whole stacks, where batches are drawn so."""
    wanted = round(effort.turn_seconds / seconds)
    steps = max(effort.least_steps, min(effort.most_steps, wanted))
    return -(-steps // max(1, stack)) * max(1, stack)


def end(processes: "Sequence[subprocess.Popen[Any]]") -> None:
    """Wait for all; an error where one failed."""
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"expected every rank to end well, found exit codes {codes}")


def line(
    option: Option,
    plan: Plan,
    ranks: list[list[Seconds]],
    turns: TakenTurns,
    repeats: int,
) -> dict[str, Any]:
    """One candidate: predicted and measured, kept apart.

    Args:
        option: the candidate.
        plan: that ran.
        ranks: seconds by rank and turn, as they were taken.
        turns: its steps, of rank 0.
        repeats: that the turns are divided into, as they were taken.
    """
    stack, stacked = plan.strategy.bulk_batches, in_stacks(plan)
    blocks = [
        [turns.taken[i] for i in block if turns.kept[i]]
        for block in np.array_split(np.arange(len(turns.taken)), repeats)
    ]
    counts = turns.kept & turns.steady
    ranks = [[turn for turn, keep in zip(r, counts, strict=True) if keep] for r in ranks]
    names = sorted({name for turn in ranks[0] for name in turn if name != STEP})
    predicted = plan.prediction
    raw = predicted
    if option.search is not option.raw:
        raw = option.raw.price(option.priced.candidate).prediction
    return {
        **option.key,
        "keys": factor_names(plan),
        "predicted": {
            "step": predicted.step_seconds.value,
            "low": predicted.step_seconds.low,
            "high": predicted.step_seconds.high,
            "raw": raw.step_seconds.value,
            "stages": predicted.stages,
            "raw_stages": raw.stages,
        },
        "measured": {
            "step": turns.median(),
            "rounds": [float(np.median(np.concatenate(block))) for block in blocks if block],
            "turns": [float(np.median(turn)) for turn in turns.taken],
            "kept": turns.kept.tolist(),
            "stages": {
                name: stage_seconds(name, ranks, stack if name in stacked else 1) for name in names
            },
        },
    }


def stage_seconds(name: str, ranks: Sequence[Sequence[Seconds]], stack: int) -> float:
    """Median step of a stage, of the mean over ranks in each step (`over_ranks`).

    Args:
        name: of the stage; a turn without it has none of it.
        ranks: seconds by step, by turn and rank.
        stack: batches drawn at once, where that is the stage's work; else 1.
    """
    medians = list[float]()
    for turn in zip(*ranks, strict=True):
        found = [rank[name] for rank in turn if name in rank]
        if not found:
            medians.append(0.0)
            continue
        steps = over_ranks(found, len(turn)).tolist()
        medians.append(float(np.median(window_means(steps, stack))))
    return float(np.median(medians))
