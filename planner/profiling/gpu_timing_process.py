"""One process that times sampling and the model on this machine's first GPU when told to.

`python -m planner.profiling.gpu_timing_process` speaks the lines of planner.profiling.serving. The
planner itself never makes a CUDA context: that takes half a gigabyte and outlives what it is for.
"""

from collections.abc import Callable
from typing import Any

from planner.profiling.gpu_timing_request import GpuTimingReply, GpuTimingRequest
from planner.profiling.serving import serve_standard_streams
from runtime import codec


def build(plain: Any) -> Callable[[], GpuTimingReply]:
    """A request, ready to be timed."""
    request = codec.decode(GpuTimingRequest, plain)
    return lambda: _timed(request)


def _timed(request: GpuTimingRequest) -> GpuTimingReply:
    import torch

    from runtime.errors import SamplerError
    from runtime.fallback import has_triton

    if not torch.cuda.is_available():
        return GpuTimingReply(refusal="this torch has no CUDA")
    if not has_triton():
        return GpuTimingReply(refusal="Triton is not installed")
    from planner.profiling.gpu_timing import GpuTimed
    from runtime.device import set_threads

    device = torch.device("cuda", 0)
    set_threads(1)  # as plans for GPUs have it
    try:
        return GpuTimingReply(answer=GpuTimed(request, device).run())
    except torch.OutOfMemoryError:
        return GpuTimingReply(refusal="a step of this model does not fit in the GPU's memory")
    except SamplerError as error:
        return GpuTimingReply(refusal=str(error))


if __name__ == "__main__":
    serve_standard_streams(("torch", "torch_geometric.nn", "runtime.worker"), build)
