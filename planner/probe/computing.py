"""How fast cores compute a layer: products, sums over edges, and the start of an operation.

One layer of GraphSAGE is timed forward and backward, as in training, on three batches: a tiny one,
nearly all starts; one of wide rows with an edge each, nearly all products; one of many edges to few
destinations, nearly all sums of wide rows. With the operations that `profile.operations` counts, in
the order of sum and product in which the layer runs on each,

    T = operations * core_start + sum of max(flops / core_flops, bytes / core_bytes)

is solved for the three, at each number of compute threads. First answers price models by these
tables; a plan that is measured times the model itself.
"""

import functools
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gnnplan.planner.machine.model import Table, make_table
from gnnplan.planner.probe.context import ProbeContext, powers_up_to
from gnnplan.planner.probe.quiet import disturbance
from gnnplan.planner.probe.team import State
from gnnplan.planner.probe.timing import Measurement, Patience, timed
from gnnplan.planner.profile.operations import (
    LayerShape,
    Operation,
    RooflineRate,
    layer_operations,
    multiplies_first,
)
from gnnplan.runtime.codec import write_text_atomically
from gnnplan.runtime.device import machine_fingerprint, set_threads, usable_cores
from gnnplan.runtime.plan.schema import Workload

TASK = "gnnplan.planner.probe.computing:time_task"
NAMES = {
    "core_start": "seconds",
    "core_flops": "flops_per_second",
    "core_bytes": "bytes_per_second",
}
"""Tables over `threads`, with their units."""
STARTS, PRODUCTS, SUMS = range(3)
SHAPES = (
    LayerShape(
        num_src=256, num_dst=128, num_edges=256, in_dim=16, out_dim=16, inputs=False, heads=1
    ),
    LayerShape(
        num_src=4_000, num_dst=4_000, num_edges=4_000, in_dim=256, out_dim=128, inputs=False,
        heads=1,
    ),
    LayerShape(
        num_src=30_000, num_dst=1_000, num_edges=120_000, in_dim=256, out_dim=32, inputs=True,
        heads=1,
    ),
)  # fmt: skip
"""Batches of the three steps; the last has so many edges that its sums are taken first.

Products of middling width stand for all: wider ones are up to 1.3 times as fast on a thread and
twice as fast on two, narrow ones slower by as much (DEC-190).
"""
CALLS = 7
"""Steps of a batch that are timed outside a probe, of which the median counts."""
AGAIN_SECONDS = 2.0
"""Seconds of second tries outside a probe: about as long as the first ones take."""
VERSION = 2
"""Number of what is timed and solved; kept rates of another one are not read."""
RATIO_LIMIT = 0.2
LEARNT_SPREAD = 0.05
"""Relative half-width of rates from few steps (assumed)."""
ROUNDS = 20
"""Turns in which each rate is solved for with the other held; they settle within a few."""
WORK_SHARE = 0.5
"""Least share of a step that is no start, so that the step tells a rate of work."""
EXPLAINED = 0.1
"""Most that solved rates may leave of the work of a step, or add to it, relative to it."""


def measure(context: ProbeContext) -> dict[str, Table]:
    """Measure the tables `core_start`, `core_flops` and `core_bytes`, by one process alone."""
    threads = [1, context.cores] if context.sizes.corners_only else powers_up_to(1, context.cores)
    threads = sorted(set(threads))
    sizes = context.sizes

    def samples(number: int, threads: int) -> list[float]:
        found = context.team.run(
            TASK, ranks=1, number=number, threads=threads, seconds=sizes.point_seconds,
            least=sizes.least_repeats, most=context.budget.left,
        )  # fmt: skip
        return list(found[0])

    found = context.walk(
        {"threads": threads, "batch": range(len(SHAPES))},
        lambda at: context.settle(lambda: samples(at[1], at[0]), limit=RATIO_LIMIT),
    )
    solved = dict[tuple[int, ...], dict[str, Measurement]]()
    for each in threads:
        read = [one for number in range(len(SHAPES)) if (one := found.get((each, number)))]
        if len(read) < len(SHAPES):
            continue
        rates = solve_rates([one.value for one in read])
        if rates is None:
            context.notes.append(
                "core rates: none, since no three explain the steps of a layer at threads "
                f"{each}; run gnnplan probe again when nothing else runs here"
            )
            return {}
        solved[each,] = {
            name: replace(one, value=rates[name]) for name, one in zip(NAMES, read, strict=True)
        }
    if not solved:
        return {}
    return {
        name: table
        for name, unit in NAMES.items()
        for table in context.table(
            name, unit, {"threads": threads}, {at: rates[name] for at, rates in solved.items()}
        ).values()
    }


