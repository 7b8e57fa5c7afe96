"""Sampling with the graph partitioned 1.5D: words against docs/formulas.md 4.7, seconds over links.

`python -m tests.benchmarks.matrix --json [--parts uniform,rmat,links]`

- uniform: columns spread evenly over a circulant graph; every rank's words equal the formulas.
- rmat: GraphSAGE, all hops; the mean words of a serving rank against the formulas with the distinct
  rows and their mean degree as one process samples them in other epochs.
- links: seconds per step on 4 hosts with 1 Gbit/s each (network namespaces, root), over c, k and
  the exchange; the limit is the busiest rank's bytes over its link's rate. Without replication is
  c = 1; `replicated` is the whole graph on every rank, which sends nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gnnplan.planner.cost.backends.grid import link_words, sender_words, stage_ids
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import open_grid
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.distributed.grid import GridSampler, empty_graph
from gnnplan.runtime.sampling.distributed.grid_rows import Exchange, Words, cut_shard
from gnnplan.runtime.sampling.minibatch import Dialect, Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.stages import Stage
from tests.benchmarks.common import Spread, bench_graph, record
from tests.hosts import Hosts
from tests.support.inprocess import run_in_process

GRIDS = [(4, 1), (4, 2), (8, 1), (8, 2), (16, 2), (16, 4), (12, 2)]
DEGREE = 6
FANOUTS = (10, 5)
BATCH = 64
"""Seeds per rank and step."""
RATE_BITS_PER_SECOND = 1e9
REPEATS = 5

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]


def circulant(num_nodes: int) -> Graph:
    """Vertex v aggregates from v + 1 .. v + DEGREE."""
    indices = (np.arange(num_nodes)[:, None] + np.arange(1, DEGREE + 1)) % num_nodes
    indptr = np.arange(0, num_nodes * DEGREE + 1, DEGREE, dtype=np.int64)
    return indptr, indices.reshape(-1).astype(np.int32)


def even_seeds(
    step: int, rank: int, *, steps: int, copies: int, rows: int, batch: int
) -> NDArray[np.int64]:
    """Seeds that are new to the process row and as many in each of its `rows` blocks."""
    row, column = divmod(rank, copies)
    x = np.arange(batch)
    place = (step * copies + column) * (batch // rows) + x // rows
    return (x % rows) * (steps * copies * batch) + place * rows + row


def sample(
    comm: Communicator,
    graph: Graph,
    fanouts: tuple[int, ...],
    copies: int,
    seeds: dict[tuple[int, int], NDArray[np.int64]],
    *,
    exchange: Exchange = Exchange.ONE_SHOT,
) -> Iterator[Words]:
    """Sample all steps as one stack, as often as asked; yields the words of each time."""
    grid = open_grid(comm, copies)
    empty = empty_graph(len(graph[0]) - 1, graph[1].dtype)
    single = NeighborSampler(*empty, fanouts, dialect=Dialect.EVERY_HOP)
    sampler = GridSampler(single, cut_shard(*graph, None, grid), grid, exchange=exchange)
    steps = range(1 + max(step for step, _ in seeds))
    epoch = 0
    while True:
        sampler.rows.words = Words()
        sampler.sample_many(
            [
                [Request(seeds=seeds[s, r], epoch=epoch, step=s) for r in grid.ranks_of_row()]
                for s in steps
            ]
        )
        epoch += 1
        yield sampler.rows.words


def measure_uniform() -> None:
    for ranks, copies in GRIDS:
        for steps in (1, 4):
            rows = ranks // copies
            batch = 8 * rows
            total = steps * ranks * batch
            graph = circulant(total)
            seeds = {
                (s, r): even_seeds(s, r, steps=steps, copies=copies, rows=rows, batch=batch)
                for s in range(steps)
                for r in range(ranks)
            }
            found = run_in_process(
                ranks,
                lambda comm, g=graph, c=copies, q=seeds: next(sample(comm, g, (3,), c, q)),
            )
            formula = {
                "rows": sender_words(total, DEGREE, ranks, copies),
                "ids": stage_ids(total, ranks, copies),
                "reduced": sender_words(total, DEGREE, ranks, copies),
            }
            for kind, expected in formula.items():
                values = {getattr(words, kind) for words in found} - {0}
                record(
                    f"words_{kind}_uniform_p{ranks}_c{copies}_k{steps}", float(max(values)),
                    "words", baseline=expected, ratio=max(values) / expected,
                    equal=values == {expected},
                )  # fmt: skip
            sent = sum(words.link_rows + words.link_reduced for words in found)
            expected = link_words(total, DEGREE, ranks, copies)
            record(
                f"words_links_uniform_p{ranks}_c{copies}_k{steps}", float(sent), "words",
                baseline=expected, ratio=sent / expected, equal=sent == expected,
            )  # fmt: skip


def rank_seeds(
    graph: Graph, ranks: int, steps: int, number: int
) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Shuffled connected vertices, dealt to (step, rank)."""
    connected = np.flatnonzero(np.diff(graph[0]) > 0)
    order = np.random.default_rng(number).permutation(connected).astype(np.int64)
    needed = ranks * steps * BATCH
    if needed > order.shape[0]:
        raise ValueError(f"expected at least {needed} connected vertices, found {order.shape[0]}")
    parts = order[:needed].reshape(steps, ranks, BATCH)
    return {(s, r): parts[s, r] for s in range(steps) for r in range(ranks)}


