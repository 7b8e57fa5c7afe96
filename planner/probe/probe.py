"""The probe: hardware -> MachineModel, one call.

Workers are started once (their start is itself measured), subjects run one after the other so that
nothing disturbs what is being measured, and every table carries its spread. Read this page first;
each subject is a file of this folder.

The probe's total limit of time: how coarsely the rest is measured so that it is kept.

On a busy machine the same points take many times as long. Before each subject the time that is left
is held against what the rest would take at the pace so far; where it does not suffice, the rest has
a coarser grid and fewer repeats, and its tables are marked uncertain.
"""

import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.cache_folder import cache_folder
from planner.errors import MachineError
from planner.machine.model import (
    MachineModel,
    Memory,
    Processor,
    Switch,
    Table,
    load_machine,
    save_machine,
)
from planner.probe import collectives, disk, host, links, memory, overlap, sampling
from planner.probe.context import (
    FULL,
    QUICK,
    ProbeContext,
    ProbeSizes,
    ProgressCallback,
    fit_to,
    ladder_from,
)
from planner.probe.gpu import measure as gpu
from planner.probe.gpu.machine import with_gpus
from planner.probe.gpu.measure import GpuFindings
from planner.probe.gpu.nvml import Inventory, inventory
from planner.probe.hosts import HostTeam, Meeting, measure_hosts
from planner.probe.hosts_machine import join_hosts
from planner.probe.pace import slowdown
from planner.probe.quiet import disturbance
from planner.probe.team import OutOfTime, Team
from planner.probe.timing import Patience, summarize
from planner.progress import silent
from runtime.comm.route import check_loopback
from runtime.device import available_ram_bytes, machine_facts, machine_fingerprint
from runtime.errors import WorkerFailed

START_SECONDS = 8.0
"""From no process to all of them joined, torch imported, on an idle machine."""
KEPT_BACK = 0.1
"""Share of the time left that is not planned with."""


