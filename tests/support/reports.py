"""Run reports for tests, written without a run."""

from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import (
    EpochReport,
    HostNoise,
    RankReport,
    RunReport,
    StageReport,
    StepSeconds,
)


def run_report(plan: Plan) -> RunReport:
    """A run of one rank and one epoch of 60 steps of 11 ms."""

    def stage(median: float) -> StageReport:
        return StageReport(
            median=median, p10=median, p90=median, count=50, mean=median, core_seconds=median
        )

    rank = RankReport(
        rank=0,
        stages={"sample": stage(2e-3), "forward_backward": stage(6e-3)},
        rows_by_source={"own": 30, "host": 70},
        bytes_by_source={},
        hit_rates={},
        peak_memory_bytes=1,
        private_memory_bytes=1,
    )
    epoch = EpochReport(epoch=0, seconds=1.0, steps=60, loss=1.0, first_loss=1.0, last_loss=1.0)
    return RunReport(
        plan_id=plan.plan_id,
        versions={},
        num_ranks=1,
        metric="accuracy",
        ranks=[rank],
        step_seconds=StepSeconds(
            median=11e-3, p10=11e-3, p90=11e-3, count=50, discarded=10, enough=True
        ),
        step_samples=[],
        epochs=[epoch],
        losses=[],
        startup_seconds=4.0,
        test_score=None,
        noise=HostNoise(
            load_before=0.0, load_after=0.0, steal_fraction=0.0, cores=2, overloaded=False
        ),
    )
