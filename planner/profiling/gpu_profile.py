"""The profile for GPUs that are not here: batches drawn on these cores, the model by roofline."""

from collections.abc import Sequence
from dataclasses import replace

from planner.machine import MachineModel
from planner.profiling import cache
from planner.profiling.batches import draw_all
from planner.profiling.cache import Profile
from planner.profiling.model_seconds import SCALES
from planner.profiling.profile import cached, profile_key
from planner.profiling.roofline import check_model, roofline_timing
from planner.progress import Progress
from planner.settings import PlanSettings
from planner.workload import Combination, WorkloadProfile
from runtime.graph.dataset import Graph


def gpu_profile(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    ranks: Sequence[int],
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> Profile:
    """The profile for GPUs that are not here: drawn batches, and the model's roofline.

    The batches do not depend on the machine and are cached for all; the roofline is arithmetic.

    Args:
        graph: the dataset.
        settings: sampler, model and global batch.
        machine: the GPUs' rates.
        ranks: numbers of GPUs that candidates may use.
        progress: told what is going on.
        measure: False takes cached batches or raises; nothing is drawn.

    Raises:
        SettingsError: a model whose work does not follow from its shapes, or nothing is cached
            and nothing may be drawn.
    """
    check_model(settings.workload, machine)
    combinations = [Combination(ranks=r, threads=1) for r in sorted(set(ranks))]
    anywhere = replace(machine, fingerprint="any machine: batches alone", tables={})
    key = profile_key(graph, settings, anywhere, combinations)
    drawn = cached(key, graph, measure=measure)
    if drawn is None:
        with cache.staged(key) as made:
            batches, hotness = draw_all(graph, settings, combinations, progress, keep=made.keep)
            numbers = WorkloadProfile(
                graph_fingerprint=graph.fingerprint,
                sampler_fingerprint=key,
                batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
            )
            made.finish(numbers)
        drawn = cache.load(key) or Profile(numbers=numbers, hotness=hotness)
    work = settings.workload
    outputs = {"binary": 1, "link": work.hidden}.get(str(graph.task), graph.num_classes)
    timing = {
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
    return replace(drawn, numbers=replace(drawn.numbers, timing=timing))
