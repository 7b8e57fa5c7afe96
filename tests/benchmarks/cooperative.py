"""Cooperative against independent batches: vertices, bytes, caches, epochs over a slow link.

`python -m tests.benchmarks.cooperative --json [--quick] [--data FOLDER]
[--only vertices,caches,epochs]`

The global batch is the same in both ways; fan-outs per hop are 10.

- `vertices_coop_over_independent_<graph>_<ranks>`: input vertices that all ranks load per batch,
  cooperative over independent, neighbour sampling; `..._labor0` LABOR-0. 2, 4 and (counted without
  training) 8 ranks. `remote` holds per hop the counted share of vertices that others own, and that
  of [C20].
- `bytes_coop_over_independent_<graph>_<ranks>[_labor0]`: feature bytes loaded by all ranks per
  batch, likewise; beside it what cooperation sends: ids, rows, and hidden rows there and back.
- `lru_hits_<way>_<graph>_<ranks>_kappa<k>`: hit rate of one LRU cache per rank over all its reads;
  `baseline` is the model's [A7], `static` that of as many rows chosen by hotness.
- `epoch_coop_over_independent_<graph>_<ranks>[_labor0]`: seconds of an epoch, ranks spread over two
  hosts with a link of 1 Gbit/s, features dealt over the ranks (no host holds them all);
  `compute_bound` where there are more ranks than cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.stages.exchange_gpu import remote_share
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import build_sampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage
from tests.benchmarks.common import Spread, bench_graph, cache_folder, record
from tests.benchmarks.cooperative_lru import Caches, estimate, hottest
from tests.hosts import Hosts
from tests.reference.cache_hits import dependent_hit_rate
from tests.support.cooperative import make_cooperative_plan
from tests.support.inprocess import run_in_process

FANOUTS = [10, 10]
HIDDEN = 64
SAMPLERS = {"": Sampler(dialect="every_hop"), "_labor0": Sampler(name="labor", dialect="every_hop")}
FEATURES = {"coauthor-physics": "project:128"}
CACHE_BATCH = 32
KAPPAS = (1, 4, 16, 64, 256)
SECTIONS = ("vertices", "caches", "epochs")
RATE_BITS_PER_SECOND = 1e9
PORT = 29_577
"""Free in every host: its network is new."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    graphs: tuple[str, ...]
    batch: int
    batches: int
    lru_batches: int
    streams: int
    epochs: int
    cache_ranks: tuple[int, ...]
    train_ranks: tuple[int, ...]


FULL = Size(
    ("amazon-computers", "coauthor-physics", "rmat-16"), 1024, 20, 400, 16, 3, (2, 4), (2, 4)
)
QUICK = Size(("amazon-computers",), 256, 3, 60, 4, 1, (2,), (2,))


def open_benchmark_graph(name: str, data: Path) -> Graph:
    """A data pack imported once, or an R-MAT graph generated once, in the cache."""
    if name.startswith("rmat"):
        return bench_graph(name, feature_dim=128)
    folder = cache_folder() / f"cooperative-{name}"
    if (folder / "graph.json").exists():
        return open_graph(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"importing {name} into {folder}", file=sys.stderr)
    options = ImportOptions(features=FEATURES.get(name, "dense"))
    return import_graph(data / f"{name}.npz", folder, options=options)


def input_vertices(graph: Graph, sampler: Sampler, ranks: int, size: Size) -> NDArray[np.int64]:
    """Input vertices of every independent share, summed over ranks; by batch."""
    one = build_sampler(sampler, graph.indptr, graph.indices, FANOUTS, 0)
    found = np.zeros(size.batches, np.int64)
    for rank in range(ranks):
        schedule = SeedSchedule(graph.train_idx, size.batch, seed=0, num_ranks=ranks, rank=rank)
        for batch in range(size.batches):
            epoch, step = divmod(batch, schedule.num_steps)
            seeds, _, _ = schedule.share(epoch, step)
            found[batch] += len(one.sample(seeds, epoch=epoch, step=step).n_id)
    return found