class TimeLimit:
    """Of one probe, from now on.

    Args:
        seconds: the probe may take.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock, self._begun = clock, clock()
        self._expected = START_SECONDS

    @property
    def end(self) -> float:
        """Moment of the clock after which nothing is waited for."""
        return self._begun + self.seconds

    @property
    def slowness(self) -> float:
        """How many times as long what was measured has taken as on an idle machine; at least 1."""
        return max(1.0, (self._clock() - self._begun) / self._expected)

    def fitting(self, ladder: Sequence[ProbeSizes], share: float) -> ProbeSizes:
        """The finest sizes at which the rest keeps the limit at the pace so far, or the coarsest.

        Args:
            ladder: the finest first.
            share: of the probe that is done.
        """
        left = (1 - KEPT_BACK) * (self.end - self._clock())
        for sizes in ladder:
            if self.slowness * sizes.idle_seconds * (1 - share) <= left:
                return sizes
        return ladder[-1]

    def passed(self, sizes: ProbeSizes, share: float) -> None:
        """Count a share of the probe as measured with these sizes."""
        self._expected += sizes.idle_seconds * share


VERSION = "6"
"""Rises when tables mean something else; cached machines of another version are measured anew."""

WAITED = 0.5
"""Most seconds lost to cores that are far apart, over those that were measured."""
SUBJECTS: tuple[tuple[str, float, Callable[[ProbeContext], dict[str, Table]]], ...] = (
    ("memory", 0.15, memory.measure),
    ("exchange between ranks", 0.40, collectives.measure),
    ("sampling", 0.60, sampling.measure),
    ("disk", 0.75, disk.measure),
    ("overlap", 0.80, overlap.measure),
)
"""What is measured, the share of the probe done before it, and by what."""
NEEDED = ("memory", "exchange between ranks", "sampling")
"""Without these nothing can be planned; plans do without the others."""
GPUS = ("GPUs", 0.90)
FULL_SECONDS, QUICK_SECONDS = 300.0, 60.0
"""A probe ends within so many seconds, however busy the machine."""


def probe(
    *,
    quick: bool = False,
    progress: ProgressCallback | None = None,
    seconds: float | None = None,
) -> MachineModel:
    """Measure this machine.

    Takes under 20 s (quick) or 150 s (full) on an idle 2-core machine, up to half as long again
    where its cores are far apart at times; on a busy one it measures less and marks it uncertain,
    so that it ends in time. Writes nothing but temporary files in
    `cache_folder()`, to measure the disk that holds it, and how near the cores were.

    Args:
        quick: coarser grids and fewer repeats.
        progress: called with what is under way and the share that is done.
        seconds: it may take at most; None: 300, or 60 where quick.

    Raises:
        WorkerFailed: a measuring process failed, and its error is shown; or what no plan can do
            without was not measured in time, and the ways on are named.
    """
    default = QUICK_SECONDS if quick else FULL_SECONDS
    return probe_with(
        QUICK if quick else FULL,
        progress=progress,
        seconds=default if seconds is None else seconds,
    )


def probe_hosts(
    meeting: Meeting,
    *,
    quick: bool = False,
    progress: ProgressCallback | None = None,
    seconds: float = FULL_SECONDS,
) -> MachineModel:
    """Measure this host, and with the others that meet here the links between all of them.

    Every host calls this and returns the same machine (planner/probe/hosts_machine.py).

    Args:
        meeting: this host among the others.
        quick: as for `probe`, alike on all hosts.
        progress: as for `probe`.
        seconds: each host's own part may take at most.

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
) -> MachineModel:
    """Like `probe`, with sizes of one's own."""
    report = progress or silent
    check_loopback()
    limit = TimeLimit(seconds)
    facts = machine_facts()
    ram, cores = available_ram_bytes(), facts["cores"]
    ladder = [fit_to(each, cores=cores, available_ram_bytes=ram) for each in ladder_from(sizes)]
    wanted = max(2, cores * (2 if sizes.oversubscribe else 1))
    before = host.read_load()
    scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=cache_folder()))
    try:
        report("starting processes", 0.0)
        started = time.perf_counter()
        with (
            disturbance(cache_folder()) as disturbed,
            Team(min(sizes.max_team, wanted), until=limit.end) as team,
        ):
            context = ProbeContext(
                team=team,
                sizes=ladder[0],
                cores=cores,
                scratch=scratch,
                deadline=started + sizes.retry_seconds,
                patience=Patience(disturbed.level, share=WAITED),
            )
            under_way = _Run(
                context=context, limit=limit, ladder=ladder, report=report, started=started
            )
            try:
                under_way.measure()
            except OutOfTime:
                team.kill()
            under_way.refuse_without_the_needed()
        memories = host.host_memories(facts, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    notes = under_way.time_notes() + context.notes + host.numa_notes(facts)
    notes += host.load_notes(before, host.read_load(), cores)
    notes += host.pace_notes(statistics.fmean(under_way.paces))
    notes += host.disturbance_notes(context.patience)
    report("done", 1.0)
    machine = _assemble(
        facts, sizes, under_way.tables, under_way.noise, memories, notes, under_way.gpus
    )
    return with_gpus(machine, under_way.measured)


@dataclass(slots=True)
class _Run:
    """One probe under way: what has been measured so far, each subject with the sizes that fit."""

    context: ProbeContext
    limit: TimeLimit
    ladder: list[ProbeSizes]
    report: ProgressCallback
    started: float
    """Reading of time.perf_counter before the first process was."""
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    noise: float = 0.0
    paces: list[float] = field(default_factory=list[float])
    gpus: Inventory | None = None
    measured: list[GpuFindings] = field(default_factory=list[GpuFindings])
    done: list[str] = field(default_factory=list[str])
    """Subjects that were measured."""
    coarse: list[str] = field(default_factory=list[str])
    """Those of them that had coarser sizes than were asked for."""

    def measure(self) -> None:
        """Measure all subjects in turn.

        Raises:
            OutOfTime: the limit has passed; what was measured until then is kept.
        """
        context = self.context
        collectives.join(context)
        self.tables |= _start_table(context, time.perf_counter() - self.started)
        self.report("noise floor", 0.05)
        context.sizes = self.limit.fitting(self.ladder, 0.05)
        self.noise = _noise(context)
        self.paces.append(slowdown(context.sizes.pace_seconds))
        self.gpus = inventory()
        ends = [share for _, share, _ in SUBJECTS[1:]] + [GPUS[1]]
        for (name, share, measure), end in zip(SUBJECTS, ends, strict=True):
            self._subject(name, share, end, measure)
        if self.gpus is not None and self.gpus.gpus:
            self.report(*GPUS)
            self.measured = gpu.measure(context, self.gpus)
        self.paces.append(slowdown(context.sizes.pace_seconds))

    def _subject(
        self,
        name: str,
        share: float,
        end: float,
        measure: Callable[[ProbeContext], dict[str, Table]],
    ) -> None:
        self.report(name, share)
        sizes = self.context.sizes = self.limit.fitting(self.ladder, share)
        found = measure(self.context)
        self.limit.passed(sizes, end - share)
        self.done.append(name)
        if sizes != self.ladder[0]:
            self.coarse.append(name)
            found = {key: replace(table, uncertain=True) for key, table in found.items()}
        self.tables |= found

    def refuse_without_the_needed(self) -> None:
        """Refuse to end with less than plans need.

        Raises:
            WorkerFailed: names what is missing and the ways on.
        """
        missing = [name for name in NEEDED if name not in self.done]
        if missing:
            raise WorkerFailed(
                f"the probe did not come to {', '.join(missing)} within {self.limit.seconds:.0f} "
                "s: other work is running on this machine. Probe it when it is idle, or allow more "
                "time (gnnplan probe --seconds N), or measure less (gnnplan probe --quick -o FILE, "
                "then --machine FILE), or plan for a preset (--machine PRESET, see gnnplan machine "
                "list)"
            )

    def time_notes(self) -> list[str]:
        """What was measured coarsely, or not at all, for want of time."""
        notes: list[str] = []
        left = [name for name, _, _ in SUBJECTS if name not in self.done]
        within = f"within {self.limit.seconds:.0f} s"
        again = "run gnnplan probe again when nothing else runs here, or with more --seconds"
        if self.coarse:
            notes.append(
                f"time: to end {within} on a busy machine fewer points and repeats were measured, "
                f"and are uncertain, of {', '.join(self.coarse)}; {again}"
            )
        if left:
            notes.append(f"time: not measured {within}: {', '.join(left)}; {again}")
        return notes


def with_disk_again(
    machine: MachineModel, *, progress: ProgressCallback | None = None
) -> MachineModel:
    """The machine with its disk measured anew: those of virtual machines swing within minutes.

    Takes seconds. Plans price the disk anew; all else is as it was. Where direct reads are refused
    the machine keeps what it has, and a note says why.

    Args:
        machine: a model of this machine.
        progress: as for `probe`.
    """
    report = progress or silent
    report("disk", 0.0)
    sizes = FULL if machine.extent == FULL.name else QUICK
    scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=cache_folder()))
    try:
        with Team(max(1, min(sizes.max_team, machine.num_cores))) as team:
            context = ProbeContext(team=team, sizes=sizes, cores=machine.num_cores, scratch=scratch)
            found = disk.measure(context)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
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
    """From no process to all of them joined in one group, torch imported: part of start-up."""
    ranks = [context.team.size]
    return context.table("process_start", "seconds", {"ranks": ranks}, [summarize([seconds])])


