"""Stands in for the processes that time a model: its parameters and activations, and no seconds.

The benchmark `memory_plans` looks at bytes alone, and timing takes minutes. What bytes follow from
is measured as ever: the baseline in a process of its own, activations by the real training step.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from gnnplan.planner.fullgraph import profile as whole_profile
from gnnplan.planner.fullgraph.parts import CaseSeconds, PartAnswer, PartRequest
from gnnplan.planner.profile import loop as bench, profile, timing_process as timed_model
from gnnplan.planner.profile.protocol import InLine, LoadingAnswer, TimingAnswer, TimingRequest
from gnnplan.planner.profile.team import TIMING, Team
from gnnplan.planner.workload import SCALES, ProcessCost
from gnnplan.runtime import codec
from gnnplan.runtime.models.build import build_model


class SizesOnly:
    """`planner.profile.team.Team`, without its processes."""

    def __init__(self, size: int, module: str = TIMING) -> None:
        del size
        self.process = _baseline(module)
        self._known: dict[str, TimingAnswer] = {}

    def __enter__(self) -> "SizesOnly":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace

    def time(self, request: TimingRequest, ranks: int) -> list[TimingAnswer]:
        """One step in this process; its seconds stand for all sizes', and a batch takes one."""
        alone = replace(request, scales=[1.0], steps=1, threads=1, loading=None)
        key = codec.content_hash(codec.to_plain(alone))
        if key not in self._known:
            found = timed_model.TimedModel(bench.Bench(alone)).run()
            seconds = found.forward_backward * len(SCALES)
            batch = InLine(sample_seconds=1.0, sample_spread=0.0, gathers={})
            self._known[key] = replace(found, forward_backward=seconds, in_line=batch)
        return [self._known[key]] * ranks

    def load(self, request: TimingRequest, ranks: int) -> LoadingAnswer:
        """Nothing slows anything down."""
        del request, ranks
        return LoadingAnswer(after_wait=None, beside={})

    def ask(self, requests: Sequence[str], threads: int) -> list[str]:
        """Every part's widths and parameters; all cases take a second."""
        del threads
        asked = [codec.decode(PartRequest, json.loads(text)) for text in requests]
        return [json.dumps(codec.to_plain(_answer(each))) for each in asked]


def _answer(request: PartRequest) -> PartAnswer:
    model: Any = build_model(request.workload, request.in_dim, request.num_classes, request.task)
    second = CaseSeconds(
        sample=0.0, forward_backward=1.0, packing=0.0, windows=[0.0] * 9, spread=0.0
    )
    inputs = [int(layer.in_channels) for layer in model.convs[1:]]
    return PartAnswer(
        cases=[second] * len(request.cases),
        optimizer_seconds=0.0,
        num_parameters=sum(p.numel() for p in model.parameters()),
        widths=[request.in_dim, *inputs, request.num_classes],
    )


@functools.cache
def _baseline(module: str) -> ProcessCost:
    with Team(1, module) as team:
        return team.process


def install() -> None:
    """Let profiles be made so from here on; keep them apart from real ones."""
    timed_model.WARMUP_STEPS = bench.BATCHES = 1
    profile.Team = whole_profile.Team = SizesOnly
