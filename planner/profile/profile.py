"""The profile of a graph: batches drawn on these cores, and the model timed on cores or a GPU.

On cores the model is timed for every number of ranks, within a minute on graphs of up to ten
million edges, whatever else runs: the time that drawing leaves is dealt to the timings
(`planner.profile.schedule`, DEC-102). For GPUs it is timed on one that is here. For GPUs that are
not, or for a model that could not be timed, its seconds are a roofline.
"""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gnnplan.planner.array_cache import cache_folder
from gnnplan.planner.cost.request import part_of, part_profile, seeds_per_rank
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.probe.quiet import disturbance
from gnnplan.planner.probe.timing import DISTURBED
from gnnplan.planner.profile import cache
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.draw import sampler_of
from gnnplan.planner.profile.model_seconds import with_loading
from gnnplan.planner.profile.presample import MOST_SAMPLED, draw_all, draw_sharing
from gnnplan.planner.profile.protocol import GPU, GpuTimingAnswer, GpuTimingReply, GpuTimingRequest
from gnnplan.planner.profile.roofline import check_model, rooflines
from gnnplan.planner.profile.schedule import Timed, TimedBatch, time_all
from gnnplan.planner.profile.team import Team, launcher_bytes
from gnnplan.planner.search.dimensions.joined_ranks import shares_batches, shares_topology
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, portion, silent
from gnnplan.planner.workload import (
    SCALES,
    BatchProfile,
    Combination,
    GpuTiming,
    ModelTiming,
    ProcessCost,
    WorkloadProfile,
)
from gnnplan.runtime import codec
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.errors import warn_once
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.plan.setting import Workload, own_fields
from gnnplan.runtime.process import usable_core_ids
from gnnplan.runtime.sampling.memory import may_capture
from gnnplan.runtime.sampling.registry import is_able

VERSION = 50
"""Version of a profile's meaning, part of its key."""

KEYED = (14, 3, 9)
"""Constants of a profile's key, which keep the names of older profiles."""
PROFILE_SECONDS, LEAST_SECONDS = 48.0, 5.0
"""Seconds after which nothing more of a profile is begun, and the least for timing."""
DRAWN = 0.05
"""Share of a profile's progress that is drawing; the rest is timing."""
BRIEF_VERSION = 1
"""Version of the meaning of profiles in brief, part of their keys."""
GATHER_TABLES = ("gather", "mapped_gather", "disk_read")
"""Tables of the machine to which a graph's gathers and disk reads are compared."""
LOOP_SECONDS = 24.0
"""Seconds for the loops of all numbers of ranks and ways of making batches."""
GPU_VERSION = 2
"""Version of the meaning of GPU timings, part of a profile's key."""
LEAST_VALUE = 1e-9
"""Least value of a table, whose values are positive."""
GPU_DRAWN = 0.5
"""Share of a GPU profile's progress that is drawing; the rest is timing."""


