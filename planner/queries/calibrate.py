"""Learn a factor per stage from a machine's runs, and scale prices by it.

`compare` adds each trustworthy run's ratios of measured to raw predicted seconds, by stage, to a
file of the machine. A stage's factor is the median over the latest runs. Fewer than three runs
teach their own graph alone (DEC-44). Runs of several graphs teach others as far as they agree
(DEC-10). `plan --calibrated` scales the tables that the stage is priced from. Samplers other than
neighbour sampling and gathers from disk have their own factors (`compare.factor_names`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.profile.cache import cache_folder
from gnnplan.planner.queries.compare import Comparison, on_gpus
from gnnplan.planner.search.search import Search
from gnnplan.planner.workload import ModelTiming, WorkloadProfile
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.sampling.registry import sampler_or_unknown

LATEST = 20
"""Runs that factors rest on."""
DRIFT = 1.25
"""Factor beyond which a run departs from what earlier ones taught."""
CONFIRMED = 3
"""Runs that a factor needs before other graphs use it, or a run can drift from it."""
MEDIAN_ERROR = (np.pi / 2) ** 0.5
"""Standard error of a median over that of a mean, of many values."""
TABLES = {
    "sample": ("sample_edge", "sample_vertex"),
    "gather": ("gather", "mapped_gather"),
    "gather.disk": ("disk_read",),
    "exchange_rows": (
        "all_to_all",
        "all_to_all_stepped",
        "all_to_all_early",
        "all_to_all_hidden",
    ),
    "exchange_ids": ("all_to_all_asked",),
}
"""Tables of the machine by the factor that scales them. Hidden rows go with feature rows, which the
same calls exchange. The all-reduce has none: most of its seconds are the wait for the slowest rank,
which no table holds.
"""
TIMED = ("forward_backward", "optimizer", "batch")
"""Stages priced from the profile's timing of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Run held against its plan."""

    plan_id: str
    step_seconds: float
    """Measured seconds per step; with the plan they identify the run, so that none counts twice."""
    graph: str = ""
    """Fingerprint of the graph; empty where it was not kept."""
    ratios: dict[str, float]
    """Measured over raw predicted seconds, by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Runs of one machine."""

    fingerprint: str
    observations: list[Observation] = field(default_factory=list[Observation])

    def factors(self, graph: str | None) -> dict[str, float]:
        """Return the median ratio of each stage over the latest runs; of several graphs, shrunk.

        Args:
            graph: fingerprint of the planned graph; fewer than `CONFIRMED` runs of others teach it
                nothing. None for a graph without any run.
        """
        found: dict[str, list[tuple[str, float]]] = {}
        for each in self.observations[-LATEST:]:
            for stage, ratio in each.ratios.items():
                found.setdefault(stage, []).append((each.graph, ratio))
        factors = dict[str, float]()
        for stage, ratios in sorted(found.items()):
            own = [ratio for owner, ratio in ratios if owner == graph]
            if len(ratios) >= CONFIRMED and len(own) < len(ratios):
                factors[stage] = shrink_median([ratio for _, ratio in ratios])
            elif own:
                factors[stage] = float(np.median(own))
        return factors

    def count(self, stage: str) -> int:
        """Return the number of runs behind a stage's factor."""
        return sum(stage in o.ratios for o in self.observations[-LATEST:])


def shrink_median(ratios: Sequence[float]) -> float:
    """Return the factor that runs of several graphs teach another: their median, drawn towards 1.

    exp(m max(0, 1 - e^2 / m^2)), with m the median of the logarithms and e its standard error
    (DEC-10).

    Args:
        ratios: measured over raw predicted seconds, at least two.

    Source: the positive part of James and Stein's estimator (1961), of one mean.

    >>> [round(shrink_median(r), 3) for r in ([0.8, 0.8, 0.8], [1.2, 1.6, 1.4], [0.5, 1.0, 2.0])]
    [0.8, 1.356, 1.0]
    """
    logs = np.log(ratios)
    middle = float(np.median(logs))
    error = MEDIAN_ERROR * float(np.std(logs, ddof=1)) / len(ratios) ** 0.5
    kept = max(0.0, 1.0 - (error / middle) ** 2) if middle != 0.0 else 0.0
    return float(np.exp(kept * middle))


def calibration_path(fingerprint: str) -> Path:
    """Return the file that keeps a machine's runs."""
    return cache_folder().parent / "calibration" / f"{fingerprint}.json"


