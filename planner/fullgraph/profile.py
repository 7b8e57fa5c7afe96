"""Profile full-graph training, cached: parts, and a rank's own seconds on them.

Every cut (ranks, threads, partitioner) is partitioned once, and its parts are timed at once, one
process each, as the ranks of a run would compute; those of several hosts, host after host. Seconds
of GPUs are derived (`parts.derive_part`). What dropping boundary nodes adds to the variance is
estimated on the input features, since hidden layers are not known before training:

    V = mean_u sum_{v in N(u) outside} a_uv^2 |x_v|^2,   eps^2 = 0.1 mean_u |sum_v a_uv x_v|^2

Source: docs/formulas.md 3.3 and 3.6.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import cache_folder as root_folder
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.fullgraph.candidate import Cut, whole_graph_candidate
from gnnplan.planner.fullgraph.formulas import PartSizes, p_variance
from gnnplan.planner.fullgraph.parts import (
    Case,
    PartAnswer,
    PartRequest,
    Parts,
    cases_of,
    connect_cut,
    crossing_of,
    cut_graph,
    derive_part,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.partition.partition import predict_need
from gnnplan.planner.partition.problem import make_problem
from gnnplan.planner.probe.quiet import disturbance
from gnnplan.planner.probe.timing import WAITED, Patience
from gnnplan.planner.profile.cache import cache_folder
from gnnplan.planner.profile.team import Team, launcher_bytes
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, silent
from gnnplan.planner.workload import PROCESS, ProcessCost
from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.folders import take_name
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.npy import map_npy
from gnnplan.runtime.plan.schema import FullGraph

SAMPLED_NODES = 2000
MOST_EDGES = 200_000
"""Most edges of sampled nodes that are looked at: their rows are read."""
TOLERATED = 0.1
"""Largest tolerated ratio of added variance to |z|^2: eps^2."""
DEFAULT_KEEP = 0.1
"""p that is published as safe (docs/formulas.md 3.6), for graphs without features."""
LEAST_KEEP = 0.01
"""p that is published as safe with a good partition; nothing is estimated to allow less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variance:
    """The estimated variance."""

    boundary: float
    """V, the mean variance that `measure_variance` estimates."""
    signal: float
    """Mean of |z|^2."""
    nodes: int
    """Number of sampled nodes; 0 without features."""

    @property
    def least_keep(self) -> float:
        """p_var: the smallest p whose added variance is tolerated."""
        if self.nodes == 0 or self.signal == 0:
            return DEFAULT_KEEP
        return max(LEAST_KEEP, float(p_variance(self.boundary, TOLERATED * self.signal)))


def measure_variance(graph: Graph, found: NDArray[np.int32], model: str) -> Variance:
    """Estimate V and |z|^2 over a sample of nodes, always the same.

    Without features nothing is estimated. gcn weighs by both degrees, the other models by 1 / d.
    """
    from scipy import sparse  # pyright: ignore[reportMissingTypeStubs]

    from gnnplan.runtime.train.evaluate import reader_of  # on use: a first answer does without

    try:
        read = reader_of(graph, None)
    except DatasetError:
        return Variance(boundary=0.0, signal=0.0, nodes=0)
    rng = np.random.default_rng(0)
    nodes = rng.permutation(graph.num_nodes)[:SAMPLED_NODES]
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes]
    nodes = nodes[: max(1, int(np.searchsorted(np.cumsum(degree), MOST_EDGES)))]
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes]
    row = np.repeat(np.arange(len(nodes)), degree)
    inside = np.arange(len(row)) - np.repeat(np.cumsum(degree) - degree, degree)
    sources = np.asarray(graph.indices[graph.indptr[nodes][row] + inside], np.int64)
    unique, where = np.unique(sources, return_inverse=True)
    x = np.empty((len(unique), graph.feature_dim), np.float32)
    read(unique, x)
    if model == "gcn":
        theirs = graph.indptr[unique + 1] - graph.indptr[unique]
        weight = 1 / np.sqrt((degree[row] + 1.0) * (theirs[where] + 1.0))
    else:
        weight = 1 / np.maximum(degree[row], 1.0)
    squares = (x.astype(np.float64) ** 2).sum(1)
    outside = found[sources] != found[nodes[row]]
    boundary = float((weight**2 * squares[where] * outside).sum()) / len(nodes)
    shape = (len(nodes), len(unique))
    entries = (weight.astype(np.float32), (row, where))
    weights: Any = sparse.csr_array(entries, shape=shape)
    z: NDArray[np.float32] = np.asarray(weights @ x)
    return Variance(boundary=boundary, signal=float((z**2).sum() / len(nodes)), nodes=len(nodes))


