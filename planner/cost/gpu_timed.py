"""Stages of a GPU's rank from the runtime's own loop, timed on a GPU here (profiling.gpu_loop).

The loop was run in each way of making batches, all rows on the GPU; its stages mean what a run
meters. What a candidate does otherwise is added: reads of adjacency lists elsewhere than they lay
then, and rows elsewhere, by the machine's rates. In a stack of batches the host starts fewer
kernels for each. A gather takes the host's part or the device's, whichever is longer; in line the
device also gathers while the host starts the model's kernels, of which it is not busy all the time.
"""

from collections.abc import Mapping

from planner.cost.gpu_lanes import has_lanes
from planner.cost.gpu_stages import GpuStages
from planner.cost.gpu_work import WHERE, GpuWork
from planner.workload import GpuLoop, GpuTiming
from runtime.stages import LOADER_STAGES, Stage

MEASURED = ("sample", "gather", "copy", "forward_backward", "optimizer")


def timed_stages(work: GpuWork, timed: GpuTiming, *, step_host_seconds: float) -> GpuStages:
    """Stages of the rank.

    Args:
        work: what it draws and gathers, and where its lists lie.
        timed: on the GPU.
        step_host_seconds: of a step by itself, on the host.

    Raises:
        MachineError: the machine lacks a link or a rate that the candidate needs.
    """
    candidate, relabelling = work.candidate, work.drawing(None)
    reads = {name: work.drawing(place) - relabelling for name, place in WHERE.items()}
    moving, near = work.gathering()
    far_lists = reads["host"] if candidate.topology == "host" else 0.0
    captured, ahead = work.captured_bytes > 0, has_lanes(candidate)
    chosen = timed.captured if captured and timed.captured is not None else timed.sample
    loop = timed.loop(captured=captured, ahead=ahead)
    # Of the host's part of sampling, what a stack's batches start each.
    kept = work.kernels / work.kernels_alone if candidate.bulk > 1 else 1.0
    saved = chosen.host_seconds * (1.0 - kept)
    alone = chosen.host_seconds + timed.handing_seconds + step_host_seconds
    elsewhere = reads[candidate.topology] - reads[timed.topology]
    drawing = relabelling
    if candidate.topology == "replicated":
        device = max(0.0, chosen.seconds - chosen.host_seconds + elsewhere)
        drawing = max(drawing + reads["replicated"], device)
    stages = {name: loop.stages.get(name, 0.0) for name in Stage}
    hidden = 0.0 if ahead else _idle_seconds(stages, timed)
    return GpuStages(
        seeds=stages[Stage.SEEDS],
        sample=max(0.0, stages[Stage.SAMPLE] * (1.0 - saved / chosen.seconds) + elsewhere),
        gather=max(stages[Stage.GATHER], moving - hidden),
        copy=stages[Stage.COPY],
        batch=stages[Stage.BATCH],
        forward_backward=stages[Stage.FORWARD_BACKWARD],
        optimizer=stages[Stage.OPTIMIZER],
        between=_between(loop, in_line=not ahead),
        near=near + drawing,
        on_links=moving - near + work.copying(0.0) + far_lists,
        on_host=loop.step_seconds * (1.0 - saved / alone),
        computing=timed.device_seconds,
        spreads=dict.fromkeys(MEASURED, loop.spread),
        provenance=_words(work, timed),
    )


def _idle_seconds(stages: Mapping[Stage, float], timed: GpuTiming) -> float:
    """Of a step in line, in which the device waits for the host."""
    step = stages[Stage.FORWARD_BACKWARD] + stages[Stage.OPTIMIZER]
    return max(0.0, step - timed.device_seconds)


def _between(loop: GpuLoop, *, in_line: bool) -> float:
    """What the training thread does besides its stages; in line those of the loader are its own."""
    own = LOADER_STAGES if in_line else (Stage.WAIT,)
    stages = (*own, Stage.FORWARD_BACKWARD, Stage.OPTIMIZER)
    return max(0.0, loop.step_seconds - sum(loop.stages.get(name, 0.0) for name in stages))


def _words(work: GpuWork, timed: GpuTiming) -> dict[str, str]:
    loop = "measured: the runtime's own loop on this GPU, on this graph's own batches"
    captured = work.captured_bytes > 0 and timed.captured is not None
    way = "by one CUDA graph" if captured else "kernel by kernel"
    return {
        "seeds": loop,
        "sample": f"measured: {work.sampler} sampling of this graph on this GPU, {way}, "
        "beside all else",
        "gather": f"{loop}: starting its kernels; rows ({work.sources}) by the probe's rates",
        "copy": loop,
        "batch": loop,
        "forward_backward": f"{loop}; its kernels' start, and the wait until they are done",
        "optimizer": loop,
    }
