"""One timing process: runs the real model on batches when told to.

`python -m planner.profiling.timing_process` speaks the lines of planner.profiling.serving. What it
builds imports torch, and only when asked to build.
"""

import functools
from collections.abc import Callable
from typing import Any

from planner.profiling.bench import Bench
from planner.profiling.loader_kept import KeptLoaders
from planner.profiling.loader_seconds import LoadingAnswer
from planner.profiling.rehearsal import rehearse
from planner.profiling.serving import serve_standard_streams
from planner.profiling.timed_loading import time_loading
from planner.profiling.timed_model import TimedModel
from planner.profiling.timing_request import TimingAnswer, TimingRequest
from runtime import codec


class Builder:
    """Builds what requests ask for, and keeps loaders from one to the next."""

    def __init__(self) -> None:
        self._loaders = KeptLoaders()

    def build(self, plain: Any) -> Callable[[], TimingAnswer | LoadingAnswer]:
        """The model and batches of a request, ready to be timed; or a loader among its steps."""
        request = codec.decode(TimingRequest, plain)
        if request.loading is None:
            return TimedModel(Bench(request)).run
        loader = self._loaders.of(request.loading, request.workload, request.rank)
        if not request.times_loading:
            return TimedModel(Bench(request), loader).run
        return functools.partial(time_loading, Bench(request), request.loading, loader)


if __name__ == "__main__":
    serve_standard_streams(
        ("torch", "torch_geometric.nn", "runtime.worker"), Builder().build, rehearse
    )
