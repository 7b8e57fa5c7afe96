"""The probe: hardware -> MachineModel, one call.

Workers are started once (their start is itself measured), subjects run one after the other so that
nothing disturbs what is being measured, and every table carries its spread. Read this page first;
each subject is a file of this folder.
"""

import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.cache_folder import cache_folder
from planner.errors import MachineError
from planner.machine import (
    MachineModel,
    Memory,
    Processor,
    Switch,
    Table,
    load_machine,
    save_machine,
)
from planner.probe import collectives, disk, gpu, host, links, memory, overlap, sampling
from planner.probe.context import ProbeContext, ProgressCallback
from planner.probe.disturbance import disturbance
from planner.probe.gpu_bench import GpuFindings
from planner.probe.gpu_machine import with_gpus
from planner.probe.hosts import measure_hosts
from planner.probe.hosts_machine import join_hosts
from planner.probe.hosts_team import HostTeam, Meeting
from planner.probe.nvml import Inventory, inventory
from planner.probe.pace import slowdown
from planner.probe.patience import Patience
from planner.probe.sizes import FULL, QUICK, ProbeSizes, fit_to
from planner.probe.team import Team
from planner.probe.timing import summarize
from planner.progress import silent
from runtime.device import available_ram_bytes, machine_facts, machine_fingerprint

VERSION = "6"
"""Rises when tables mean something else; cached machines of another version are measured anew."""

WAITED = 0.5
"""Most seconds lost to cores that are far apart, over those that were measured."""
SUBJECTS: tuple[tuple[str, float, Callable[[ProbeContext], dict[str, Table]]], ...] = (
    ("memory", 0.15, memory.measure),
    ("disk", 0.40, disk.measure),
    ("exchange between ranks", 0.45, collectives.measure),
    ("overlap", 0.65, overlap.measure),
    ("sampling", 0.75, sampling.measure),
)
"""What is measured, the share of the probe done before it, and by what."""


def probe(*, quick: bool = False, progress: ProgressCallback | None = None) -> MachineModel:
    """Measure this machine.

    Takes under 20 s (quick) or 120 s (full) on an idle 2-core machine, up to half as long again
    where its cores are far apart at times, and writes nothing but temporary files in
    `cache_folder()`, to measure the disk that holds it, and how near the cores were.

    Args:
        quick: coarser grids and fewer repeats.
        progress: called with what is under way and the share that is done.

    Raises:
        WorkerFailed: a measuring process failed; its error is shown.
    """
    return probe_with(QUICK if quick else FULL, progress=progress)


def probe_hosts(
    meeting: Meeting, *, quick: bool = False, progress: ProgressCallback | None = None
) -> MachineModel:
    """Measure this host, and with the others that meet here the links between all of them.

    Every host calls this and returns the same machine (planner/probe/hosts_machine.py).

    Args:
        meeting: this host among the others.
        quick: as for `probe`, alike on all hosts.
        progress: as for `probe`.

    Raises:
        WorkerFailed: a host did not come in time, or a measuring process failed.
    """
    sizes = QUICK if quick else FULL
    report = progress or silent
    with HostTeam(meeting, sizes) as team:
        own = probe_with(sizes, progress=lambda what, share: report(what, 0.7 * share))
        machines = team.gather(own)
        rates = measure_hosts(team, lambda what, share: report(what, 0.7 + 0.3 * share))
    return join_hosts(machines, rates)


def probe_with(sizes: ProbeSizes, *, progress: ProgressCallback | None = None) -> MachineModel:
    """Like `probe`, with sizes of one's own."""
    report = progress or silent
    facts = machine_facts()
    sizes = fit_to(sizes, cores=facts["cores"], available_ram_bytes=available_ram_bytes())
    wanted = max(2, facts["cores"] * (2 if sizes.oversubscribe else 1))
    before = host.read_load()
    scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=cache_folder()))
    try:
        started = time.perf_counter()
        report("starting processes", 0.0)
        with disturbance(cache_folder()) as disturbed, Team(min(sizes.max_team, wanted)) as team:
            context = ProbeContext(
                team=team,
                sizes=sizes,
                cores=facts["cores"],
                scratch=scratch,
                deadline=started + sizes.retry_seconds,
                patience=Patience(disturbed.level, share=WAITED),
            )
            collectives.join(context)
            tables = _start_table(context, time.perf_counter() - started)
            report("noise floor", 0.05)
            noise = _noise(context)
            paces = [slowdown(sizes.pace_seconds)]
            for name, share, measure in SUBJECTS:
                report(name, share)
                tables |= measure(context)
            gpus = inventory()
            measured = list[GpuFindings]()
            if gpus is not None and gpus.gpus:
                report("GPUs", 0.9)
                measured = gpu.measure(context, gpus)
            paces.append(slowdown(sizes.pace_seconds))
        memories = host.host_memories(facts, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    notes = context.notes + host.numa_notes(facts)
    notes += host.load_notes(before, host.read_load(), facts["cores"])
    notes += host.pace_notes(statistics.fmean(paces))
    notes += host.disturbance_notes(context.patience)
    report("done", 1.0)
    machine = _assemble(facts, sizes, tables, noise, memories, notes, gpus)
    return with_gpus(machine, measured)


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