def profile_key(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
) -> str:
    """Hash everything that decides a profile, with the tables that its factors are of."""
    work = settings.workload
    apart = {x.name: x.default for x in own_fields(Workload) if not x.setting.profiled}
    decided = [
        VERSION,
        [graph.fingerprint, machine.fingerprint, settings.sampler, settings.dialect],
        [machine.tables.get(name) for name in GATHER_TABLES],
        settings.sampler_parameters,
        replace(work, **apart),
        list(combinations),
        [SCALES, *KEYED, MOST_SAMPLED],
    ]
    return codec.content_hash(decided)[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One workload to profile."""

    settings: PlanSettings
    combinations: Sequence[Combination]
    """Ways to share the cores that candidates may use."""


def profiles(
    graph: Graph,
    wanted: Sequence[Wanted],
    machine: MachineModel,
    *,
    progress: Progress | None = None,
    measure: bool = True,
    seconds: float | None = None,
) -> list[Profile]:
    """Return profiles of workloads that are to be compared, from the cache where they are whole.

    They are timed in the same rounds, so that a slow minute of the machine meets all of them
    (DEC-38).

    Args:
        graph: the dataset.
        wanted: workloads to profile.
        machine: the machine; its fingerprint enters the key, since layer times are its own.
        progress: called with what is done and the share of it.
        measure: False takes cached profiles or raises; nothing is drawn or timed.
        seconds: seconds after which nothing more is begun; None for `PROFILE_SECONDS`. A profile
            in brief has a name of its own, and a whole one is taken where it is cached.

    Raises:
        SettingsError: nothing may be measured and there is a profile that is not cached.
        WorkerFailed: the model could not be timed; the text is its own error.
    """
    brief = replace(machine, fingerprint=f"{machine.fingerprint} brief {BRIEF_VERSION}")
    whole, short = _sitting(graph, wanted, machine), _sitting(graph, wanted, brief)
    for keys, name in (whole, short) if seconds is not None or not measure else (whole,):
        kept = [cache.load(key) for key in keys]
        found = [each for each in kept if each is not None]
        together = len(keys) == 1 or all(each.numbers.sitting == name for each in found)
        if len(found) == len(keys) and (together or not measure):
            return found
    keys, name = whole if seconds is None else short
    if not measure:
        cached(keys[0], graph, measure=False)
    made = _make(graph, wanted, machine, keys, progress, seconds)
    for key, each in zip(keys, made, strict=True):
        cache.save(key, replace(each, numbers=replace(each.numbers, sitting=name)))
    # Read back: the first plan and a repeated one then see the very same numbers.
    return [cache.load(key) or each for key, each in zip(keys, made, strict=True)]


def _sitting(
    graph: Graph, wanted: Sequence[Wanted], machine: MachineModel
) -> tuple[list[str], str]:
    """Return the keys of profiles, and the name of timing them together; empty for one alone."""
    keys = [profile_key(graph, each.settings, machine, each.combinations) for each in wanted]
    return keys, codec.content_hash(sorted(keys))[:32] if len(keys) > 1 else ""


def cached(key: str, graph: Graph, *, measure: bool) -> Profile | None:
    """Return the cached profile of a key; None where it may be made, else raise SettingsError."""
    found = cache.load(key)
    if found is None and not measure:
        raise SettingsError(
            f"expected the profile of {graph.name} in {cache.cache_folder()}, found none for these "
            "settings and this machine, and questions time nothing; plan with these settings"
        )
    return found


def _make(
    graph: Graph,
    wanted: Sequence[Wanted],
    machine: MachineModel,
    keys: Sequence[str],
    progress: Progress | None,
    seconds: float | None,
) -> list[Profile]:
    begun, progress = time.monotonic(), progress or silent
    until = begun + (PROFILE_SECONDS if seconds is None else seconds)
    drawing, timing = portion(progress, 0.0, DRAWN), portion(progress, DRAWN, 1.0)
    with ThreadPoolExecutor(1) as beside, disturbance(cache_folder()) as disturbed:
        launcher = beside.submit(launcher_bytes)  # other processes, while nothing is timed
        drawn = [_Drawn(graph, each, drawing) for each in wanted]
        bytes_of_launcher = launcher.result()
        levels = [disturbed.level()]
        with Team(max(c.ranks for each in wanted for c in each.combinations)) as team:
            process = replace(team.process, launcher_bytes=bytes_of_launcher)
            left = max(LEAST_SECONDS, until - time.monotonic())
            timed = [t for each in drawn for t in each.timed]
            enough = None if seconds is None else machine.noise
            found = iter(time_all(graph, timed, team, timing, left, enough=enough))
        levels.append(disturbed.level())
    notes = [f"timed in {left:.0f} s at most"]
    if max(levels) >= DISTURBED:
        notes.append(
            f"uncertain: the machine was busy, {max(levels):.1f} times what counts as quiet"
        )
    return [
        each.profile(key, machine, found, process, notes)
        for each, key in zip(drawn, keys, strict=True)
    ]


class _Drawn:
    def __init__(self, graph: Graph, wanted: Wanted, progress: Progress | None) -> None:
        settings, combinations = wanted.settings, wanted.combinations
        self._graph, self._work = graph, settings.workload
        self._batches, self._hotness = draw_all(graph, settings, combinations, progress)
        self._shared, self._stacks = draw_sharing(graph, settings, combinations)
        self._every_hop = settings.dialect == "every_hop"
        by_key: dict[str, list[Combination]] = {}
        for combination in combinations:
            by_key.setdefault(combination.key(self._work.batch_size), []).append(combination)
        self._keys = list(by_key)
        self.timed = [
            TimedBatch(batch=self._batch(mine[0]), combinations=mine, settings=settings)
            for mine in by_key.values()
        ]

    def _batch(self, found: Combination) -> BatchProfile:
        size = self._work.batch_size
        if self._shared is None or not found.shared:
            return self._batches[seeds_per_rank(size, found.num_ranks)]
        whole = self._batches[size]
        part = part_of(whole, self._shared, found.num_ranks, every_hop=self._every_hop)
        return part_profile(whole, part)

    def profile(
        self,
        key: str,
        machine: MachineModel,
        found: Iterator[Timed],
        process: ProcessCost,
        notes: list[str],
    ) -> Profile:
        """Return the profile, given the times of `timed`, which `found` yields next."""
        mine = [next(found) for _ in self.timed]
        timing = {
            name: with_loading(
                each.model, each.in_line, each.loading, machine, batch.combinations[0].ranks
            )
            for name, batch, each in zip(self._keys, self.timed, mine, strict=True)
        }
        numbers = WorkloadProfile(
            graph_fingerprint=self._graph.fingerprint,
            sampler_fingerprint=key,
            batches=[self._batches[seeds] for seeds in sorted(self._batches, reverse=True)],
            timing=timing,
            process=process,
            shared=self._shared,
            stacks=self._stacks,
            notes=[*notes, *(note for each in mine for note in each.notes)],
        )
        return Profile(numbers=numbers, hotness=self._hotness)


def gpu_profile(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    ranks: Sequence[int],
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> Profile:
    """Return the profile for GPUs: drawn batches, and the model's seconds.

    Batches do not depend on the machine and are cached for all. Where the machine is this one,
    sampler and model are timed on its GPU, and the times are cached too. `measure` False takes
    cached batches or raises; nothing is drawn or timed.

    Raises:
        SettingsError: a model whose work does not follow from its shapes, or nothing is cached.
        WorkerFailed: the GPU could not be used; the text is its own error.
    """
    timed = is_timed(graph, settings, machine)
    if not timed:
        check_model(settings.workload, machine)
    report = progress or silent
    parts = shares_topology(settings, str(graph.task), gpus=True)
    combinations = [
        Combination(ranks=r, threads=1, parts=parts and r > 1) for r in sorted(set(ranks))
    ]
    if shares_batches(settings, str(graph.task), gpus=True):
        several = [c for c in combinations if c.ranks > 1]
        combinations += [replace(c, shared=True, parts=False) for c in several]
    drawn = _draw_for_gpus(
        graph, settings, machine, combinations, portion(report, 0.0, GPU_DRAWN), measure
    )
    number = _number_of_gpu(machine) if timed else 0
    model = f" {machine.gpus[0].model}" if timed else ""  # of a box of several, the one shown
    model += f" {number}" if number else ""
    named = replace(machine, fingerprint=f"{machine.fingerprint} GPU {GPU_VERSION}{model}")
    key = profile_key(graph, settings, named, combinations)
    found = cached(key, graph, measure=measure or not timed)
    if found is not None:
        return found
    if timed:
        report("timing the model on the GPU", GPU_DRAWN)
        timing, refusal = _time_on_gpu(graph, settings, combinations, number)
        if not refusal:
            # A part of a shared batch is at most a batch of its own (docs/formulas.md 5.7).
            work = settings.workload.batch_size
            timing |= {
                c.key(work): replace(timing[str(seeds_per_rank(work, c.ranks))], gpu=None)
                for c in combinations
                if c.shared
            }
            made = replace(drawn, numbers=replace(drawn.numbers, timing=timing))
            cache.save(key, made)
            # Read back: the first plan and a repeated one then see the very same numbers.
            return cache.load(key) or made
        warn_once(
            "GPU timing", f"the model's seconds are derived and not measured, because {refusal}"
        )
        check_model(settings.workload, machine)
    derived = rooflines(graph, settings, machine, combinations, drawn.numbers)
    return replace(drawn, numbers=replace(drawn.numbers, timing=derived))


def _draw_for_gpus(
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
        shared, stacks = draw_sharing(graph, settings, combinations)
        numbers = WorkloadProfile(
            graph_fingerprint=graph.fingerprint,
            sampler_fingerprint=key,
            batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
            shared=shared,
            stacks=stacks,
        )
        made.finish(numbers)
    return cache.load(key) or Profile(numbers=numbers, hotness=hotness)


def is_timed(graph: Graph, settings: PlanSettings, machine: MachineModel) -> bool:
    """Tell whether the GPUs are this machine's, and draw this graph's batches themselves."""
    if machine.provenance != "measured" or machine.fingerprint != machine_fingerprint():
        return False
    plain = str(graph.task) != "link" and not is_typed(settings.workload)
    return plain and graph.x_csr is None


def _number_of_gpu(machine: MachineModel) -> int:
    """Return CUDA's number of the first GPU; those of another kind may come before it."""
    return max(0, machine.gpus[0].number)


def _time_on_gpu(
    graph: Graph, settings: PlanSettings, combinations: Sequence[Combination], gpu: int
) -> tuple[dict[str, ModelTiming], str]:
    """Time on one of this machine's GPUs, by seeds of a rank; or say why it could not be."""
    found = dict[str, ModelTiming]()
    able = is_able(settings.sampler, settings.sampler_parameters, "captured")
    alone = [combination for combination in combinations if not combination.shared]
    with Team(1) as team:
        for combination in alone:
            seeds = seeds_per_rank(settings.workload.batch_size, combination.ranks)
            request = GpuTimingRequest(
                graph=str(graph.path),
                fingerprint=graph.fingerprint,
                workload=settings.workload,
                sampler=sampler_of(settings),
                seeds=seeds,
                scales=SCALES,
                captures=able and may_capture(settings.workload.fanouts, seeds),
                gpu=gpu,
                seconds=LOOP_SECONDS / len(alone),
            )
            line = json.dumps({GPU: codec.to_plain(request)})
            text = team.ask([line], len(usable_core_ids()) or 1)[0]
            reply = codec.decode(GpuTimingReply, json.loads(text))
            if reply.answer is None:
                return {}, reply.refusal
            found[str(seeds)] = timing_of(reply.answer, combination.ranks)
    return found, ""


def timing_of(answer: GpuTimingAnswer, ranks: int) -> ModelTiming:
    """Make tables of a GPU's answer; `ranks` GPUs compute at once and share nothing."""
    update, one = answer.optimizer_seconds, {"ranks": [ranks], "threads": [1]}
    values = [max(LEAST_VALUE, seconds - update) for seconds in answer.step_seconds]
    return ModelTiming(
        forward_backward=make_table(
            "seconds", {"scale": answer.sizes} | one, values, answer.spread
        ),
        optimizer=make_table("seconds", one, [max(LEAST_VALUE, update)], answer.spread),
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
