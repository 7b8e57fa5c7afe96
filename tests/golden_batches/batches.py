"""The batches that are kept: every sampler in every form in which it draws, on one small graph."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.mesh import open_grid
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import build_sampler
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler
from gnnplan.runtime.sampling.distributed.grid import GridSampler, empty_graph
from gnnplan.runtime.sampling.distributed.grid_rows import cut_shard
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.sampling.exclusion import Exclude, ExcludingSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request
from gnnplan.runtime.sampling.typed import TypedSampler
from tests.support.inprocess import run_in_process

KEPT = Path(__file__).with_name("hashes.json")
STEPS, EPOCH, SEED = 3, 1, 5
FANOUTS = [4, 3]
NUM_NODES, NUM_SEEDS, NUM_TYPES = 240, 12, 3
GRID_RANKS, GRID_COPIES, COOPERATING_RANKS = 4, 2, 2
RELATIVE = 1e-6
"""Within which two sums of float32 weights are equal."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sampler as a plan names it."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    dialects: tuple[str, ...] = ("first_seen", "every_hop")

    def named(self, dialect: str) -> Sampler:
        """What stands in the plan."""
        expansion: Any = dialect
        return Sampler(name=self.name, dialect=expansion, parameters=self.parameters)


LAYERS: dict[str, Any] = {"sizes": "20,30"}
EVERY_HOP = ("every_hop",)
PLANS = {
    "full": Plan(name="full"),
    "neighbor": Plan(name="neighbor"),
    "neighbor-replacement": Plan(
        name="neighbor",
        parameters={"draws": "replacement", "estimator": "horvitz-thompson", "weights": "graph"},
    ),
    "neighbor-poisson": Plan(
        name="neighbor",
        parameters={"draws": "poisson", "estimator": "hajek", "weights": "graph"},
    ),
    "neighbor-weighted": Plan(
        name="neighbor", parameters={"estimator": "horvitz-thompson", "weights": "graph"}
    ),
    "labor": Plan(name="labor"),
    "labor-1": Plan(name="labor", parameters={"variant": 1}),
    "labor-star": Plan(name="labor", parameters={"variant": "star", "weights": "graph"}),
    "labor-exact": Plan(name="labor", parameters={"form": "exact_k"}),
    "labor-dependent": Plan(name="labor", parameters={"kappa": 4}),
    "labor-frozen": Plan(
        name="labor", parameters={"kappa": 2, "dependence": "frozen", "layer_dependent": 1}
    ),
    "ladies": Plan(name="ladies", parameters=LAYERS, dialects=EVERY_HOP),
    "ladies-weighted": Plan(
        name="ladies", parameters={**LAYERS, "weights": "graph", "kappa": 3}, dialects=EVERY_HOP
    ),
    "pladies": Plan(name="pladies", parameters=LAYERS, dialects=EVERY_HOP),
    "fastgcn": Plan(name="fastgcn", parameters=LAYERS, dialects=EVERY_HOP),
    "las": Plan(name="las", parameters={"factor": 3}),
    "las-poisson": Plan(name="las", parameters={"factor": 3, "correction": "poisson"}),
    "las-ladies": Plan(
        name="las", parameters={**LAYERS, "factor": 3, "over": "ladies"}, dialects=EVERY_HOP
    ),
}


def graph() -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Skewed degrees with loops, parallel edges, empty rows and a hub."""
    rng = np.random.default_rng(51)
    degrees = rng.integers(0, 14, NUM_NODES)
    degrees[rng.random(NUM_NODES) < 0.2] = 0
    degrees[[0, 7, NUM_NODES - 1]] = [6, 150, 9]
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = (NUM_NODES * rng.random(int(indptr[-1])) ** 1.5).astype(np.int32)
    return indptr, indices


GRAPH = graph()
WEIGHTS = np.random.default_rng(52).uniform(0.1, 3.0, len(GRAPH[1])).astype(np.float32)
WEIGHTS[::10] = 0
LOCAL = np.arange(0, NUM_NODES, 4)
EDGE_TYPES = np.random.default_rng(53).integers(0, NUM_TYPES, len(GRAPH[1])).astype(np.int32)


def seeds_of(step: int, rank: int = 0) -> NDArray[np.int64]:
    """Seeds of one rank's batch."""
    drawn = np.random.default_rng([54, step, rank]).permutation(NUM_NODES)
    return drawn[:NUM_SEEDS].astype(np.int64)