VERSION = 3
"""Number that rises when a profile means something else than before."""
MODULE = "gnnplan.planner.fullgraph.timing"
PROFILE_FILE = "profile.json"
PARTITION_FILE = "partition.npy"


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProfile:
    """Sizes of the parts of one cut, and the seconds and bytes of their ranks."""

    cut: Cut
    sizes: list[PartSizes]
    """Sizes by rank."""
    seeds: list[int]
    """Training nodes by rank."""
    variance: Variance
    cases: list[Case]
    ranks: list[PartAnswer]
    process: ProcessCost
    crossing: list[PartSizes] = field(default_factory=list[PartSizes], metadata=codec.UNLESS_SET)
    """Parts with the rows that cross on average where edges are dropped; empty where nodes are."""
    is_derived: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether seconds of cores are derived at known rates, not timed."""

    @property
    def volume(self) -> int:
        """Boundary rows of all parts, per exchange."""
        return sum(part.halo for part in self.sizes)

    @property
    def widths(self) -> list[int]:
        """Columns of the input and of each layer, d_0 .. d_L."""
        return self.ranks[0].widths

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return self.ranks[0].num_parameters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullProfile:
    """A cut's numbers, and its partition."""

    numbers: CutProfile
    partition: NDArray[np.int32]


def profile_cuts(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    cuts: Sequence[Cut],
    draws: Sequence[str],
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> list[FullProfile]:
    """Profile every cut, from the cache where it was made before.

    The machine's fingerprint enters the key, since seconds are the machine's. `draws` are those of
    `cases_of`; without `measure` nothing is timed.

    Raises:
        SettingsError: nothing may be measured and a profile is not cached.
        WorkerFailed: a part could not be timed; the text is its own error.
    """
    say = progress or silent
    found: dict[Cut, FullProfile] = {}
    for cut in cuts:
        kept = _load(_key(graph, settings, machine, cut, draws))
        if kept is not None:
            found[cut] = kept
    for cut in cuts:
        if cut.on_gpus and cut not in found:
            made = _derive(graph, settings, machine, cut, cases_of(cut, draws, settings))
            key = _key(graph, settings, machine, cut, draws)
            _save(key, made)
            found[cut] = _load(key) or made
    missing = [cut for cut in cuts if cut not in found]
    if missing and not measure:
        raise SettingsError(
            f"expected full-graph profiles of {graph.name} in {cache_folder().parent}, found none "
            "for these settings and this machine; plan again"
        )
    if missing:
        size = max(cut.ranks // cut.hosts for cut in missing)
        with disturbance(root_folder()) as disturbed, Team(size, MODULE) as team:
            patience = Patience(disturbed.level, share=WAITED)
            for i, cut in enumerate(missing):
                say(f"timing {cut.name}", i / len(missing))
                made = _make(graph, settings, cut, cases_of(cut, draws, settings), team, patience)
                key = _key(graph, settings, machine, cut, draws)
                _save(key, made)
                # Read back: the first plan and a repeated one then see the very same numbers.
                found[cut] = _load(key) or made
    return [found[cut] for cut in cuts]


def _make(
    graph: Graph,
    settings: PlanSettings,
    cut: Cut,
    cases: list[Case],
    team: Team,
    patience: Patience,
) -> FullProfile:
    """Partition, count and time, without looking at the cache."""
    model = settings.workload.model
    parts = connect_cut(graph, cut_graph(graph, cut), cut.ranks, model)
    crossing = _crossing(parts, settings)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        np.save(place / PARTITION_FILE, parts.partition)
        requests: list[str] = []
        for part in parts.parts:
            wanted = place / f"wanted-{part.rank}.npy"
            np.save(wanted, part.inner[part.send])
            request = PartRequest(
                workload=settings.workload,
                graph_path=str(graph.path.resolve()),
                fingerprint=graph.fingerprint,
                partition_path=str(place / PARTITION_FILE),
                wanted_path=str(wanted),
                wanted_counts=[int(n) for n in part.send_counts],
                rank=part.rank,
                size=cut.ranks,
                in_dim=graph.feature_dim,
                num_classes=graph.num_classes,
                task=str(graph.task),
                threads=cut.threads,
                cases=cases,
                asked_counts=[each.received[part.rank] for each in crossing],
            )
            requests.append(json.dumps(codec.to_plain(request)))
        answers: list[str] = []
        here = cut.ranks // cut.hosts
        for first in range(0, cut.ranks, here):
            mine = requests[first : first + here]
            answers += patience.timed(lambda mine=mine: team.ask(mine, cut.threads))
    numbers = CutProfile(
        cut=cut,
        sizes=parts.sizes,
        seeds=parts.seeds,
        variance=measure_variance(graph, parts.partition, model),
        cases=cases,
        ranks=[codec.decode(PartAnswer, json.loads(answer)) for answer in answers],
        process=replace(team.process, launcher_bytes=launcher_bytes()),
        crossing=crossing,
    )
    return FullProfile(numbers=numbers, partition=parts.partition)


def _crossing(parts: Parts, settings: PlanSettings) -> list[PartSizes]:
    if settings.drop == "nodes" or settings.keep is None:
        return []
    return crossing_of(parts, settings.keep)


def _derive(
    graph: Graph, settings: PlanSettings, machine: MachineModel, cut: Cut, cases: list[Case]
) -> FullProfile:
    """Partition and count, and derive what GPUs take."""
    parts = connect_cut(graph, cut_graph(graph, cut), cut.ranks, settings.workload.model)
    crossing = _crossing(parts, settings)
    numbers = CutProfile(
        cut=cut,
        sizes=parts.sizes,
        seeds=parts.seeds,
        variance=measure_variance(graph, parts.partition, settings.workload.model),
        cases=cases,
        ranks=_derived_ranks(graph, settings, machine, cut, cases, parts.sizes, crossing),
        process=ProcessCost(start_seconds=0.0, resident_bytes=0),
        crossing=crossing,
    )
    return FullProfile(numbers=numbers, partition=parts.partition)


def _derived_ranks(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    cut: Cut,
    cases: list[Case],
    sizes: Sequence[PartSizes],
    crossing: Sequence[PartSizes] = (),
) -> list[PartAnswer]:
    outputs = 1 if str(graph.task) == "binary" else graph.num_classes
    candidate = whole_graph_candidate(cut, FullGraph(), overlap=False)
    ends, seeds = (graph.feature_dim, outputs), graph.num_train / cut.ranks
    derive = functools.partial(derive_part, task=str(graph.task), seeds=seeds)
    return [
        derive(machine, candidate, settings.workload, mine, cases, ends, moved)
        for mine, moved in zip(sizes, crossing or sizes, strict=True)
    ]


CUTTING_SECONDS = 2.0
"""Seconds of cutting, at most, in which a first answer's graph is cut once."""
EDGE_SECONDS = 4e-8
"""Seconds of building the parts of a graph, by its edges."""


def estimate_cuts(
    graph: Graph, settings: PlanSettings, machine: MachineModel, cuts: Sequence[Cut]
) -> tuple[list[FullProfile], list[Cut]]:
    """Derive the cuts that a first answer has time for; return them, and those that it leaves out.

    Nothing is timed. One rank's part is the whole graph, of which nothing is read; of several ranks
    the graph is cut. Where no cut is quick the quickest one is made.
    """
    parts = dict[tuple[int, str], tuple[list[PartSizes], list[int], NDArray[np.int32]]]()
    left = list[Cut]()
    need = {cut: _cutting_seconds(graph, cut) for cut in cuts}
    quickest = min(cuts, key=lambda cut: need[cut])
    found = list[FullProfile]()
    for cut in cuts:
        if need[cut] > CUTTING_SECONDS and cut != quickest:
            left.append(cut)
            continue
        key = cut.ranks, cut.partitioner
        parts[key] = parts.get(key) or _count_parts(graph, cut, settings.workload.model)
        sizes, seeds, partition = parts[key]
        cases = cases_of(cut, (), settings)
        numbers = CutProfile(
            cut=cut,
            sizes=sizes,
            seeds=seeds,
            variance=Variance(boundary=0.0, signal=0.0, nodes=0),
            cases=cases,
            ranks=_derived_ranks(graph, settings, machine, cut, cases, sizes),
            process=ProcessCost(start_seconds=0.0, resident_bytes=0) if cut.on_gpus else PROCESS,
            is_derived=True,
        )
        found.append(FullProfile(numbers=numbers, partition=partition))
    return found, left


def _cutting_seconds(graph: Graph, cut: Cut) -> float:
    """Predict the seconds of cutting a graph and of building its parts, at most."""
    if cut.ranks == 1:
        return 0.0
    problem = make_problem(graph.indptr, graph.indices, parts=cut.ranks, training=graph.train_idx)
    objective = "cut" if cut.partitioner == "random" else "volume"
    need = predict_need(problem, cut.partitioner, objective=objective)
    return need.high_seconds + EDGE_SECONDS * graph.num_edges


def _count_parts(
    graph: Graph, cut: Cut, model: str
) -> tuple[list[PartSizes], list[int], NDArray[np.int32]]:
    """Return the sizes of a cut's parts, their training nodes, and the part of each node."""
    if cut.ranks > 1:
        parts = connect_cut(graph, cut_graph(graph, cut), cut.ranks, model)
        return parts.sizes, parts.seeds, parts.partition
    loops = 0 if model == "sage" else graph.num_nodes
    whole = PartSizes(
        inner=graph.num_nodes, halo=0, sent=0, inner_edges=graph.num_edges + loops, halo_edges=0,
        received=(0,),
    )  # fmt: skip
    return [whole], [graph.num_train], np.zeros(graph.num_nodes, np.int32)


def _key(
    graph: Graph, settings: PlanSettings, machine: MachineModel, cut: Cut, draws: Sequence[str]
) -> str:
    """Hash everything that decides a profile."""
    work = settings.workload
    model = [work.model, work.num_layers, work.hidden, work.heads, work.dropout, work.seed]
    decided = [
        VERSION,
        graph.fingerprint,
        machine.fingerprint,
        model,
        cut,
        cases_of(cut, draws, settings),
    ]
    decided += [machine.calibration] if cut.on_gpus else []
    return codec.content_hash(decided)[:32]


def _folder(key: str) -> Path:
    return cache_folder().parent / "fullgraph" / key


def _load(key: str) -> FullProfile | None:
    """Read the cached profile; a damaged one counts as absent."""
    place = _folder(key)
    try:
        numbers = codec.decode(CutProfile, codec.parse((place / PROFILE_FILE).read_bytes()))
        found = np.array(map_npy(place / PARTITION_FILE))
    except (OSError, ValueError):
        return None
    inner = [part.inner for part in numbers.sizes]
    if found.dtype != np.int32 or found.ndim != 1 or len(found) != sum(inner):
        return None
    if found.min(initial=0) < 0 or found.max(initial=0) >= len(inner):
        return None
    if np.bincount(found, minlength=len(inner)).tolist() != inner:
        return None
    return FullProfile(numbers=numbers, partition=found)


def _save(key: str, made: FullProfile) -> None:
    """Keep a profile, as a whole or not at all."""
    place = _folder(key)
    place.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{key}."))
    try:
        np.save(staging / PARTITION_FILE, made.partition)
        (staging / PROFILE_FILE).write_text(codec.dumps(made.numbers))
        # What was there is damaged, or another process's and as good.
        earlier = take_name(staging, place)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