def cooperate(
    graph: Graph, sampler: Sampler, ranks: int, size: Size
) -> list[tuple[list[MiniBatch], int]]:
    """Every rank's batches and the bytes of ids that it sent; ranks are threads."""
    owners = Owners(ranks, num_nodes=graph.num_nodes)
    schedule = SeedSchedule(graph.train_idx, size.batch, seed=0)

    def rank(comm: Any) -> tuple[list[MiniBatch], int]:
        mine = CooperativeSampler(
            sampler, graph.indptr, graph.indices, FANOUTS, 0, owners=owners, comm=comm
        )
        batches = []
        for batch in range(size.batches):
            epoch, step = divmod(batch, schedule.num_steps)
            seeds, _, _ = schedule.share(epoch, step)
            own = seeds[owners.of(seeds) == comm.rank]
            batches.append(mine.sample(own, epoch=epoch, step=step))
        return batches, comm.traffic[Stage.EXCHANGE_IDS].sent_bytes

    return run_in_process(ranks, rank)


def measure_vertices(name: str, graph: Graph, ranks: int, suffix: str, size: Size) -> None:
    """Vertices and bytes per batch of both ways."""
    sampler = SAMPLERS[suffix]
    apart = input_vertices(graph, sampler, ranks, size)
    found = cooperate(graph, sampler, ranks, size)
    parts = [batches for batches, _ in found]
    steps = list(zip(*parts, strict=True))
    together = np.array([sum(part.exchanges[0].num_own for part in step) for step in steps])
    remote = []
    for layer in reversed(range(len(FANOUTS))):
        every = [part for step in steps for part in step]
        touched = sum(part.exchanges[layer].num_touched for part in every)
        expanded = sum(part.blocks[layer].num_dst for part in every)
        counted = sum(part.exchanges[layer].num_remote for part in every) / touched
        formula = remote_share(expanded, touched, ranks)
        remote.append({"counted": round(counted, 4), "c20": round(formula, 4)})
    record(
        f"vertices_coop_over_independent_{name}_{ranks}{suffix}",
        Spread.of((together / apart).tolist()),
        "ratio",
        baseline=1.0,
        independent=float(apart.mean()),
        cooperative=float(together.mean()),
        remote=remote,
    )
    sent_rows = sum(part.exchanges[0].num_remote for step in steps for part in step)
    hidden = sum(e.num_remote for step in steps for part in step for e in part.exchanges[1:])
    per = len(steps)
    loaded = {"independent": apart.mean(), "cooperative": together.mean()}
    record(
        f"bytes_coop_over_independent_{name}_{ranks}{suffix}",
        float(together.sum() / apart.sum()),
        "ratio",
        baseline=1.0,
        **{f"{way}_loaded_bytes": float(rows * graph.row_bytes) for way, rows in loaded.items()},
        sent_id_bytes=sum(sent for _, sent in found) / per,
        sent_row_bytes=sent_rows * graph.row_bytes / per,
        sent_hidden_bytes=2 * hidden * HIDDEN * 4 / per,
    )


@dataclass(frozen=True, slots=True)
class Way:
    """Who reads which rows in one way of batching, on one number of ranks."""

    name: str
    graph: Graph
    ranks: int
    batch: int

    def reads(self, sampler: Any, batch: int) -> list[NDArray[np.int64]]:
        """The rows that each rank loads for one batch.

        A rank of a cooperative job loads what it owns of the whole batch's input vertices
        (`tests/runtime/sampling/distributed/test_cooperative.py` holds the sampler to that).
        """
        schedule = SeedSchedule(self.graph.train_idx, self.batch, seed=0)
        epoch, step = divmod(batch, schedule.num_steps)
        if self.name == "coop":
            ids = sampler.sample(schedule.share(epoch, step)[0], epoch=epoch, step=step).n_id
            owner = Owners(self.ranks, num_nodes=self.graph.num_nodes).of(ids)
            return [ids[owner == rank] for rank in range(self.ranks)]
        seeds = np.array_split(schedule.share(epoch, step)[0], self.ranks)
        return [sampler.sample(part, epoch=epoch, step=step).n_id for part in seeds]

    def sampler(self, kappa: float, seed: int = 0) -> Any:
        """LABOR-0 whose segments run on over epochs."""
        steps = SeedSchedule(self.graph.train_idx, self.batch, seed=0).num_steps
        named = Sampler(
            name="labor",
            dialect="every_hop",
            parameters={"kappa": str(kappa) if np.isinf(kappa) else float(kappa)},
        )
        return build_sampler(
            named, self.graph.indptr, self.graph.indices, FANOUTS, seed, steps_per_epoch=steps
        )