def settings() -> dict[str, Any]:
    """What a sampler is built with beside the graph and the plan."""
    return {
        "edge_ids": True, "edge_weight": WEIGHTS, "local": LOCAL, "steps_per_epoch": STEPS,
    }  # fmt: skip


def request(step: int, rank: int = 0) -> Request:
    """Of a stack."""
    return Request(seeds=seeds_of(step, rank), epoch=EPOCH, step=step)


def single(named: Sampler) -> list[MiniBatch]:
    """One process, one batch after another."""
    sampler = build_sampler(named, *GRAPH, FANOUTS, SEED, **settings())
    return [sampler.sample(seeds_of(s), epoch=EPOCH, step=s) for s in range(STEPS)]


def stack(named: Sampler) -> list[MiniBatch]:
    """All at once."""
    bulk = BulkSampler.of(build_sampler(named, *GRAPH, FANOUTS, SEED, **settings()))
    return [batch for each in bulk.stacks([request(s) for s in range(STEPS)]) for batch in each]


def grid(named: Sampler) -> list[MiniBatch]:
    """Ranks that hold block rows of the graph, copies of each."""
    with_weights = named.parameters.get("weights") == "graph"

    def rank(comm: Any) -> list[MiniBatch]:
        ranks = open_grid(comm, GRID_COPIES)
        shard = cut_shard(*GRAPH, WEIGHTS if with_weights else None, ranks)
        mine = {**settings(), "edge_weight": WEIGHTS[:0] if with_weights else None}
        hollow = empty_graph(NUM_NODES, GRAPH[1].dtype)
        sampler = GridSampler(build_sampler(named, *hollow, FANOUTS, SEED, **mine), shard, ranks)
        rows = [[request(s, r) for r in ranks.ranks_of_row()] for s in range(STEPS)]
        return [batch for each in sampler.stacks(rows) for batch in each]

    return [batch for found in run_in_process(GRID_RANKS, rank) for batch in found]


def cooperative(named: Sampler) -> list[MiniBatch]:
    """Ranks that draw the same batches together."""
    owners = Owners(COOPERATING_RANKS, num_nodes=NUM_NODES)

    def rank(comm: Any) -> list[MiniBatch]:
        sampler = CooperativeSampler(
            named, *GRAPH, FANOUTS, SEED, owners=owners, comm=comm, edge_ids=True,
            edge_weight=WEIGHTS, steps_per_epoch=STEPS,
        )  # fmt: skip
        found = []
        for step in range(STEPS):
            seeds = seeds_of(step)
            mine = seeds[owners.of(seeds) == comm.rank]
            found.append(sampler.sample(mine, epoch=EPOCH, step=step))
        return found

    return [batch for found in run_in_process(COOPERATING_RANKS, rank) for batch in found]


def gpu(named: Sampler) -> list[MiniBatch]:
    """Kernels of a GPU, interpreted where there is none."""
    sampler = _device_sampler(named)
    return [sampler.sample(seeds_of(s), epoch=EPOCH, step=s).to_host() for s in range(STEPS)]


def gpu_stack(named: Sampler) -> list[MiniBatch]:
    """The same, all at once."""
    from gnnplan.runtime.sampling.gpu.stack import stack_of

    drawn = stack_of(_device_sampler(named)).sample_stack([request(s) for s in range(STEPS)])
    return [batch.to_host() for batch in drawn]


def _device_sampler(named: Sampler) -> Any:
    from gnnplan.runtime.sampling.build import build_device_sampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    topology = DeviceTopology.load(*GRAPH, device)
    return build_device_sampler(named, topology, *GRAPH, FANOUTS, SEED, device=device, **settings())