def load_calibration(fingerprint: str) -> Calibration:
    """Read the runs of a machine; none where there is no file.

    Raises:
        SettingsError: the file is damaged.
    """
    path = calibration_path(fingerprint)
    if not path.is_file():
        return Calibration(fingerprint=fingerprint)
    try:
        return codec.decode(Calibration, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: not a calibration ({error}); remove it") from None


def refit(
    comparison: Comparison, report: RunReport, plan: Plan, used: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Add a run to the machine's file; return factors for the plan's graph, and alarms.

    A run is left out that has too few steps, was on a busy machine, was forced on another machine
    or graph, ran on GPUs, of whose stages only the host's part is measured, or whose plan is an
    estimate, since factors scale what was measured. `used` are the factors that the plan was made
    with.

    Raises:
        SettingsError: the file is damaged.
        OSError: it cannot be written.
    """
    fingerprint, graph = plan.machine.fingerprint, plan.graph.fingerprint
    known = load_calibration(fingerprint)
    trusted = report.step_seconds.enough and not report.noise.overloaded
    if not trusted or report.forced or on_gpus(plan) or plan.prediction.estimated:
        return known.factors(graph), []
    names = comparison.factor_names
    ratios = {
        names.get(name, name): stage.measured / stage.predicted * used.get(names.get(name, name), 1)
        for name, stage in comparison.stages.items()
        if name in (*TABLES, *TIMED) and stage.predicted > 0 and stage.measured > 0
    }
    new = Observation(
        plan_id=comparison.plan_id,
        step_seconds=report.step_seconds.median,
        graph=graph,
        ratios=ratios,
    )
    others = [
        o
        for o in known.observations
        if (o.plan_id, o.step_seconds) != (new.plan_id, new.step_seconds)
    ]
    before = replace(known, observations=others)
    alarms = find_drift(before, ratios, graph)
    after = replace(known, observations=[*others, new][-LATEST:])
    path = calibration_path(fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    codec.write_text_atomically(path, codec.dumps(after))
    return after.factors(graph), alarms


def find_drift(known: Calibration, ratios: Mapping[str, float], graph: str) -> list[str]:
    """Write a line for each stage that departs from its factor."""
    factors = known.factors(graph)
    return [
        f"drift: {stage} took {ratio / factors[stage]:.2f} times what the last "
        f"{known.count(stage)} runs taught (factor {factors[stage]:.2f}, now {ratio:.2f}); "
        "the machine may have changed: probe it again"
        for stage, ratio in ratios.items()
        if known.count(stage) >= CONFIRMED and not 1 / DRIFT <= ratio / factors[stage] <= DRIFT
    ]


def calibrate_search(search: Search, factors: Mapping[str, float]) -> Search:
    """Return the search with every stage's rates multiplied by its factor.

    A sampler that is not probed has a factor of its own, since the profile timed that sampler.
    """
    request = search.request
    priced = dict(factors)
    if not sampler_or_unknown(request.sampler).is_probed:
        priced["sample"] = factors.get(f"sample.{request.sampler}", 1.0)
    return replace(
        search,
        request=replace(
            request,
            machine=calibrate_machine(request.machine, priced),
            profile=calibrate_profile(request.profile, priced),
        ),
    )


def calibrate_machine(machine: MachineModel, factors: Mapping[str, float]) -> MachineModel:
    """Return the machine with scaled tables, which are then marked as derived."""
    scaled = {
        name: _scaled(machine.tables[name], factors[stage])
        for stage, names in TABLES.items()
        if stage in factors
        for name in names
        if name in machine.tables
    }
    return machine.with_tables(scaled)


def calibrate_profile(profile: WorkloadProfile, factors: Mapping[str, float]) -> WorkloadProfile:
    """Return the profile with the model's seconds scaled."""
    if not any(stage in factors for stage in ("sample", *TIMED)):
        return profile

    def one(timing: ModelTiming) -> ModelTiming:
        return replace(
            timing,
            forward_backward=_scaled(timing.forward_backward, factors.get("forward_backward", 1.0)),
            optimizer=_scaled(timing.optimizer, factors.get("optimizer", 1.0)),
            batch_seconds=timing.batch_seconds * factors.get("batch", 1.0),
            sample_seconds=timing.sample_seconds * factors.get("sample", 1.0),
        )

    return replace(profile, timing={k: one(t) for k, t in profile.timing.items()})


def _scaled(table: Table, factor: float) -> Table:
    if factor == 1.0:
        return table
    return replace(table, values=[v * factor for v in table.values], provenance="derived")