def expected_rows(
    graph: Graph, ranks: int, copies: int, steps: int, *, pilots: int = 4
) -> list[tuple[float, float]]:
    """Per hop: distinct rows over all process rows, and their mean degree, by one process."""
    single = NeighborSampler(*graph, FANOUTS, dialect=Dialect.EVERY_HOP)
    degrees = np.diff(graph[0])
    counts, edges = np.zeros((2, len(FANOUTS)))
    for pilot in range(1, pilots + 1):
        seeds = rank_seeds(graph, ranks, steps, pilot)
        for row in range(ranks // copies):
            members = range(row * copies, (row + 1) * copies)
            asked: list[list[NDArray[np.int64]]] = [[] for _ in FANOUTS]
            for step in range(steps):
                for rank in members:
                    batch = single.sample(seeds[step, rank], epoch=pilot, step=step)
                    for hop in range(len(FANOUTS)):
                        asked[hop].append(batch.n_id[: batch.blocks[-1 - hop].num_dst])
            for hop, lists in enumerate(asked):
                ids = np.unique(np.concatenate(lists))
                counts[hop] += ids.shape[0]
                edges[hop] += degrees[ids].sum()
    return [(float(n) / pilots, float(e / n)) for n, e in zip(counts, edges, strict=True)]


def measure_rmat(name: str) -> None:
    opened = bench_graph(name)
    graph = np.array(opened.indptr), np.array(opened.indices)
    for ranks, copies in [(8, 1), (8, 2), (8, 4), (9, 3)]:
        for steps in (1, 4, 16):
            seeds = rank_seeds(graph, ranks, steps, 0)
            found = run_in_process(
                ranks,
                lambda comm, c=copies, q=seeds: next(sample(comm, graph, FANOUTS, c, q)),
            )
            hops = expected_rows(graph, ranks, copies, steps)
            serving = ranks // copies
            formula = {
                "rows": sum(sender_words(n, d, ranks, copies) for n, d in hops),
                "ids": sum(stage_ids(n, ranks, copies) for n, _ in hops),
            }
            for kind, expected in formula.items():
                values = [float(getattr(words, kind)) for words in found]
                mean = sum(values) / serving
                record(
                    f"words_{kind}_{name}_p{ranks}_c{copies}_k{steps}", mean, "words",
                    baseline=expected, ratio=mean / expected, within_2_percent=bool(
                        abs(mean / expected - 1) <= 0.02
                    ), max_over_mean=max(values) / mean,
                )  # fmt: skip


def settings() -> list[tuple[int, int, Exchange]]:
    """Steps per bulk, copies (0: the whole graph on every rank) and exchange."""
    both = list(Exchange)
    return [
        (steps, copies, exchange)
        for steps in (1, 4, 16)
        for copies in (0, 1, 2, 4)
        for exchange in (both if copies in (1, 2) else [Exchange.ONE_SHOT])
    ]


def measure_links(name: str) -> None:
    """Four processes, one per host, go through all settings."""
    bench_graph(name)
    names = ["a", "b", "c", "d"]
    with Hosts(names, rate_bits_per_second=RATE_BITS_PER_SECOND) as hosts:
        command = [sys.executable, "-m", "tests.benchmarks.matrix", "--graph", name, "--rank-of"]
        started = [
            hosts.start(
                host, [*command, f"{rank},{len(names)},{hosts.address(names[0])}"],
                stdout=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(names)
        ]  # fmt: skip
        for steps, copies, exchange in settings():
            lines = [process.stdout.readline() for process in started if process.stdout]
            if not all(lines):
                raise RuntimeError(f"a rank ended early at k={steps}, c={copies}, {exchange}")
            _report_links(name, steps, copies, exchange, [json.loads(line) for line in lines])
        for process in started:
            process.wait(timeout=60)


def _report_links(
    name: str, steps: int, copies: int, exchange: Exchange, found: list[dict[str, list[float]]]
) -> None:
    # A step ends when its slowest rank does.
    seconds = [max(each) / steps for each in zip(*(f["seconds"] for f in found), strict=True)]
    most = max(max(f["sent_bytes"]) for f in found)
    limit = 8 * most / RATE_BITS_PER_SECOND / steps
    what = "replicated" if copies == 0 else f"c{copies}_{exchange.value}"
    spread = Spread.of(seconds)
    record(
        f"seconds_step_{name}_p{len(found)}_{what}_k{steps}", spread, "s", baseline=limit,
        ratio=spread.median / limit if limit > 0 else None, sent_bytes=most,
        cores=os.cpu_count(), compute_bound_ranks=len(found),
    )  # fmt: skip


def run_rank(rank: int, size: int, address: str, name: str) -> None:
    """One rank on its host: of each setting, the seconds and bytes sent of every repetition."""
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=600))
    opened = bench_graph(name)
    graph = np.array(opened.indptr), np.array(opened.indices)
    metered: list[int] = []
    comm = Communicator(meter=lambda stage, _, n: metered.append(n * (stage == Stage.SAMPLE)))
    bulk = BulkSampler(*graph, FANOUTS)
    for steps, copies, exchange in settings():
        seeds = rank_seeds(graph, size, steps, 0)
        grid = sample(comm, graph, FANOUTS, copies, seeds, exchange=exchange) if copies else None
        own = [seeds[step, rank] for step in range(steps)]
        found: dict[str, list[float]] = {"seconds": [], "sent_bytes": []}
        for repeat in range(REPEATS + 1):
            dist.barrier()
            metered.clear()
            start = time.perf_counter()
            if grid is None:
                bulk.sample_many(own, epoch=repeat)
            else:
                next(grid)
            elapsed = time.perf_counter() - start
            if repeat > 0:  # the first one compiles, and opens connections
                found["seconds"].append(elapsed)
                found["sent_bytes"].append(sum(metered))
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--parts", default="uniform,rmat,links", help="which to run")
    parser.add_argument("--graph", default="rmat-16", help="for rmat and links")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank, size, address = options.rank_of.split(",")
        run_rank(int(rank), int(size), address, options.graph)
        return
    parts = options.parts.split(",")
    if "uniform" in parts:
        measure_uniform()
    if "rmat" in parts:
        measure_rmat(options.graph)
    if "links" in parts:
        measure_links(options.graph)


if __name__ == "__main__":
    main()
