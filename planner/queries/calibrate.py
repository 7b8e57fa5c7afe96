"""What runs taught about the model: a factor per stage, kept beside the raw numbers.

`compare` adds each trustworthy run's measured over raw predicted seconds, by stage, to a file of
the machine; the factor of a stage is the median over the latest runs. What fewer than three runs
taught is used for their own graph alone, since it made other plans' stages worse (DEC-44). Runs of
several graphs teach others as far as they agree (`agreed`, DEC-10). `plan --calibrated` scales the
tables that the stage is priced from; the machine file and the profile stay as they were measured.
Samplers other than neighbour sampling and gathers from disk have factors of their own
(`compare.factor_names`).
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
"""A run farther than this from the factor it should confirm raises the alarm."""
CONFIRMED = 3
"""Runs a factor must rest on before it is used for other graphs, or a run can drift from it."""
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
"""Tables of the machine by the factor that scales them; hidden rows go with feature rows, which the
same calls exchange, and ids of an exchange where they were not measured together with the counts
that precede them. The all-reduce has no factor: most of its seconds are the wait for the slowest
rank, which is in no table to be scaled, and what one graph's ranks waited made other graphs'
predictions worse."""
TIMED = ("forward_backward", "optimizer", "batch")
"""Stages priced from the profile's timing of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One run held against its plan."""

    plan_id: str
    step_seconds: float
    """Measured; with the plan it names the run, so that no run counts twice."""
    graph: str = ""
    """Fingerprint; empty where it was not kept."""
    ratios: dict[str, float]
    """Measured over raw predicted seconds, by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Runs of one machine."""

    fingerprint: str
    observations: list[Observation] = field(default_factory=list[Observation])

    def factors(self, graph: str | None) -> dict[str, float]:
        """Median ratio of each stage over the latest runs; of several graphs, what is `agreed`.

        Args:
            graph: fingerprint of the graph that is planned for; runs of others teach it nothing
                where there are fewer than `CONFIRMED` in all. None: a graph without any run.
        """
        found: dict[str, list[tuple[str, float]]] = {}
        for each in self.observations[-LATEST:]:
            for stage, ratio in each.ratios.items():
                found.setdefault(stage, []).append((each.graph, ratio))
        factors = dict[str, float]()
        for stage, ratios in sorted(found.items()):
            own = [ratio for owner, ratio in ratios if owner == graph]
            if len(ratios) >= CONFIRMED and len(own) < len(ratios):
                factors[stage] = agreed([ratio for _, ratio in ratios])
            elif own:
                factors[stage] = float(np.median(own))
        return factors

    def count(self, stage: str) -> int:
        """Runs that the factor of a stage rests on."""
        return sum(stage in o.ratios for o in self.observations[-LATEST:])


def agreed(ratios: Sequence[float]) -> float:
    """What runs of several graphs teach another: their median, drawn towards 1 as they disagree.

    exp(m (1 - e^2 / m^2)), no less than 0 in the brackets, m the median of the logarithms and e its
    standard error (DEC-10).

    Args:
        ratios: measured over raw predicted seconds, at least two.

    Source: the positive part of James and Stein's estimator (1961), of one mean.

    >>> [round(agreed(r), 3) for r in ([0.8, 0.8, 0.8], [1.2, 1.6, 1.4], [0.5, 1.0, 2.0])]
    [0.8, 1.356, 1.0]
    """
    logs = np.log(ratios)
    middle = float(np.median(logs))
    error = MEDIAN_ERROR * float(np.std(logs, ddof=1)) / len(ratios) ** 0.5
    kept = max(0.0, 1.0 - (error / middle) ** 2) if middle != 0.0 else 0.0
    return float(np.exp(kept * middle))


def calibration_path(fingerprint: str) -> Path:
    """Where the runs of a machine are kept."""
    return cache_folder().parent / "calibration" / f"{fingerprint}.json"


def load_calibration(fingerprint: str) -> Calibration:
    """The runs of a machine; none where there is no file.

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
    """Add a run to the machine's file, and say where it departs from what earlier ones taught.

    Args:
        comparison: the run against its plan.
        report: the run; it is left out where it has too few steps or the machine was busy, or
            where it ran on GPUs, of whose stages it measured the host's part.
        plan: that it ran: names its machine and graph.
        used: factors that the plan was made with; empty for the raw model.

    Returns:
        The machine's factors for the plan's graph after this run, and alarms.

    Raises:
        SettingsError: the file is damaged.
        OSError: it cannot be written.
    """
    fingerprint, graph = plan.machine.fingerprint, plan.graph.fingerprint
    known = load_calibration(fingerprint)
    if not report.step_seconds.enough or report.noise.overloaded or on_gpus(plan):
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
    alarms = drifted(before, ratios, graph)
    after = replace(known, observations=[*others, new][-LATEST:])
    path = calibration_path(fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    codec.write_text_atomically(path, codec.dumps(after))
    return after.factors(graph), alarms


def drifted(known: Calibration, ratios: Mapping[str, float], graph: str) -> list[str]:
    """One line for each stage that is no longer what its factor says."""
    factors = known.factors(graph)
    return [
        f"drift: {stage} took {ratio / factors[stage]:.2f} times what the last "
        f"{known.count(stage)} runs taught (factor {factors[stage]:.2f}, now {ratio:.2f}); "
        "the machine may have changed: probe it again"
        for stage, ratio in ratios.items()
        if known.count(stage) >= CONFIRMED and not 1 / DRIFT <= ratio / factors[stage] <= DRIFT
    ]


def calibrated(search: Search, factors: Mapping[str, float]) -> Search:
    """The search with every stage's rates multiplied by its factor; what has none stays.

    So does another sampler that has taught none yet: what neighbour sampling takes of its rates
    says nothing of seconds that the profile timed with that sampler.
    """
    request = search.request
    priced = dict(factors)
    if not sampler_or_unknown(request.sampler).is_probed:
        priced["sample"] = factors.get(f"sample.{request.sampler}", 1.0)
    return replace(
        search,
        request=replace(
            request,
            machine=calibrated_machine(request.machine, priced),
            profile=calibrated_profile(request.profile, priced),
        ),
    )


def calibrated_machine(machine: MachineModel, factors: Mapping[str, float]) -> MachineModel:
    """The machine with scaled tables, which then say that they are derived."""
    scaled = {
        name: _scaled(machine.tables[name], factors[stage])
        for stage, names in TABLES.items()
        if stage in factors
        for name in names
        if name in machine.tables
    }
    return machine.with_tables(scaled)


def calibrated_profile(profile: WorkloadProfile, factors: Mapping[str, float]) -> WorkloadProfile:
    """The profile with the model's seconds scaled."""
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
