"""Seconds of a model, made up from the sizes of its batches: what a profile measures."""

from dataclasses import replace

from gnnplan.planner.machine.model import Table
from gnnplan.planner.workload import (
    BatchProfile,
    ColdCachePenalty,
    GpuLoop,
    GpuSample,
    GpuTiming,
    Interference,
    LoopOverhead,
    ModelTiming,
)
from gnnplan.runtime.stages import Stage
from tests.support.profiles import timing


def least_timing(batch: BatchProfile, ranks: int, threads: tuple[int, ...]) -> ModelTiming:
    """The model and its update alone, in proportion to a batch's vertices."""
    return timing(max(1, round(batch.vertices[-1].mean)), ranks, threads=threads)


def whole_timing(batch: BatchProfile, ranks: int, threads: tuple[int, ...]) -> ModelTiming:
    """With everything else that a profile on cores measures."""
    vertices, edges = batch.vertices[-1].mean, sum(each.mean for each in batch.edges)
    reduced = Table(
        unit="seconds",
        axes=["ranks", "threads"],
        points=[[float(ranks)], [float(t) for t in threads]],
        values=[4e-4 + 1e-6 * vertices / t for t in threads],
        spread=0.05,
    )
    return replace(
        least_timing(batch, ranks, threads),
        all_reduce=reduced if ranks > 1 else None,
        own_batches=ranks > 1,
        batch_seconds=2e-8 * edges,
        sample_seconds=4e-8 * edges + 5e-8 * vertices,
        sample_spread=0.04,
        beside={
            "sample": Interference(work=1.11, step=1.04),
            "gather": Interference(work=1.23, step=1.09),
            "disk": Interference(work=0.93, step=1.02),
        },
        after_wait=ColdCachePenalty(wait_seconds=0.003, seconds=2e-4),
        gather_factors={"gather": 0.81, "mapped_gather": 0.87, "disk_read": 1.07},
        disk_start_seconds=9e-5,
        handing=LoopOverhead(seeds=2.1e-5, labels=1.7e-5, between=6.3e-5),
        warmup_seconds=0.31,
    )


def with_gpu(derived: ModelTiming, batch: BatchProfile, *, captures: bool) -> ModelTiming:
    """As if a GPU had been here to time sampling and the runtime's loop on."""
    edges = sum(each.mean for each in batch.edges)
    alone = GpuSample(seconds=3e-4 + 2e-8 * edges, host_seconds=2.7e-4, spread=0.03)
    captured = GpuSample(seconds=9e-5 + 3e-8 * edges, host_seconds=2.4e-5, spread=0.05)
    ways = [(False, False), (False, True)] + ([(True, False), (True, True)] if captures else [])
    return replace(
        derived,
        host_seconds=5.5e-4,
        gpu=GpuTiming(
            sample=alone,
            captured=captured if captures else None,
            topology="replicated",
            handing_seconds=1.2e-4,
            device_seconds=4.1e-4 + 1e-8 * edges,
            loops=[
                _loop(captured if way else alone, captured=way, ahead=ahead) for way, ahead in ways
            ],
        ),
    )


def _loop(sample: GpuSample, *, captured: bool, ahead: bool) -> GpuLoop:
    stages = {
        Stage.SEEDS: 3e-5,
        Stage.SAMPLE: sample.seconds * (1.4 if ahead else 1.0),
        Stage.GATHER: 6e-5,
        Stage.COPY: 4e-5,
        Stage.BATCH: 5e-5,
        Stage.FORWARD_BACKWARD: 6.5e-4,
        Stage.OPTIMIZER: 2.5e-4,
        **({Stage.WAIT: 1.5e-4} if ahead else {}),
    }
    training = 6.5e-4 + 2.5e-4
    step = training + 2.4e-4 if ahead else training + sample.seconds + 2.6e-4
    return GpuLoop(
        captured=captured,
        ahead=ahead,
        step_seconds=step,
        stages={str(name): seconds for name, seconds in stages.items()},
        spread=0.06,
    )
