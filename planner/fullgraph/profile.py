"""Graph -> profile of full-graph training: parts, and a rank's own seconds on them, cached.

Every cut (ranks, threads, partitioner) is partitioned once, and its parts are timed at once, one
process each, as the ranks of a run would compute.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.cache_folder import cache_folder as root_folder
from planner.cost.full_graph import PartSizes
from planner.errors import SettingsError
from planner.fullgraph.candidate import Cut
from planner.fullgraph.parts import connected, cut_graph
from planner.fullgraph.request import Case, PartAnswer, PartRequest
from planner.fullgraph.variance import Variance, measure_variance
from planner.machine import MachineModel
from planner.probe.disturbance import disturbance
from planner.probe.patience import WAITED, Patience
from planner.profiling.cache import cache_folder
from planner.profiling.launching import with_launcher
from planner.profiling.team import Team
from planner.progress import Progress, silent
from planner.settings import PlanSettings
from planner.workload import ProcessCost
from runtime import codec
from runtime.folders import take_name
from runtime.graph.dataset import Graph
from runtime.npy import map_npy
from runtime.plan import FullGraph

VERSION = 3
"""Rises when a profile means something else than before."""
ANCHORS = (0.1, 0.5)
"""Probabilities at which sampled epochs are timed; their seconds are linear in p."""
MODULE = "planner.fullgraph.timing"
PROFILE_FILE = "profile.json"
PARTITION_FILE = "partition.npy"


@dataclass(frozen=True, kw_only=True, slots=True)
class CutProfile:
    """One cut: its parts and what their ranks take."""

    cut: Cut
    sizes: list[PartSizes]
    """By rank."""
    seeds: list[int]
    """Training nodes by rank."""
    variance: Variance
    cases: list[Case]
    ranks: list[PartAnswer]
    process: ProcessCost

    @property
    def volume(self) -> int:
        """Boundary rows of all parts, per exchange."""
        return sum(part.halo for part in self.sizes)

    @property
    def widths(self) -> list[int]:
        """d_0 .. d_L."""
        return self.ranks[0].widths

    @property
    def num_parameters(self) -> int:
        """Of the model."""
        return self.ranks[0].num_parameters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullProfile:
    """A cut's numbers, and its partition."""

    numbers: CutProfile
    partition: NDArray[np.int32]


def cases_of(cut: Cut, draws: Sequence[str]) -> list[Case]:
    """What is timed of a cut: p = 1 with and without the first layer, and anchors of p < 1.

    Args:
        cut: one rank has no boundary to sample.
        draws: `layer`, `shared`, both, or nothing where only p = 1 is allowed.
    """
    found = [Case(settings=FullGraph(precompute_first_layer=known)) for known in (False, True)]
    for each in draws if cut.ranks > 1 else ():
        for keep in ANCHORS:
            settings = FullGraph(keep=keep, draws="shared" if each == "shared" else "layer")
            rounded = replace(settings, rounding="stochastic")
            found += [Case(settings=settings), Case(settings=rounded, draws_only=True)]
    return found


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
    """The profile of every cut, from the cache where it was made before.

    Args:
        graph: the dataset.
        settings: the model.
        machine: its fingerprint enters the key, since seconds are the machine's.
        cuts: what to partition and time.
        draws: as in `cases_of`.
        progress: told what is going on.
        measure: False takes cached profiles or raises.

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
    missing = [cut for cut in cuts if cut not in found]
    if missing and not measure:
        raise SettingsError(
            f"expected full-graph profiles of {graph.name} in {cache_folder().parent}, found none "
            "for these settings and this machine; plan again"
        )
    if missing:
        size = max(cut.ranks for cut in missing)
        with disturbance(root_folder()) as disturbed, Team(size, MODULE) as team:
            patience = Patience(disturbed.level, share=WAITED)
            for i, cut in enumerate(missing):
                say(f"timing {cut.name}", i / len(missing))
                made = _make(graph, settings, cut, cases_of(cut, draws), team, patience)
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
    parts = connected(graph, cut_graph(graph, cut), cut.ranks, model)
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
            )
            requests.append(json.dumps(codec.to_plain(request)))
        answers = patience.timed(lambda: team.ask(requests, cut.threads))
    numbers = CutProfile(
        cut=cut,
        sizes=parts.sizes,
        seeds=parts.seeds,
        variance=measure_variance(graph, parts.partition, model),
        cases=cases,
        ranks=[codec.decode(PartAnswer, json.loads(answer)) for answer in answers],
        process=with_launcher(team.process),
    )
    return FullProfile(numbers=numbers, partition=parts.partition)


def _key(
    graph: Graph, settings: PlanSettings, machine: MachineModel, cut: Cut, draws: Sequence[str]
) -> str:
    """Hash of everything that decides a profile."""
    work = settings.workload
    model = [work.model, work.num_layers, work.hidden, work.heads, work.dropout, work.seed]
    decided = [VERSION, graph.fingerprint, machine.fingerprint, model, cut, cases_of(cut, draws)]
    return codec.content_hash(decided)[:32]


def _folder(key: str) -> Path:
    return cache_folder().parent / "fullgraph" / key


def _load(key: str) -> FullProfile | None:
    """The cached profile; a damaged one counts as absent."""
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
        # What was there is damaged, or another process's, and as good as this.
        earlier = take_name(staging, place)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