def measure_caches(name: str, graph: Graph, ranks: int, size: Size) -> None:
    """LRU and static caches of a quarter of the rows, shared out over the ranks.

    The batch is small, so that a cache holds several: the model counts its memory in batches.
    """
    slots = graph.num_nodes // 4 // ranks
    batch = CACHE_BATCH
    for way_name in ("independent", "coop"):
        way = Way(way_name, graph, ranks, batch)
        frozen = [way.sampler(np.inf, seed=100 + stream) for stream in range(size.streams)]

        def touch(stream: int, number: int, way: Way = way, frozen: Any = frozen) -> Any:
            reads = way.reads(frozen[stream], 16 * stream + number)  # other seeds in each stream
            return reads[0] if way.name == "independent" else np.concatenate(reads)

        fresh = way.sampler(1, seed=2)
        counted = (
            ids if way_name == "independent" else np.concatenate(reads)
            for reads in (way.reads(fresh, number) for number in range(2 * size.lru_batches))
            for ids in (reads if way_name == "independent" else [reads[0]])
        )
        a, q = estimate(counted, touch, np.diff(graph.indptr), streams=size.streams, batches=16)
        models = [
            (a, q)
        ]  # independent ranks are alike; cooperative ones have vertices of their own
        if way_name == "coop":
            owner = Owners(ranks, num_nodes=graph.num_nodes).of(np.arange(graph.num_nodes))
            models = [(a[owner == rank], q[owner == rank]) for rank in range(ranks)]
        other = way.sampler(1, seed=1)
        profile = [way.reads(other, number) for number in range(size.lru_batches // 4)]
        held = [hottest((b[r] for b in profile), graph.num_nodes, slots) for r in range(ranks)]
        for kappa in KAPPAS:
            sampler = way.sampler(kappa)
            caches = [Caches(graph.num_nodes, slots, held[rank]) for rank in range(ranks)]
            for number in range(size.lru_batches):
                for cache, ids in zip(caches, way.reads(sampler, number), strict=True):
                    cache.read(ids, count=number >= size.lru_batches // 4)
            touched = sum(cache.touched for cache in caches)
            weights = [float((one * two).sum()) for one, two in models]
            rates = [dependent_hit_rate(one, two, slots, kappa) for one, two in models]
            model = float(np.average(rates, weights=weights))
            hits = sum(cache.lru_hits for cache in caches) / touched
            record(
                f"lru_hits_{way_name}_{name}_{ranks}_kappa{kappa}",
                hits,
                "share",
                baseline=round(model, 4),
                ratio=round(hits / model, 4),
                model_error=round(model - hits, 4),
                static=sum(cache.static_hits for cache in caches) / touched,
                missed_rows_per_batch=(1 - hits) * touched / (size.lru_batches * 3 / 4),
                slots_per_rank=slots,
            )


def train(
    graph: Graph, ranks: int, scratch: Path, epochs: int, batch: int
) -> dict[str, list[dict[str, Any]]]:
    """Every way and sampler over two hosts; each rank's figures by name of the job."""
    jobs = []
    for suffix, sampler in SAMPLERS.items():
        for batching in ("independent", "cooperative"):
            folder = scratch / f"{graph.name}-{ranks}-{batching}{suffix}"
            share = -(-graph.num_nodes // ranks)
            owner = np.arange(graph.num_nodes, dtype=np.int32) % ranks  # as make_plan deals rows
            make_cooperative_plan(
                graph, folder, ranks=ranks, batching=batching, sampler=sampler,
                partition=owner, own_rows=share, peers=True, batch_size=batch, fanouts=FANOUTS,
                hidden=HIDDEN, sample_threads=1,
            )  # fmt: skip
            jobs.append({"name": batching + suffix, "plan": str(folder), "epochs": epochs})
    path = scratch / f"jobs-{graph.name}-{ranks}.json"
    path.write_text(json.dumps(jobs))
    outs = [path.with_suffix(f".{rank}.jsonl") for rank in range(ranks)]
    names = ["a", "b"]
    environment = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    with Hosts(names, rate_bits_per_second=RATE_BITS_PER_SECOND) as hosts:
        processes = [
            hosts.start(
                names[rank * len(names) // ranks],
                [
                    sys.executable, "-m", "tests.benchmarks.cooperative_rank", str(rank),
                    str(ranks), hosts.address("a"), str(PORT), str(path), str(outs[rank]),
                ],
                env=environment,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        wait(processes)
    found: dict[str, list[dict[str, Any]]] = {job["name"]: [] for job in jobs}
    for out in outs:
        for line in out.read_text().splitlines():
            figures = json.loads(line)
            found[figures["job"]].append(figures)
    return found


def wait(processes: "list[subprocess.Popen[Any]]") -> None:
    """Until all have ended; an error where one failed."""
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"expected every rank to end well, found exit codes {codes}")


def measure_epochs(name: str, graph: Graph, ranks: int, size: Size) -> None:
    """Seconds of an epoch of both ways over the shaped link."""
    with tempfile.TemporaryDirectory() as folder:
        found = train(graph, ranks, Path(folder), size.epochs, size.batch)
    for suffix in SAMPLERS:
        apart, together = (found[way + suffix] for way in ("independent", "cooperative"))
        ratios = [
            each / float(np.median(apart[0]["epoch_seconds"]))
            for each in together[0]["epoch_seconds"]
        ]
        record(
            f"epoch_coop_over_independent_{name}_{ranks}{suffix}",
            Spread.of(ratios),
            "ratio",
            baseline=1.0,
            independent_seconds=float(np.median(apart[0]["epoch_seconds"])),
            cooperative_seconds=float(np.median(together[0]["epoch_seconds"])),
            independent_card_bytes=sum_over_hosts(apart, ranks),
            cooperative_card_bytes=sum_over_hosts(together, ranks),
            hidden_bytes=sum(each["hidden_bytes"] for each in together),
            steps=together[0]["steps"],
            independent_stages=apart[0]["stage_seconds"],
            cooperative_stages=together[0]["stage_seconds"],
            last_losses=[apart[0]["last_loss"], together[0]["last_loss"]],
            compute_bound=ranks > len(os.sched_getaffinity(0)),
        )


def sum_over_hosts(figures: list[dict[str, Any]], ranks: int) -> int:
    """Bytes that left either host in the last epoch; ranks of a host see the same card."""
    return figures[0]["card_bytes"] + figures[ranks - 1]["card_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON always")
    parser.add_argument("--quick", action="store_true", help="one graph, few batches")
    parser.add_argument("--data", type=Path, default=default_data(), help="folder of .npz packs")
    parser.add_argument("--only", default=",".join(SECTIONS))
    options = parser.parse_args()
    wanted = options.only.split(",")
    size = QUICK if options.quick else FULL
    for name in size.graphs:
        graph = open_benchmark_graph(name, options.data)
        if "vertices" in wanted:
            for ranks in (2, 4, 8):
                for suffix in SAMPLERS:
                    measure_vertices(name, graph, ranks, suffix, size)
        if "caches" in wanted:
            for ranks in size.cache_ranks:
                measure_caches(name, graph, ranks, size)
        if "epochs" in wanted:
            for ranks in size.train_ranks:
                measure_epochs(name, graph, ranks, size)


def default_data() -> Path:
    """$GNNPLAN_TEST_DATA, or shared/data beside the checkout."""
    named = os.environ.get("GNNPLAN_TEST_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"


if __name__ == "__main__":
    main()
