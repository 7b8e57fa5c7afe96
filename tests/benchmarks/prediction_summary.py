"""What the measured configurations say: errors, ranks, regrets, coverage."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from gnnplan.planner.queries.calibrate import TABLES, TIMED, Calibration, Observation
from gnnplan.planner.queries.compare import NEGLIGIBLE, absolute_percentage_error
from tests.benchmarks.common import record

APART = 0.05
"""Candidates closer than this are not ranked."""
SPREAD = 1.5
"""Measured worst over best from which a configuration counts as one where choosing matters."""
OF_THE_LINK = ("exchange_ids", "exchange_rows", "all_reduce")
"""Stages whose factor belongs to the network they ran on."""

Line = dict[str, Any]


def factors_for(tier: str, lines: Sequence[Line]) -> dict[str, float]:
    """Factors by stage for other graphs, from the configurations that calibrate."""
    observations: list[Observation] = []
    for each in lines:
        if each["role"] != "calibrate":
            continue
        ratios: dict[str, list[float]] = {}
        for one in each["candidates"]:
            floor = NEGLIGIBLE * one["measured"]["step"]
            for stage, raw in one["predicted"]["raw_stages"].items():
                key, seconds = one["keys"].get(stage, stage), one["measured"]["stages"].get(stage)
                foreign = stage in OF_THE_LINK and (tier == "link") != (each["tier"] == "link")
                if stage not in (*TABLES, *TIMED) or foreign or not raw or not seconds:
                    continue
                if max(raw, seconds) >= floor:
                    ratios.setdefault(key, []).append(seconds / raw)
        medians = {key: float(np.median(found)) for key, found in ratios.items()}
        observations.append(
            Observation(plan_id=each["name"], step_seconds=0.0, graph=each["graph"], ratios=medians)
        )
    every = Calibration(fingerprint="", observations=observations)
    return every.factors(graph=None)  # no reported graph is one of those that calibrate


def summarize(lines: Sequence[Line]) -> None:
    """Print a line per configuration, then what they say together."""
    reported = [each for each in lines if each["role"] == "report"]
    if not reported:
        return
    for each in reported:
        pair(each)
    everyone = [one for each in reported for one in each["candidates"]]
    facts = {
        "configurations": len(reported),
        "candidates": len(everyone),
        "wide": sum(spread_of(each) >= SPREAD for each in reported),
        "unsteady": sum(not each["steady"] for each in reported),
        "pace_median": median_pace(reported),
        "load_median": float(np.median([each["load"] for each in reported])),
    }
    errors(reported, everyone, facts)
    ranking(reported)
    regrets(reported)
    intervals(reported, everyone)


def median_pace(lines: Sequence[Line]) -> float | None:
    """Mean slowdown of a small step beside the configurations; None: not measured."""
    found = [np.mean(each["pace"]) for each in lines if "pace" in each]
    return float(np.median(found)) if found else None


def steps(each: Line) -> np.ndarray:
    """Measured step seconds of the candidates."""
    return np.array([one["measured"]["step"] for one in each["candidates"]])


def spread_of(each: Line) -> float:
    return float(steps(each).max() / steps(each).min())


def regret_of(each: Line, candidate: int) -> float:
    return float(steps(each)[candidate] / steps(each).min() - 1.0)


def error_of(one: Line, of: str = "step") -> float:
    return absolute_percentage_error(one["predicted"][of], one["measured"]["step"])


def pair(each: Line) -> None:
    """One configuration: the chosen plan's prediction beside what was measured."""
    chosen = each["candidates"][each["chosen"]]
    record(
        "pair",
        chosen["measured"]["step"],
        "s",
        baseline=chosen["predicted"]["step"],
        ratio=chosen["predicted"]["step"] / chosen["measured"]["step"],
        configuration=each["name"],
        worst_over_best=spread_of(each),
        regret=regret_of(each, each["chosen"]),
        kendall_tau=tau_of(each),
        chosen=words(chosen),
        best=words(each["candidates"][int(steps(each).argmin())]),
        candidates={
            words(one): [one["predicted"]["step"], one["measured"]["step"]]
            for one in each["candidates"]
        },
        load=each["load"],
        steady=each["steady"],
        pace=each.get("pace"),
    )


def words(one: Line) -> str:
    stack = f" by {one['stack']}" if one.get("stack", 1) > 1 else ""
    threads = f"{one['compute']}+{one['loaders']}"
    shared = " shared" if one.get("batching") == "cooperative" else ""
    return f"{one['policy']} {one['ranks']}x({threads}) {one['sampler']}{stack}{shared}"


def errors(reported: Sequence[Line], everyone: Sequence[Line], facts: dict[str, Any]) -> None:
    """Step and stage errors over all candidates, and over the chosen ones."""
    found = [error_of(one) for one in everyone]
    raw = [error_of(one, "raw") for one in everyone]
    chosen = [error_of(each["candidates"][each["chosen"]]) for each in reported]
    for name, at, bar in (("step_ape_median", 50, 0.10), ("step_ape_p90", 90, 0.20)):
        record(
            name,
            float(np.percentile(found, at)),
            "share",
            baseline=bar,
            chosen_only=float(np.percentile(chosen, at)),
            uncalibrated=float(np.percentile(raw, at)),
            **facts,
        )
    stages: dict[str, list[float]] = {}
    for one in everyone:
        floor = NEGLIGIBLE * one["measured"]["step"]
        for stage, predicted in one["predicted"]["stages"].items():
            measured = one["measured"]["stages"].get(stage)
            if measured is not None and max(predicted, measured) >= floor:
                ape = absolute_percentage_error(predicted, measured)
                stages.setdefault(stage, []).append(ape)
    for stage, apes in sorted(stages.items()):
        record(
            f"stage_ape_{stage}",
            float(np.median(apes)),
            "share",
            baseline=0.20,
            p90=float(np.percentile(apes, 90)),
            candidates=len(apes),
        )