def list_operations(shape: LayerShape) -> list[Operation]:
    """List the operations of a step, in the order of sum and product in which its layer runs."""
    product_first = multiplies_first(_workload_of(shape), shape, "cpu")
    return list(layer_operations("sage", shape, product_first=product_first))


def _workload_of(shape: LayerShape) -> Workload:
    fanout = int(shape.num_edges) // int(shape.num_dst)
    return Workload(model="sage", num_layers=1, fanouts=[fanout])


def solve_rates(seconds: Sequence[float]) -> dict[str, float] | None:
    """Solve for the three rates that explain the seconds of the three steps, by their names.

    None where starts explain most of a step that is to tell another rate, or where no rates explain
    its work, as on a disturbed machine.
    """
    operations = list(map(list_operations, SHAPES))
    start = seconds[STARTS] / len(operations[STARTS])
    work = [took - len(each) * start for took, each in zip(seconds, operations, strict=True)]
    if any(work[each] < WORK_SHARE * seconds[each] for each in (PRODUCTS, SUMS)):
        return None
    rate = RooflineRate(flops=1e11, bytes=3e10)

    def off(number: int) -> float:
        """Return the seconds of work that the present rates say, over those that there were."""
        return sum(map(rate.seconds, operations[number])) / work[number]

    for _ in range(ROUNDS):
        rate = replace(rate, flops=rate.flops * off(PRODUCTS))
        rate = replace(rate, bytes=rate.bytes * off(SUMS))
    if not all(abs(off(each) - 1.0) <= EXPLAINED for each in (PRODUCTS, SUMS)):
        return None
    return {"core_start": start, "core_flops": rate.flops, "core_bytes": rate.bytes}


def time_task(
    state: State, *, number: int, threads: int, seconds: float, least: int, most: float
) -> list[float]:
    """Task: seconds of one of the three steps on so many compute threads."""
    del state
    with computing_on(threads):
        return timed(make_step(SHAPES[number]), seconds=seconds, least=least, most=most)


@contextmanager
def computing_on(threads: int) -> Generator[None]:
    """Compute on so many threads within the block, and on as many as before behind it."""
    import numba
    import torch

    before, kernels = torch.get_num_threads(), numba.get_num_threads()
    set_threads(threads)
    try:
        yield
    finally:
        set_threads(kernels)
        torch.set_num_threads(before)


def make_step(shape: LayerShape) -> Callable[[], object]:
    """Make a function that runs a layer forward and backward on a batch of that shape."""
    import torch

    from gnnplan.runtime.models.adjacency import TorchBlock
    from gnnplan.runtime.models.build import build_model

    made = torch.Generator().manual_seed(0)  # the caller's own numbers stay as they are
    num_src, num_dst, num_edges = int(shape.num_src), int(shape.num_dst), int(shape.num_edges)
    model = build_model(_workload_of(shape), shape.in_dim, shape.out_dim, "multiclass")
    x = torch.randn(num_src, shape.in_dim, generator=made).requires_grad_(not shape.inputs)
    indices = torch.randint(0, num_src, (num_edges,), generator=made, dtype=torch.int32)
    indptr = torch.arange(num_dst + 1) * (num_edges // num_dst)

    def step() -> None:
        x.grad = None
        model.zero_grad()
        # Each batch has a block of its own, whose edges are turned around for the way back.
        block = TorchBlock(num_src=num_src, num_dst=num_dst, indptr=indptr, indices=indices)
        model(x, [block]).sum().backward()

    step()
    step()
    return step


def learn_rates(folder: Path) -> None:
    """Measure this process's cores, and keep what was found in a folder: about two seconds.

    Nothing is kept where a step is noisy or disturbed in two tries, or no rates explain the steps.
    """
    found = dict[int, dict[str, float]]()
    with disturbance(folder) as disturbed:
        patience = Patience(disturbed.level, seconds=AGAIN_SECONDS)
        for threads in sorted({1, usable_cores()}):
            with computing_on(threads):
                read = [
                    patience.settle(
                        functools.partial(timed, make_step(shape), seconds=0.0, least=CALLS),
                        limit=RATIO_LIMIT,
                    )
                    for shape in SHAPES
                ]
            rates = solve_rates([each.value for each in read])
            if rates is None or any(each.uncertain for each in read):
                return
            found[threads] = rates
    write_text_atomically(_file(folder), json.dumps(found))


def known_rates(folder: Path) -> dict[str, Table]:
    """Read the tables that `learn_rates` has kept; none where it never ran on this machine."""
    try:
        read = json.loads(_file(folder).read_text())
        threads = sorted(map(int, read))
        return {
            name: make_table(
                unit,
                {"threads": threads},
                [read[str(each)][name] for each in threads],
                LEARNT_SPREAD,
            )
            for name, unit in NAMES.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _file(folder: Path) -> Path:
    return folder / f"computing-{VERSION}-{machine_fingerprint()}.json"
