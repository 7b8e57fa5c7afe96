"""The probe: measures the hardware and returns a MachineModel.

Workers are started once (their start is itself measured), subjects run one after the other so that
nothing disturbs what is being measured, and every table carries its spread. What plans cannot do
without is measured first, in haste; the rest of a total time is shared out over subjects and points
before they are measured (DEC-101). Read this page first; each subject is a file of this folder.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnnplan.planner.array_cache import cache_folder
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import (
    MachineModel,
    Memory,
    Processor,
    Switch,
    Table,
    load_machine,
    save_machine,
)
from gnnplan.planner.probe import (
    collectives,
    computing,
    disk,
    links,
    memory,
    overlap,
    quiet,
    sampling,
)
from gnnplan.planner.probe.context import (
    AGAIN,
    FULL,
    QUICK,
    ProbeContext,
    ProbeSizes,
    ProgressCallback,
    fit_to,
    smallest,
)
from gnnplan.planner.probe.gpu import parts as gpu
from gnnplan.planner.probe.gpu.machine import with_gpus
from gnnplan.planner.probe.gpu.measure import GpuFindings
from gnnplan.planner.probe.gpu.nvml import Inventory, inventory
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.hosts import HostTeam, Meeting, measure_hosts
from gnnplan.planner.probe.hosts_machine import join_hosts
from gnnplan.planner.probe.quiet import disturbance
from gnnplan.planner.probe.team import OutOfTime, Team
from gnnplan.planner.probe.timing import summarize
from gnnplan.planner.units import silent
from gnnplan.runtime.codec import content_hash
from gnnplan.runtime.comm.route import check_loopback
from gnnplan.runtime.device import available_ram_bytes, machine_facts, machine_fingerprint
from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.folders import Unfinished, sweep_unfinished

VERSION = "7"
"""Version of the tables' meaning; cached machines of another version are measured anew."""

SUBJECTS: tuple[tuple[str, float, Callable[[ProbeContext], dict[str, Table]]], ...] = (
    ("memory", 0.3, memory.measure),
    ("sampling", 0.25, sampling.measure),
    ("computing", 0.03, computing.measure),
    ("exchange between ranks", 0.25, collectives.measure),
    ("overlap", 0.1, overlap.measure),
    ("disk", 0.1, disk.measure),
)
"""Name, part of the time and function of each subject; what plans need most comes first."""
LOOK = "gnnplan.planner.probe.quiet:look_task"
NEEDED = ("memory", "sampling", "computing", "exchange between ranks")
"""Subjects without which nothing can be planned: their corners are measured first, always."""
GPUS = ("GPUs", 0.3)
"""Name and part of the time of the GPUs, where there are some."""
NOISE_SHARE = 0.06
FULL_SECONDS, QUICK_SECONDS = 180.0, 30.0
"""Seconds after which a probe measures nothing that plans can do without."""
GIVEN_UP = 4.0
"""Multiple of that limit, a quick probe's at least, after which it ends without a machine."""
KEPT_BACK, MOST_KEPT_BACK = 0.13, 10.0
"""Share of the limit, and most seconds, that are kept for writing files."""
SHARED_OUT = 0.92
"""Share of the rest that is shared out; points may overrun theirs by what is left."""


def probe(
    *,
    quick: bool = False,
    progress: ProgressCallback | None = None,
    seconds: float | None = None,
    began: float | None = None,
) -> MachineModel:
    """Measure this machine.

    On a busy machine it measures less and marks it uncertain, so that it ends in time; what plans
    cannot do without is measured however long it takes, up to four times the limit. Writes nothing
    but temporary files in `cache_folder()`, to measure the disk that holds it, and how quiet the
    machine was.

    Args:
        quick: coarser grids and fewer repeats.
        progress: called with what is under way and the share that is done.
        seconds: seconds of measuring; None: 180, or 30 where quick.
        began: reading of time.monotonic() that they count from; None: now.

    Raises:
        WorkerFailed: a measuring process failed, and its error is shown; or what plans cannot do
            without took four times as long, and the ways on are named.
    """
    default = QUICK_SECONDS if quick else FULL_SECONDS
    return probe_with(
        QUICK if quick else FULL,
        progress=progress,
        seconds=default if seconds is None else seconds,
        began=began,
    )


def probe_hosts(
    meeting: Meeting,
    *,
    quick: bool = False,
    progress: ProgressCallback | None = None,
    seconds: float = FULL_SECONDS,
) -> MachineModel:
    """Measure this host, and with the others that meet here the links between all of them.

    Every host calls this and returns the same machine (planner/probe/hosts_machine.py). `seconds`
    limit each host's own part; other arguments as for `probe`, alike on all hosts.

    Raises:
        WorkerFailed: a host did not come in time, or a measuring process failed.
    """
    sizes = QUICK if quick else FULL
    report = progress or silent
    with HostTeam(meeting, sizes) as team:
        own = probe_with(
            sizes, progress=lambda what, share: report(what, 0.7 * share), seconds=seconds
        )
        machines = team.gather(own)
        rates = measure_hosts(team, lambda what, share: report(what, 0.7 + 0.3 * share))
    return join_hosts(machines, rates)


