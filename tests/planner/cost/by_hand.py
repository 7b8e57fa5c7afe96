"""A request, candidates and placed rows whose prices can be added up by hand."""

from collections.abc import Mapping
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.model import predict
from gnnplan.planner.cost.rank_times import DeviceTimes, RankTimes, RankWork, StageTime
from gnnplan.planner.cost.request import Request
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.plan.schema import GraphRef, Prediction, Threads, Workload
from gnnplan.runtime.stages import Stage
from tests.support.candidates import candidate_of_ranks
from tests.support.machines import machine
from tests.support.profiles import batch_profile, profile, timing

NODES = 100_000
IDLE = DeviceTimes()
BATCH = 1000
GRAPH = GraphRef(
    name="by-hand",
    path="/nowhere",
    fingerprint="0",
    num_nodes=NODES,
    num_edges=1_000_000,
    feature_dim=100,
    feature_dtype="float32",
    num_classes=5,
    task="multiclass",
    num_train=10_000,
)


def request(model: MachineModel | None = None, budgets: Budgets | None = None) -> Request:
    return Request(
        graph=GRAPH,
        workload=Workload(batch_size=BATCH),
        profile=profile(NODES, BATCH).numbers,
        machine=machine() if model is None else model,
        budgets=Budgets() if budgets is None else budgets,
    )


def candidate(ranks: int = 1, compute: int = 1, loaders: int = 0) -> Candidate:
    threads = Threads(compute=compute, sample=loaders, gather=1)
    return candidate_of_ranks(num_ranks=ranks, threads=threads, prefetch_depth=2, policy="none")


def rows(ranks: int = 1, **by_source: float) -> PlacedRows:
    total = sum(by_source.values())
    each = RankRows(
        rows=by_source,
        working_rows=dict.fromkeys(by_source, 1e5),
        shares={k: v / total for k, v in by_source.items()},
    )
    return PlacedRows(policy="none", ranks=[each] * ranks, host_rows=NODES)


def times(
    seconds: Mapping[str, float], *, device: DeviceTimes = IDLE, **changes: float
) -> RankTimes:
    """A rank's stages by name, that of no other stage; nothing varies."""
    stages = {Stage(name): StageTime(seconds=each) for name, each in seconds.items()}
    return replace(RankTimes(stages=stages, device=device), **changes)


def at(found: RankTimes, stage: str) -> float:
    return found.seconds(Stage(stage))


def work(found: Candidate, model: MachineModel, read: RankRows, **changes: object) -> RankWork:
    """What a rank of the by-hand graph does for batches of 100 seeds."""
    usual = RankWork(
        candidate=found,
        rank=0,
        graph=GRAPH,
        batch=batch_profile(100),
        timing=timing(100, found.num_ranks),
        machine=model,
        rows=read,
        row_bytes=400,
    )
    return replace(usual, **changes)


def price(found: Candidate, placed: PlacedRows, **options: object) -> Prediction:
    return predict(request(**options), found, placed)  # pyright: ignore[reportArgumentType]
