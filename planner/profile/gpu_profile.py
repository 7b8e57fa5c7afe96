"""The profile for GPUs: batches drawn on these cores; the model timed on a GPU that is here.

For GPUs that are not here, or for a model that could not be timed, its seconds are a roofline.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.profile import cache
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.draw import sampler_of
from gnnplan.planner.profile.model_seconds import SCALES
from gnnplan.planner.profile.presample import draw_all
from gnnplan.planner.profile.profile import cached, profile_key
from gnnplan.planner.profile.protocol import GPU, GpuTimingAnswer, GpuTimingReply, GpuTimingRequest
from gnnplan.planner.profile.roofline import check_model, roofline_timing
from gnnplan.planner.profile.team import Team
from gnnplan.planner.progress import Progress, portion, silent
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Combination, GpuTiming, ModelTiming, WorkloadProfile
from gnnplan.runtime import codec
from gnnplan.runtime.cores import usable_core_ids
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.fallback import warn_once
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.sampling.memory import may_capture
from gnnplan.runtime.sampling.registry import is_able

LOOP_SECONDS = 24.0
"""Seconds for the loops of all numbers of ranks, in the ways that plans make batches."""
VERSION = 2
"""Rises when what is timed on a GPU means something else than before."""
LEAST_SECONDS = 1e-9
"""Tables hold positive values."""
DRAWN = 0.5
"""Of the progress of a profile: drawing batches. The rest is timing."""


def gpu_profile(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    ranks: Sequence[int],
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> Profile:
    """The profile for GPUs: drawn batches, and the model's seconds.

    The batches do not depend on the machine and are cached for all. Where the machine is this one,
    sampler and model are timed on its GPU, and what was measured is cached too; the roofline is
    arithmetic.

    Args:
        graph: the dataset.
        settings: sampler, model and global batch.
        machine: the GPUs' rates.
        ranks: numbers of GPUs that candidates may use.
        progress: told what is going on.
        measure: False takes cached batches or raises; nothing is drawn or timed.

    Raises:
        SettingsError: a model whose work does not follow from its shapes, or nothing is cached
            and nothing may be drawn.
        WorkerFailed: the GPU could not be used; the text is its own error.
    """
    timed = _is_timed(graph, settings, machine)
    if not timed:
        check_model(settings.workload, machine)
    report = progress or silent
    combinations = [Combination(ranks=r, threads=1) for r in sorted(set(ranks))]
    drawn = _drawn(graph, settings, machine, combinations, portion(report, 0.0, DRAWN), measure)
    named = replace(machine, fingerprint=f"{machine.fingerprint} GPU {VERSION}")
    key = profile_key(graph, settings, named, combinations)
    found = cached(key, graph, measure=measure or not timed)
    if found is not None:
        return found
    if timed:
        report("timing the model on the GPU", DRAWN)
        timing, refusal = _timed(graph, settings, combinations)
        if not refusal:
            made = replace(drawn, numbers=replace(drawn.numbers, timing=timing))
            cache.save(key, made)
            # Read back: the first plan and a repeated one then see the very same numbers.
            return cache.load(key) or made
        warn_once(
            "GPU timing", f"the model's seconds are derived and not measured, because {refusal}"
        )
        check_model(settings.workload, machine)
    derived = _rooflines(graph, settings, machine, combinations, drawn)
    return replace(drawn, numbers=replace(drawn.numbers, timing=derived))


def _drawn(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    progress: Progress,
    measure: bool,
) -> Profile:
    anywhere = replace(machine, fingerprint="any machine: batches alone", tables={})
    key = profile_key(graph, settings, anywhere, combinations)
    found = cached(key, graph, measure=measure)
    if found is not None:
        return found
    with cache.staged(key) as made:
        batches, hotness = draw_all(graph, settings, combinations, progress, keep=made.keep)
        numbers = WorkloadProfile(
            graph_fingerprint=graph.fingerprint,
            sampler_fingerprint=key,
            batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
        )
        made.finish(numbers)
    return cache.load(key) or Profile(numbers=numbers, hotness=hotness)


def _rooflines(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    drawn: Profile,
) -> dict[str, ModelTiming]:
    """Arithmetic, by seeds of a rank."""
    work = settings.workload
    outputs = {"binary": 1, "link": work.hidden}.get(str(graph.task), graph.num_classes)
    return {
        str(seeds): roofline_timing(
            work,
            machine,
            drawn.numbers.batch(seeds),
            ranks=combination.ranks,
            in_dim=graph.feature_dim,
            num_outputs=outputs,
            scales=SCALES,
        )
        for combination in combinations
        for seeds in [-(-work.batch_size // combination.ranks)]
    }


def _is_timed(graph: Graph, settings: PlanSettings, machine: MachineModel) -> bool:
    """Whether the GPUs are this machine's, and draw this graph's batches themselves."""
    if machine.provenance != "measured" or machine.fingerprint != machine_fingerprint():
        return False
    return str(graph.task) != "link" and not is_typed(settings.workload)


def _timed(
    graph: Graph, settings: PlanSettings, combinations: Sequence[Combination]
) -> tuple[dict[str, ModelTiming], str]:
    """Timed on this machine's first GPU, by seeds of a rank; or why it could not be."""
    found = dict[str, ModelTiming]()
    able = is_able(settings.sampler, settings.sampler_parameters, "captured")
    with Team(1) as team:
        for combination in combinations:
            seeds = -(-settings.workload.batch_size // combination.ranks)
            request = GpuTimingRequest(
                graph=str(graph.path),
                fingerprint=graph.fingerprint,
                workload=settings.workload,
                sampler=sampler_of(settings),
                seeds=seeds,
                scales=SCALES,
                captures=able and may_capture(settings.workload.fanouts, seeds),
                seconds=LOOP_SECONDS / len(combinations),
            )
            line = json.dumps({GPU: codec.to_plain(request)})
            text = team.ask([line], len(usable_core_ids()) or 1)[0]
            reply = codec.decode(GpuTimingReply, json.loads(text))
            if reply.answer is None:
                return {}, reply.refusal
            found[str(seeds)] = timing_of(reply.answer, combination.ranks)
    return found, ""


def timing_of(answer: GpuTimingAnswer, ranks: int) -> ModelTiming:
    """The model's time as it was measured.

    Args:
        answer: of the GPU.
        ranks: GPUs that compute at once; they share nothing.
    """
    update, one = answer.optimizer_seconds, [[float(ranks)], [1.0]]
    return ModelTiming(
        forward_backward=Table(
            unit="seconds",
            axes=["scale", "ranks", "threads"],
            points=[answer.sizes, *one],
            values=[max(LEAST_SECONDS, seconds - update) for seconds in answer.step_seconds],
            spread=answer.spread,
        ),
        optimizer=Table(
            unit="seconds",
            axes=["ranks", "threads"],
            points=one,
            values=[max(LEAST_SECONDS, update)],
            spread=answer.spread,
        ),
        num_parameters=answer.num_parameters,
        activation_bytes=answer.activation_bytes,
        host_seconds=answer.host_seconds,
        gpu=GpuTiming(
            sample=answer.sample,
            captured=answer.captured,
            topology=answer.topology,
            handing_seconds=answer.handing_seconds,
            device_seconds=answer.device_seconds,
            loops=answer.loops,
        ),
    )