def probe_with(
    sizes: ProbeSizes,
    *,
    progress: ProgressCallback | None = None,
    seconds: float = FULL_SECONDS,
    began: float | None = None,
) -> MachineModel:
    """Measure as `probe` does, with other sizes."""
    report = progress or silent
    check_loopback()
    began = time.monotonic() if began is None else began
    until = began + seconds - min(KEPT_BACK * seconds, MOST_KEPT_BACK)
    given_up = began + GIVEN_UP * max(seconds, QUICK_SECONDS)
    facts = machine_facts()
    cores = facts["cores"]
    wanted = max(2, cores * (2 if sizes.oversubscribe else 1))
    before = quiet.read_load()
    made = _make_scratch()
    scratch = made.folder
    sizes = fit_to(sizes, cores=cores, available_ram_bytes=available_ram_bytes())
    try:
        report("starting processes", 0.0)
        with (
            Team(min(sizes.max_team, wanted), until=given_up) as team,
            disturbance(cache_folder(), lambda: float(team.run(LOOK, ranks=1)[0])) as disturbed,
        ):
            context = ProbeContext(team=team, sizes=smallest(sizes), cores=cores, scratch=scratch)
            under_way = _Run(context, report, seconds)
            try:
                under_way.measure_needed()
            except OutOfTime:
                raise WorkerFailed(_gave_up(given_up - began)) from None
            team.until = until
            budget = Budget(SHARED_OUT * max(0.0, until - time.monotonic()))
            context.begin(sizes, budget, disturbed.level)
            try:
                under_way.measure_all()
            except OutOfTime:
                team.kill()
        memories = links.host_memories(facts, scratch)
    finally:
        made.remove()
    notes = under_way.time_notes() + context.notes + links.numa_notes(facts)
    notes += quiet.load_notes(before, quiet.read_load(), cores)
    notes += quiet.disturbance_notes(context.patience.num_disturbed)
    report("done", 1.0)
    machine = _assemble(
        facts, sizes, under_way.tables, under_way.noise, memories, notes, under_way.gpus
    )
    return with_gpus(machine, under_way.measured)


class _Run:
    def __init__(self, context: ProbeContext, report: ProgressCallback, seconds: float) -> None:
        self.context, self.report, self.seconds = context, report, seconds
        self.tables = dict[str, Table]()
        self.noise = 0.0
        self.gpus: Inventory | None = None
        self.measured = list[GpuFindings]()
        self.done = list[str]()
        """Subjects that were measured whole."""

    def measure_needed(self) -> None:
        context, begun = self.context, time.perf_counter()
        collectives.join(context)
        self.tables |= _start_table(context, time.perf_counter() - begun)
        context.team.run(memory.WARM_UP)
        self.noise = _noise(context)
        for name, _, measure in SUBJECTS:
            if name in NEEDED:
                self.report(f"{name}, what plans need", 0.05)
                self.tables |= measure(context)

    def measure_all(self) -> None:
        """Measure all subjects in turn until OutOfTime, which keeps what was measured."""
        context = self.context
        self.gpus = inventory()
        self.report("noise floor", 0.05)
        with context.budget.within(NOISE_SHARE):
            self.noise = _noise(context)
        has_gpus = self.gpus is not None and bool(self.gpus.gpus)
        to_come = sum(weight for _, weight, _ in SUBJECTS) + (GPUS[1] if has_gpus else 0.0)
        total = to_come
        for name, weight, measure in SUBJECTS:
            self.report(name, 1 - 0.95 * to_come / total)
            with context.budget.within(weight / to_come):
                self.tables |= measure(context)
            self.done.append(name)
            to_come -= weight
        if has_gpus:
            self.report(GPUS[0], 1 - 0.95 * to_come / total)
            self.measured = gpu.measure(context, self.gpus)
        self.done.append(GPUS[0])

    def time_notes(self) -> list[str]:
        subjects = [name for name, _, _ in SUBJECTS]
        if self.gpus is not None and self.gpus.gpus:
            subjects.append(GPUS[0])
        left = [name for name in subjects if name not in self.done]
        kinds = {
            "not measured": [name for name in left if name not in NEEDED],
            "measured at few points only": [name for name in left if name in NEEDED],
        }
        within = f"within {self.seconds:.0f} s"
        return [f"time: {how} {within}: {', '.join(n)}; {AGAIN}" for how, n in kinds.items() if n]


def _gave_up(seconds: float) -> str:
    return (
        f"the probe did not come to what plans need within {seconds:.0f} s: other work is running "
        "on this machine. Probe it when it is idle, or allow more time (gnnplan probe --seconds "
        "N), or plan for a machine file made before (--machine FILE; without it the one that a "
        "full probe kept) or a preset (--machine PRESET, see gnnplan machine list)"
    )


