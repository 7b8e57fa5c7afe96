"""Times a loader's work on the graph, between and beside the steps of the mean batch."""

import itertools

from planner.profiling.bench import Bench
from planner.profiling.loader_kept import Loader
from planner.profiling.loader_seconds import (
    LoadingAnswer,
    LoadingRequest,
    after_wait,
    all_beside,
    in_turns,
)
from planner.profiling.loader_work import (
    DISK_START,
    disk_work,
    sampling,
    timed_disk,
    timed_gather,
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
    out, gathered = reading.out, reading.gathered
    fresh = on_rows(steady, out)
    works = {"sample": sampling(sample), **{k: each.work for k, each in gathered.items()}}
    handed = handing(bench.loop, graph, work, asked.num_ranks, steady, bench.steps + 1)
    bench.steps += STEPS
    beside = dict[str, Beside]()
    with disk_work(graph, loader.vertices, out) as read:
        between = {**works, **read.works}
        # Rows are read after a batch was drawn, whose tables the caches are then full of: after
        # LADIES, which sums over all nodes, a gather takes a third longer.
        before = {kind: sample for kind in between if kind != "sample"}
        turns = {k: in_turns(work, step_on_rows, before.get(k)) for k, work in between.items()}
        if asked.beside:
            # The thread of mapped rows computes as the other's does; a start is no batch.
            paired = {k: w for k, w in between.items() if k not in ("mapped_gather", DISK_START)}
            alone = {kind: found.work for kind, found in turns.items()}
            # As a run has it: a loader that reads a disk is kept off the cores of compute.
            cores = {"disk": usable_core_ids()[bench.request.threads :]}
            beside = all_beside(
                paired, step, cores, alone=alone, unbroken=read.works, before=before
            )
    return LoadingAnswer(
        sample_seconds=turns["sample"].work,
        gathers={k: timed_gather(each, turns[k]) for k, each in gathered.items()},
        after_wait=after_wait(turns["disk"], turns["gather"]) if "disk" in turns else None,
        beside=beside,
        disk=timed_disk(read, turns["disk"]) if "disk" in turns else None,
        handing=handed,
        disk_start_seconds=turns[DISK_START].work if DISK_START in turns else 0.0,
        sample_spread=turns["sample"].work_spread,
    )
