"""Times what else a loader does on the graph, between and beside the steps of the mean batch.

Sampling and gathering in line are timed with the model (`in_line`); here they are what steps beside
them, and steps after a wait for the disk, are held against.
"""

import itertools

from planner.profiling.bench import Bench
from planner.profiling.loader_kept import Loader
from planner.profiling.loader_seconds import (
    LoadingAnswer,
    LoadingRequest,
    Work,
    after_wait,
    all_beside,
    in_turns,
)
from planner.profiling.loader_work import (
    DISK_START,
    disk_work,
    sampling,
    timed_disk,
)
from planner.profiling.timed_batches import on_rows
from planner.workload import Beside
from runtime.cores import usable_core_ids


def time_loading(bench: Bench, asked: LoadingRequest, loader: Loader) -> LoadingAnswer:
    """Time a loader's work among steps of the mean batch.

    Args:
        bench: the model and its batches.
        asked: how ranks share the graph, and whether a loader thread has a core.
        loader: of this rank.
    """
    from planner.profiling.handing import STEPS, handing  # imports torch

    work, graph, sample = bench.request.workload, loader.graph, loader.sample
    steps = itertools.count()

    def step() -> None:
        bench.turn(bench.steady, next(steps))

    def step_on_rows() -> None:
        bench.step(fresh[next(steps) % len(fresh)])

    steady = bench.batches[bench.steady]
    reading = loader.reading(max(batch.n_id.size for batch in steady))
    out = reading.out
    fresh = on_rows(steady, out)
    # Mapped rows are gathered by a thread that computes as the one of private rows does.
    gathers = {k: each.work for k, each in reading.gathered.items() if k == "gather"}
    handed = handing(bench.loop, graph, work, asked.num_ranks, steady, bench.steps + 1)
    bench.steps += STEPS
    beside = dict[str, Beside]()
    with disk_work(graph, loader.vertices, out) as read:
        between = dict[str, Work]()
        if asked.beside:
            between["sample"] = sampling(sample)
        if asked.beside or read.works:
            between |= gathers
        between |= read.works
        # Rows are read after a batch was drawn, whose tables the caches are then full of: after
        # LADIES, which sums over all nodes, a gather takes a third longer.
        before = {kind: sample for kind in between if kind != "sample"}
        turns = {k: in_turns(work, step_on_rows, before.get(k)) for k, work in between.items()}
        if asked.beside:
            paired = {k: w for k, w in between.items() if k != DISK_START}  # a start is no batch
            alone = {kind: found.work for kind, found in turns.items()}
            # As a run has it: a loader that reads a disk is kept off the cores of compute.
            cores = {"disk": usable_core_ids()[bench.request.threads :]}
            beside = all_beside(
                paired, step, cores, alone=alone, unbroken=read.works, before=before
            )
    return LoadingAnswer(
        after_wait=after_wait(turns["disk"], turns["gather"]) if "disk" in turns else None,
        beside=beside,
        disk=timed_disk(read, turns["disk"]) if "disk" in turns else None,
        handing=handed,
        disk_start_seconds=turns[DISK_START].work if DISK_START in turns else 0.0,
    )