FORMS: dict[str, Callable[[Sampler], list[MiniBatch]]] = {
    "single": single,
    "stack": stack,
    "grid": grid,
    "cooperative": cooperative,
    "gpu": gpu,
    "gpu stack": gpu_stack,
}


def typed(dialect: str) -> list[MiniBatch]:
    """A graph of several edge types."""
    sampler = TypedSampler(
        *GRAPH, EDGE_TYPES, [[3, 2], [1, 2], [-1, 1]],
        node_type=np.arange(NUM_NODES) % 2, dialect=Dialect(dialect), seed=SEED, edge_ids=True,
    )  # fmt: skip
    return [sampler.sample(seeds_of(s), epoch=EPOCH, step=s) for s in range(STEPS)]


def excluding(dialect: str) -> list[MiniBatch]:
    """Without the edges of the step's own links."""
    sampler = ExcludingSampler(
        *GRAPH, FANOUTS, dialect=Dialect(dialect), seed=SEED, edge_ids=True
    )  # fmt: skip
    found = []
    for step in range(STEPS):
        edges = np.random.default_rng([55, step]).integers(0, len(GRAPH[1]), NUM_SEEDS)
        ends = np.searchsorted(GRAPH[0], edges, side="right") - 1
        pairs = np.stack([GRAPH[1][edges].astype(np.int64), ends], axis=1)
        seeds = np.unique(pairs)
        found.append(sampler.sample_without(pairs, Exclude.BOTH, seeds, epoch=EPOCH, step=step))
    return found


OTHERS = {"typed": typed, "excluding": excluding}
"""Samplers that no plan names: the task or the graph asks for them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sampler, its expansion rule, and the form in which it draws."""

    sampler: str
    dialect: str
    form: str

    @property
    def name(self) -> str:
        """As it stands in the record."""
        return f"{self.sampler} {self.dialect} {self.form}"

    def batches(self) -> list[MiniBatch]:
        """The first three of each rank.

        Raises:
            SamplerError: the sampler has no such form.
        """
        if self.sampler in OTHERS:
            return OTHERS[self.sampler](self.dialect)
        return FORMS[self.form](PLANS[self.sampler].named(self.dialect))


def cases() -> Iterator[Case]:
    """Every sampler under each of its rules in every form; those that it lacks too."""
    for form in FORMS:
        for name, plan in PLANS.items():
            for dialect in plan.dialects:
                yield Case(sampler=name, dialect=dialect, form=form)
    for name in OTHERS:
        for dialect in ("first_seen", "every_hop"):
            yield Case(sampler=name, dialect=dialect, form="single")


def digest(case: Case) -> dict[str, Any]:
    """The hash of all that the batches say in whole numbers, and sums over their weights.

    A form that the sampler lacks has the refusal alone.
    """
    try:
        batches = case.batches()
    except SamplerError:
        return {"refused": True}
    found, sums = hashlib.sha256(), list[float]()
    for batch in batches:
        found.update(_plain(batch).encode())
        for array in _arrays(batch):
            found.update(str(array.dtype).encode())
            found.update(np.ascontiguousarray(array).tobytes())
        sums += [_sum(b.weight) for b in batch.blocks if b.weight is not None]
    return {"batches": found.hexdigest(), "weights": sums}


def _plain(batch: MiniBatch) -> str:
    sizes = [(b.num_src, b.num_dst) for b in batch.blocks]
    numbers = [batch.num_sampled_nodes, batch.num_sampled_edges, sizes]
    return json.dumps(
        [numbers, str(batch.dialect), batch.epoch, batch.step, batch.global_num_seeds]
    )


def _arrays(batch: MiniBatch) -> Iterator[NDArray[Any]]:
    yield from (batch.n_id, batch.seeds, batch.input_id)
    for block in batch.blocks:
        for array in (block.indptr, block.indices, block.e_id, block.relation_ptr, block.src_type):
            if array is not None:
                yield array
    for exchange in batch.exchanges or []:
        yield exchange.ids


def _sum(weight: NDArray[np.float32]) -> float:
    """Of the weights, each by a factor of its place: another order has another sum."""
    return float(weight.astype(np.float64) @ (1.0 + np.arange(len(weight)) / (1 + len(weight))))