def concordance(each: Line) -> tuple[int, int]:
    """(agreeing less disagreeing pairs, pairs) among candidates more than 5% apart."""
    measured = steps(each)
    predicted = np.array([one["predicted"]["step"] for one in each["candidates"]])
    a, b = np.triu_indices(len(measured), 1)
    apart = np.abs(measured[a] - measured[b]) > APART * np.minimum(measured[a], measured[b])
    signs = np.sign(measured[a] - measured[b]) * np.sign(predicted[a] - predicted[b])
    return int(signs[apart].sum()), int(apart.sum())


def tau_of(each: Line) -> float | None:
    agreeing, pairs = concordance(each)
    return agreeing / pairs if pairs else None


def ranking(reported: Sequence[Line]) -> None:
    """Kendall's tau within each (graph, ranks, budget); the value is the smallest of any group."""
    groups: dict[str, list[Line]] = {}
    for each in reported:
        ranks = "-".join(map(str, each["ranks"]))
        groups.setdefault(f"{each['graph']} {each['tier']} {ranks} {each['share']}", []).append(
            each
        )
    sums = {name: np.sum([concordance(e) for e in rows], axis=0) for name, rows in groups.items()}
    taus = {name: agreeing / pairs for name, (agreeing, pairs) in sums.items() if pairs}
    if not taus:
        return
    values = list(taus.values())
    record(
        "kendall_tau",
        float(min(values)),
        "tau",
        baseline=0.8,
        median=float(np.median(values)),
        mean=float(np.mean(values)),
        pooled=float(sum(s[0] for s in sums.values()) / sum(s[1] for s in sums.values())),
        groups=len(values),
        groups_within_bar=sum(bool(value >= 0.8) for value in values),
        below={name: float(value) for name, value in taus.items() if value < 0.8},
    )


def regrets(reported: Sequence[Line]) -> None:
    """Regret of the plan beside a random candidate, one fixed policy and PyG's defaults."""
    plan = [regret_of(each, each["chosen"]) for each in reported]
    by_chance = [float(np.mean(steps(each) / steps(each).min() - 1.0)) for each in reported]
    rules = {rule: [regret_of(each, applied(each, rule)) for each in reported] for rule in RULES}
    fixed = min(rules, key=lambda rule: float(np.mean(rules[rule])))
    pyg = rules[PYG]
    for name, of, bar in (("regret_mean", np.mean, 0.03), ("regret_worst", np.max, 0.10)):
        record(
            name,
            float(of(plan)),
            "share",
            baseline=bar,
            random_candidate=float(of(by_chance)),
            best_fixed_policy=float(of(rules[fixed])),
            fixed_policy=" ".join(map(str, fixed)),
            pyg_defaults=float(of(pyg)),
        )


RULES = list(
    product(
        ("none", "random", "degree", "joint"), (0, 1), ("neighbor", "labor"), ("fewest", "most")
    )
)
"""Fixed policies: placement, loader threads, sampler, ranks; where a configuration does not offer
one, the rest of the rule decides."""
PYG = ("none", 0, "neighbor", "fewest")
"""NeighborLoader as it comes: no workers, no cache, one process where one is allowed."""


def applied(each: Line, rule: tuple[str, int, str, str]) -> int:
    """The candidate that follows a fixed rule most closely."""
    policy, loaders, sampler, ranks = rule
    counts = [one["ranks"] for one in each["candidates"]]
    wanted = min(counts) if ranks == "fewest" else max(counts)

    def agrees(one: Line) -> tuple[bool, ...]:
        return (
            one["ranks"] == wanted,
            one["sampler"] == sampler,
            one["policy"] == policy,
            one["loaders"] == loaders,
            one["policy"] == "none",
        )

    return max(range(len(counts)), key=lambda i: agrees(each["candidates"][i]))


def intervals(reported: Sequence[Line], everyone: Sequence[Line]) -> None:
    """Share of (configuration, repeat) pairs inside the chosen plan's interval, and its width."""

    def inside(ones: Sequence[Line]) -> list[bool]:
        return [
            one["predicted"]["low"] <= seconds <= one["predicted"]["high"]
            for one in ones
            for seconds in one["measured"]["rounds"]
        ]

    chosen = [each["candidates"][each["chosen"]] for each in reported]
    mine, every = inside(chosen), inside(everyone)
    widths = [
        (one["predicted"]["high"] - one["predicted"]["low"]) / one["measured"]["step"]
        for one in chosen
    ]
    record(
        "coverage90",
        float(np.mean(mine)),
        "share",
        baseline="0.80 to 0.97",
        pairs=len(mine),
        every_candidate=float(np.mean(every)),
        every_candidate_pairs=len(every),
    )
    record("width90", float(np.mean(widths)), "share", baseline=0.35)
