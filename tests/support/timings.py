"""Timings as a team's processes answer them, made by hand."""

from gnnplan.planner.profile.protocol import BatchShape, TimingAnswer, TimingRequest
from gnnplan.runtime.plan.schema import Workload


def answer(seconds: float) -> TimingAnswer:
    return TimingAnswer(
        forward_backward=[seconds, 2 * seconds, 3 * seconds],
        spread=0.1,
        optimizer_seconds=0.5,
        batch_seconds=0.25,
        warmup_seconds=1.0,
        num_parameters=7,
        activation_bytes=9,
        all_reduce=[0.05 * seconds, 0.1 * seconds, 0.15 * seconds],
    )


def request(model: str = "sage") -> TimingRequest:
    return TimingRequest(
        workload=Workload(model=model, hidden=8, fanouts=[3, 2]),
        in_dim=4,
        num_classes=3,
        task="multiclass",
        shape=BatchShape(vertices=[20, 60, 120], edges=[60, 120]),
        scales=[0.5, 1.0, 2.0],
        threads=1,
        steps=3,
    )