def _noise(context: ProbeContext) -> float:
    found = context.team.run(
        "planner.probe.timing:noise_task",
        ranks=1,
        kernel_seconds=context.sizes.noise_kernel_seconds,
        repeats=context.sizes.noise_repeats,
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
    """Join facts, tables, derived links and the GPU inventory."""
    processors: list[Processor] = [host.host_processor(facts)]
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
) -> MachineModel:
    """This machine's model: from a file, from the cache, or measured now and cached.

    Args:
        path: a machine file to read instead; it must exist.
        quick: a quick probe will do. A cached full probe serves both; a quick one only quick.
        progress: as for `probe`.

    Raises:
        MachineError: `path` is missing or damaged. A damaged cache is measured again.
    """
    if path is not None:
        return load_machine(path)
    found = cached_machine(quick=quick)
    if found is not None:
        return found
    machine = probe(quick=quick, progress=progress)
    save_machine(machine, _cached_path())
    return machine


def keep_for_plans(machine: MachineModel) -> bool:
    """Keep a full probe of this machine for plans that name none; returns whether it is one."""
    if not _is_current(machine) or machine.extent != FULL.name:
        return False
    save_machine(machine, _cached_path())
    return True


def cached_machine(*, quick: bool = False) -> MachineModel | None:
    """This machine's model as it was probed before; None where it has to be measured.

    Args:
        quick: a quick probe will do.
    """
    try:
        machine = load_machine(_cached_path())
    except MachineError:
        return None  # absent, damaged or of an older release
    return machine if _is_current(machine) and (quick or machine.extent == FULL.name) else None


def _is_current(machine: MachineModel) -> bool:
    """Whether this machine was measured, by a probe whose tables mean what this one's do."""
    return machine.fingerprint == machine_fingerprint() and machine.versions.get("probe") == VERSION


def _cached_path() -> Path:
    return cache_folder() / f"machine-{machine_fingerprint()}.json"
