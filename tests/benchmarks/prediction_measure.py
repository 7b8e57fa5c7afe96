"""One configuration of `prediction`: its candidates planned, then run in turn by real ranks."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.assemble import assemble
from planner.calibrate import calibrated
from planner.compare import factor_names, in_stacks
from planner.cost.model import fixed_parts, row_bytes
from planner.machine import MachineModel
from planner.pipeline import search_for, searches_for
from planner.settings import PlanSettings
from planner.solver.candidates_gpu import machine_candidates
from planner.solver.choose import Priced, choose
from planner.solver.placing import code_bytes
from planner.solver.search import Explored, Search
from planner.tune_candidates import distinct, turns
from planner.windows import window_means
from runtime.graph.dataset import Graph
from runtime.models.memory import with_huge_pages
from runtime.plan import Plan, save_plan
from runtime.process import host_state, noise_between
from runtime.report import over_ranks
from runtime.train.minibatch import STEP
from tests.benchmarks.common import RandomReadLimit, steady
from tests.benchmarks.prediction_cases import RATE_BITS_PER_SECOND, Case
from tests.hosts import Hosts
from tests.support.ranks import free_port


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long each candidate is measured."""

    rounds: int
    turn_seconds: float
    """Predicted seconds of one turn of one candidate."""
    least_steps: int
    most_steps: int
    discard: int
    """Steps at the start of each turn that are not counted."""
    warm_up: int
    """And so many more in the first round."""


FULL = Effort(rounds=6, turn_seconds=0.8, least_steps=10, most_steps=200, discard=3, warm_up=8)
QUICK = Effort(rounds=1, turn_seconds=0.05, least_steps=2, most_steps=4, discard=1, warm_up=0)
"""Shows that everything runs; its figures mean nothing."""
POLICIES = {
    "ram": ("none",),
    "samplers": ("none",),
    "disk": ("none", "random", "degree", "joint"),
    "link": ("none", "naive", "random", "degree", "song-jiang", "joint"),
}
PORT = 29520
Seconds = dict[str, list[float]]
"""Of one turn of one rank: each step's, whole and by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One candidate of one search; `raw` is that search without factors."""

    search: Search
    raw: Search
    priced: Priced

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from others of its configuration."""
        candidate = self.priced.candidate
        return {
            "policy": candidate.policy,
            "ranks": candidate.num_ranks,
            "compute": candidate.threads.compute,
            "loaders": candidate.threads.sample,
            "ahead": candidate.prefetch_depth,
            "sampler": self.search.settings.sampler,
            "stack": candidate.bulk,
        }


def measure_case(
    case: Case, graph: Graph, machine: MachineModel, factors: Mapping[str, float], effort: Effort
) -> dict[str, Any]:
    """Predict and measure every candidate; one JSON object."""
    options, chosen = options_of(case, graph, machine, factors)
    limit = RandomReadLimit(1 << 22)
    before, limits = host_state(), [limit.measure()]
    with tempfile.TemporaryDirectory() as folder:
        plans = [write(option, Path(folder) / str(i)) for i, option in enumerate(options)]
        found = run(case, options, Path(folder), effort)
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
            line(option, plan, [ranks[str(i)] for ranks in found if str(i) in ranks])
            for i, (option, plan) in enumerate(zip(options, plans, strict=True))
        ],
        "load": noise.load_before,
        "steal": noise.steal_fraction,
        "steady": steady(*limits),
    }


def options_of(
    case: Case, graph: Graph, machine: MachineModel, factors: Mapping[str, float]
) -> tuple[list[Option], int]:
    """Distinct candidates of a configuration, and the place of the one the planner chooses."""
    budget = None
    if case.share < 1.0:
        budget = device_budget(case, graph, machine)
    found: list[Option] = []
    choices: list[Option] = []
    requests = case.settings(budget_bytes=budget)
    searches = searches_for(graph, requests, machine)
    for settings, raw in zip(requests, searches, strict=True):
        if case.tier == "link":
            raw = over_the_link(raw)
        search = calibrated(raw, factors) if factors else raw
        priced = search.run()
        wanted = [choose(priced, machine.noise), *grid(case, search, settings, machine)]
        kept = distinct([p for p in wanted if not p.overflow])
        mine = [Option(search=search, raw=raw, priced=p) for p in kept]
        choices.append(mine[0])
        found += mine
    best = min(choices, key=lambda option: option.priced.seconds)
    return found, next(i for i, option in enumerate(found) if option is best)


def over_the_link(search: Search) -> Search:
    """Gradients at the link's rates: the profile timed its sums between two ranks of one host."""
    profile = search.request.profile
    timing = {key: replace(each, all_reduce=None) for key, each in profile.timing.items()}
    request = replace(search.request, profile=replace(profile, timing=timing))
    return replace(search, request=request)


def grid(case: Case, search: Search, settings: PlanSettings, machine: MachineModel) -> list[Priced]:
    """Every split of the threads, and every policy of the tier on the best of them."""
    splits = [
        search.price(c)
        for c in machine_candidates(settings, machine, ("none",))
        if c.threads.sample == 0 or c.prefetch_depth == 2
    ]
    best = min(splits, key=lambda p: p.seconds)
    others = [
        search.price(replace(best.candidate, policy=policy))
        for policy in POLICIES[case.tier]
        if policy != "none"
    ]
    return [*splits, *others]


def device_budget(case: Case, graph: Graph, machine: MachineModel) -> int:
    """Bytes of a rank that holds its own state and `share` of all rows."""
    needs, stored = list[int](), 0
    for settings in case.settings():
        search = search_for(graph, settings, machine)
        codes = code_bytes(graph.num_nodes)
        needs += [
            sum(fixed_parts(search.request, candidate, 0, codes).values())
            for candidate in machine_candidates(settings, machine, ("none",))
        ]
        stored = row_bytes(search.request.graph)
    return max(needs) + int(case.share * graph.num_nodes) * stored


def write(option: Option, folder: Path) -> Plan:
    """The plan folder that the ranks run."""
    alone = Explored(priced=[option.priced], left_out=[])
    plan, arrays = assemble(option.search, alone, option.priced)
    return save_plan(plan, arrays, folder)


def run(
    case: Case, options: Sequence[Option], folder: Path, effort: Effort
) -> list[dict[str, Any]]:
    """What every rank measured, by candidate."""
    jobs = {
        str(i): {
            "plan": str(folder / str(i)),
            "ranks": option.priced.candidate.num_ranks,
            "steps": steps_of(option.priced.seconds, effort, option.priced.candidate.bulk),
        }
        for i, option in enumerate(options)
    }
    asked = {
        "jobs": jobs,
        "rounds": [
            [str(i) for i in turn] for turn in turns(range(len(jobs)), effort.rounds, seed=0)
        ],
        "discard": effort.discard,
        "warm_up": effort.warm_up,
        "between_hosts": case.tier == "link",
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


def line(option: Option, plan: Plan, ranks: list[list[Seconds]]) -> dict[str, Any]:
    """One candidate: predicted and measured, kept apart."""
    stack, stacked = plan.strategy.bulk_batches, in_stacks(plan)
    rounds = [window_means(turn[STEP], stack) for turn in ranks[0]]
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
            "step": float(np.median(np.concatenate(rounds))),
            "rounds": [float(np.median(each)) for each in rounds],
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