def with_disk_again(
    machine: MachineModel, *, progress: ProgressCallback | None = None
) -> MachineModel:
    """Measure a machine's disk anew: those of virtual machines swing within minutes.

    All else is as it was. Where direct reads are refused the machine keeps what it has, and a note
    says why. Takes seconds.
    """
    report = progress or silent
    report("disk", 0.0)
    sizes = FULL if machine.extent == FULL.name else QUICK
    made = _make_scratch()
    scratch = made.folder
    try:
        with Team(max(1, min(sizes.max_team, machine.num_cores))) as team:
            context = ProbeContext(team=team, sizes=sizes, cores=machine.num_cores, scratch=scratch)
            found = disk.measure(context)
    finally:
        made.remove()
    report("done", 1.0)
    return replace(
        machine,
        tables=machine.tables | found,
        links=[
            links.disk_link(found["disk_read"]) if found and link.name == links.DISK else link
            for link in machine.links
        ],
        notes=list(dict.fromkeys(machine.notes + context.notes)),
    )


def _start_table(context: ProbeContext, seconds: float) -> dict[str, Table]:
    """Return the seconds from no process to all of them in one group, torch imported."""
    size = context.team.size
    return context.table(
        "process_start", "seconds", {"ranks": [size]}, {(size,): summarize([seconds])}
    )


def _make_scratch() -> Unfinished:
    """Make a folder for files to measure, and remove those of probes that were killed."""
    sweep_unfinished(cache_folder())
    return Unfinished(cache_folder() / "probe")


def _noise(context: ProbeContext) -> float:
    sizes = context.sizes
    longest = context.budget.left / (sizes.noise_repeats + 1)
    found = context.team.run(
        "gnnplan.planner.probe.timing:noise_task",
        ranks=1,
        kernel_seconds=min(sizes.noise_kernel_seconds, longest),
        repeats=sizes.noise_repeats,
    )
    return float(found[0])


def _assemble(
    facts: dict[str, Any],
    sizes: ProbeSizes,
    tables: dict[str, Table],
    noise: float,
    memories: list[Memory],
    notes: list[str],
    gpus: Inventory | None,
) -> MachineModel:
    processors: list[Processor] = [links.host_processor(facts)]
    found_links, link_notes = links.host_links(tables)
    covers: list[list[list[str]]] = [[]]
    switches: list[Switch] = []
    if gpus is not None:
        more_processors, more_memories, gpu_notes = links.gpu_parts(gpus)
        processors += more_processors
        memories = memories + more_memories
        found_links += links.gpu_links(gpus)
        switches = links.gpu_switches(gpus)
        covers = links.nvlink_covers(gpus)
        notes = notes + gpu_notes
    return MachineModel(
        name=platform.node() or "this-machine",
        fingerprint=machine_fingerprint(facts),
        provenance="measured",
        processors=processors,
        memories=memories,
        links=found_links,
        switches=switches,
        cliques=covers[0],
        other_covers=covers[1:],
        tables=tables,
        noise=noise,
        versions=facts["versions"] | {"probe": VERSION},
        notes=notes + link_notes,
        extent=sizes.name,
    )


def load_or_probe(
    path: Path | None = None,
    *,
    quick: bool = False,
    progress: ProgressCallback | None = None,
    seconds: float | None = None,
) -> MachineModel:
    """Return this machine's model: from a file, from the cache, or measured now and cached.

    Args:
        path: a machine file to read instead; MachineError where it is missing or damaged.
        quick: whether a quick probe will do; a cached full probe serves both.
        progress: as for `probe`.
        seconds: as for `probe`.
    """
    if path is not None:
        return load_machine(path)
    found = cached_machine(quick=quick)
    if found is not None:
        return found
    machine = probe(quick=quick, progress=progress, seconds=seconds)
    save_machine(machine, _cached_path())
    return machine


def keep_for_plans(machine: MachineModel) -> bool:
    """Keep a probe of this machine for plans that name none; tell whether it was kept.

    A quick one never takes the place of a full one.
    """
    if not _is_current(machine) or (machine.extent != FULL.name and cached_machine() is not None):
        return False
    save_machine(machine, _cached_path())
    return True


def cached_machine(*, quick: bool = False) -> MachineModel | None:
    """Return this machine's cached model, quick or full; None where it has to be measured."""
    try:
        machine = load_machine(_cached_path())
    except MachineError:
        return None  # absent, damaged or of an older release
    return machine if _is_current(machine) and (quick or machine.extent == FULL.name) else None


def _is_current(machine: MachineModel) -> bool:
    return machine.fingerprint == machine_fingerprint() and machine.versions.get("probe") == VERSION


def _cached_path() -> Path:
    """Return the file of this machine, apart from that of the whole box where CUDA hides kinds."""
    facts = machine_facts()
    shown = sorted(gpu["name"] for gpu in facts["gpus"])
    hidden = f"-{content_hash(shown)[:8]}" if shown != sorted(facts["box_gpus"]) else ""
    return cache_folder() / f"machine-{machine_fingerprint(facts)}{hidden}.json"
