"""Draws that the search asks for beside the profile: batch sizes, sequences and sampling rates.

Answers are kept in the cache folder. A repeated plan therefore draws nothing and stays the same to
the byte, although seconds are no pure function of graph and settings. Where something cannot be
drawn, the answer is a sentence that says why.
"""

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, list_cores, make_candidate
from gnnplan.planner.machine.model import Table, make_table
from gnnplan.planner.placement.policies.policy import Parts
from gnnplan.planner.probe.timing import Interlude
from gnnplan.planner.profile import cache
from gnnplan.planner.profile.cache import keep_answer
from gnnplan.planner.profile.draw import (
    PROFILE_EPOCH,
    SHARED_BATCHES,
    count_owned,
    epoch_and_step,
    prepare_batch,
    seed_schedule,
)
from gnnplan.planner.profile.loading import seconds_of
from gnnplan.planner.profile.presample import expanded, presample_cliques
from gnnplan.planner.search.dimensions.batches import BULKS
from gnnplan.planner.search.dimensions.dimension import Cliques, LocalBatches
from gnnplan.planner.search.samplers import is_link, plan_sampler
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Hotness, OwnedBatch
from gnnplan.runtime import codec
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.npy import npy_of
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import BatchSampler, build_sampler
from gnnplan.runtime.sampling.memory import BulkBytes
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, find_sampler
from gnnplan.runtime.sampling.seeds import SeedSchedule

ROUNDS = 3
"""Timed stacks of each size, after one that warms up."""
DEPENDENT = 8
"""Batches timed for each kappa: two periods of the smallest."""
SINGLES = 3
"""Most single batches timed beside each stack, in turns with it so that load meets both."""


def stack_rates(
    sizes: Sequence[int],
    stack: Callable[[int, int], object],
    single: Callable[[int], object],
    between: Callable[[], object],
) -> Table:
    """Time batches in stacks of k over batches drawn alone, by k.

    stack(first, k) draws batches first .. first + k - 1 together. `between` is a model's work,
    which leaves the caches as training does.
    """
    ratios: list[float] = []
    spreads: list[float] = []
    for k in sizes:
        found: list[float] = []
        for turn in range(ROUNDS + 1):
            between()
            together = seconds_of(lambda at=turn * k, k=k: stack(at, k)) / k
            alone: list[float] = []
            for step in range(turn * k, turn * k + min(k, SINGLES)):
                between()
                alone.append(seconds_of(lambda step=step: single(step)))
            found.append(together / float(np.median(alone)))
        found = found[1:]
        ratios.append(float(np.median(found)))
        spreads.append((max(found) - min(found)) / 2 / ratios[-1])
    return make_table("ratio", {"batches": sizes}, ratios, float(np.median(spreads)))


def dependent_rates(
    kappas: Sequence[int], draw: Callable[[int | None, int], object], between: Callable[[], object]
) -> Table:
    """Time dependent batches (mean seconds) over independent ones, by kappa.

    draw(kappa, step) draws one batch, with kappa None an independent one.
    """

    def seconds(kappa: int | None) -> list[float]:
        found: list[float] = []
        # The batch at a multiple of kappa needs one set of numbers, those between mix two.
        for step in range(1, DEPENDENT + 1):
            between()
            found.append(seconds_of(lambda step=step: draw(kappa, step)))
        return found

    for kappa in (None, *kappas):
        draw(kappa, 0)  # grows the workspace
    alone = seconds(None)
    ratios = [float(np.mean(seconds(kappa))) / float(np.mean(alone)) for kappa in kappas]
    spread = float(np.std(alone) / np.mean(alone))
    return make_table("ratio", {"kappa": kappas}, ratios, spread)


TIMED_KAPPAS = (4, 64)
"""Values of kappa that are timed; rates at others are interpolated."""
PILOT = 4
"""Batches from which the bytes of a stack are estimated."""
STACK_VERSION = 2
"""Version of what stacks are found to take, part of the name of a kept answer."""
SEQUENCE = 96
"""Most successive dependent batches drawn: their rows recur within kappa batches, or late."""
LONG_SEQUENCE = 512
"""Most successive independent batches drawn: a large cache keeps a row for hundreds."""
SEQUENCE_ROWS = 8_000_000
"""Rows of a sequence from which no further batch is drawn; it is kept as 4 bytes a row."""
IN_FLIGHT = 3
"""Batches of a stack that get arrays of their own: those ready ahead at the least depth, and the
one in use (`runtime.loader.bulk`)."""
LOCAL_BATCHES = 8

if TYPE_CHECKING:
    from gnnplan.runtime.sampling.bulk.bulk import BulkSampler


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLists:
    """Adjacency lists that a batch expands."""

    edges: float
    """Mean entries of all of them."""


Batches = list[NDArray[np.int32]]
ENDS, IDS = np.dtype(np.int64), np.dtype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GraphDraws:
    """Draws on one dataset under one request (`planner.search.dimensions.dimension.Draws`)."""

    graph: Graph
    settings: PlanSettings
    machine: str = ""
    """Fingerprint of the machine whose seconds are kept."""
    measure: bool = True
    """False: sequences and rates come from the cache folder or not at all."""
    brief: bool = False
    """Whether no rates are timed: stacks and dependent batches are priced as others."""
    parts: Parts | None = None
    """Returns partitions of the graph by name and number of ranks."""
    rates: dict[tuple[str, int], Table | str] = field(
        default_factory=dict[tuple[str, int], Table | str]
    )
    kept: dict[tuple[int, int | None], Batches | str] = field(
        default_factory=dict[tuple[int, int | None], Batches | str]
    )
    """Sequences by number of ranks and kappa."""
    laws: dict[Cliques, list[Hotness]] = field(default_factory=dict[Cliques, list[Hotness]])
    """Hotness by clique, under the partition over those cliques."""

    def bulk(self, num_ranks: int) -> BulkBytes | str:
        """Return the bytes of stacks of one rank's batches."""

        def drawn() -> BulkBytes | str:
            schedule = self._schedule(num_ranks)
            sampler = self._stacks(schedule)
            if isinstance(sampler, str):
                return sampler
            steps = range(min(PILOT, schedule.num_steps))
            seeds = [np.ascontiguousarray(schedule.share(PROFILE_EPOCH, s)[0]) for s in steps]
            return sampler.predict_bytes(seeds, pilot=PILOT)

        why = self._unusual("sampled batch by batch")
        named = plan_sampler(self.settings)
        return why or keep_answer(
            ["stack", PILOT, STACK_VERSION, *self._decided(named, num_ranks)], BulkBytes, drawn
        )

    def stack_rate(self, num_ranks: int) -> Table | str:
        """Return seconds of a batch in a stack over those of one alone, by stack size."""
        return self._rate("stack rate", BULKS, num_ranks, self._timed_stacks)

    def dependent_rate(self, num_ranks: int) -> Table | str:
        """Return seconds of a dependent batch over an independent one's, by kappa."""
        return self._rate("dependent rate", TIMED_KAPPAS, num_ranks, self._timed_dependence)

    def _rate(
        self, name: str, sizes: tuple[int, ...], num_ranks: int, timed: Callable[[int], Table | str]
    ) -> Table | str:
        if (name, num_ranks) not in self.rates:
            decided = self._decided(plan_sampler(self.settings), num_ranks)
            key = [name, sizes, self.machine, *decided]
            self.rates[name, num_ranks] = keep_answer(key, Table, lambda: timed(num_ranks))
        return self.rates[name, num_ranks]

    def _timed_dependence(self, num_ranks: int) -> Table | str:
        if self.brief or not self.measure:
            return "batches that hang together were not timed when the plan was made; plan again"

        schedule = self._schedule(num_ranks)
        try:
            named = {
                kappa: plan_sampler(self.settings, _sampler_choice(las=None, kappa=kappa))
                for kappa in (None, *TIMED_KAPPAS)
            }
            samplers = {kappa: self._sampler(each, schedule) for kappa, each in named.items()}
        except SamplerError as error:
            return str(error)

        return dependent_rates(
            TIMED_KAPPAS, lambda kappa, step: _draw(samplers[kappa], schedule, step), Interlude()
        )

    def _timed_stacks(self, num_ranks: int) -> Table | str:
        if self.brief or not self.measure:
            return "stacks were not timed when the plan was made; plan again"
        from gnnplan.runtime.loader.bulk import bulk_request, with_own_arrays

        schedule = self._schedule(num_ranks)
        bulk = self._stacks(schedule)
        if isinstance(bulk, str):
            return bulk
        single = self._sampler(plan_sampler(self.settings), schedule)

        def stack(first: int, k: int) -> None:
            steps = [epoch_and_step(first + i, schedule.num_steps) for i in range(k)]
            (found,) = bulk.stacks([bulk_request(schedule, *at, schedule.rank) for at in steps])
            for batch in found[-IN_FLIGHT:]:  # as the loader does, so that a stack can be freed
                with_own_arrays(batch)

        sizes = sorted({min(k, schedule.num_steps) for k in BULKS} - {1})
        if not sizes:
            return "an epoch is a single step"
        return stack_rates(sizes, stack, lambda index: _draw(single, schedule, index), Interlude())

    def _stacks(self, schedule: SeedSchedule) -> "BulkSampler | str":
        """Return the user's sampler of many batches at once, or why it has no such form."""
        from gnnplan.runtime.sampling.bulk.bulk import BulkSampler

        try:
            return BulkSampler.of(self._sampler(plan_sampler(self.settings), schedule))
        except SamplerError:
            return f"sampler {self.settings.sampler} with these parameters has no bulk form"

    def batches(self, num_ranks: int, kappa: int | None) -> Batches | str:
        """Return successive batches of one rank, as vertex ids, of dependence `kappa`."""
        key = (num_ranks, kappa)
        if key not in self.kept:
            self.kept[key] = self._sequence(num_ranks, kappa)
        return self.kept[key]

    def clique_hotness(self, cliques: Cliques, parts: NDArray[np.int32]) -> list[Hotness]:
        """Return the hotness of each clique's batches, whose ranks draw seeds of their parts."""
        if cliques not in self.laws:
            work, named = self.settings.workload, plan_sampler(self.settings)
            laws = presample_cliques(self.graph, work, named, cliques, parts)
            self.laws[cliques] = [law.finished() for law in laws]
        return self.laws[cliques]

    def owned(self, num_ranks: int, name: str) -> OwnedBatch:
        """Return what a partition of the graph over ranks deals to them of shared batches."""
        if self.parts is None:
            raise KeyError(name)
        named, parts = plan_sampler(self.settings), self.parts
        key = ["owned", SHARED_BATCHES, name, *self._decided(named, num_ranks)]

        def counted() -> OwnedBatch:
            schedule = self._schedule(1)
            sampler = self._sampler(named, schedule)
            steps = range(min(SHARED_BATCHES, schedule.num_steps))
            batches = (_draw(sampler, schedule, step) for step in steps)
            return count_owned(batches, parts(name, num_ranks), num_ranks)

        found = keep_answer(key, OwnedBatch, counted)
        assert not isinstance(found, str)
        return found

    def local(self, num_ranks: int, factor: float, own: NDArray[np.int64]) -> LocalBatches | str:
        """Return sizes of batches that prefer neighbours among `own`, the ids of a rank's rows."""
        named = plan_sampler(self.settings, _sampler_choice(las=factor, kappa=None))
        held = hashlib.sha256(np.ascontiguousarray(own, np.int64).tobytes()).hexdigest()
        return self._unusual("sampled without preference") or keep_answer(
            ["local", LOCAL_BATCHES, "lists", held, *self._decided(named, num_ranks)],
            LocalBatches,
            lambda: self._local(num_ranks, named, own),
        )

    def read_edges(self, num_ranks: int) -> float | str:
        """Return the mean entries of the adjacency lists that one rank's batch expands."""
        named = plan_sampler(self.settings)

        def counted() -> ReadLists:
            schedule = self._schedule(num_ranks)
            sampler = self._sampler(named, schedule)
            steps = range(min(LOCAL_BATCHES, schedule.num_steps))
            return ReadLists(edges=self._entries([_draw(sampler, schedule, s) for s in steps]))

        why = self._unusual("sampled otherwise")
        if why:
            return why
        key = ["read edges", LOCAL_BATCHES, *self._decided(named, num_ranks)]
        found = keep_answer(key, ReadLists, counted)
        return found if isinstance(found, str) else found.edges

    def _entries(self, drawn: list[MiniBatch]) -> float:
        """Return the mean entries of the lists that some batches expand."""
        degrees = np.diff(self.graph.indptr)
        entries = sum(int(degrees[ids].sum()) for batch in drawn for ids in expanded(batch))
        return entries / len(drawn)

    def _local(self, num_ranks: int, named: Sampler, own: NDArray[np.int64]) -> LocalBatches | str:
        schedule = self._schedule(num_ranks)
        try:
            sampler = self._sampler(named, schedule, local=own)
            steps = range(min(LOCAL_BATCHES, schedule.num_steps))
            drawn = [_draw(sampler, schedule, step) for step in steps]
        except SamplerError as error:
            return str(error)
        mine = np.zeros(self.graph.num_nodes, np.bool_)
        mine[own] = True
        rows = sum(len(b.n_id) for b in drawn)
        return LocalBatches(
            vertices=rows / len(drawn),
            edges=sum(b.num_edges for b in drawn) / len(drawn),
            own_share=sum(int(mine[b.n_id].sum()) for b in drawn) / max(1, rows),
            read_edges=self._entries(drawn),
        )

    def _sequence(self, num_ranks: int, kappa: int | None) -> Batches | str:
        why = self._unusual("sampled from independent numbers")
        if why:
            return why
        named = plan_sampler(self.settings, _sampler_choice(las=None, kappa=kappa))
        place = self._folder() / f"{self._key(named, num_ranks)}.npz"
        with contextlib.suppress(OSError, ValueError):
            return _read(place)
        if not self.measure:
            return "its batches were not drawn when the plan was made; plan again"
        schedule = self._schedule(num_ranks)
        try:
            sampler = self._sampler(named, schedule)
            found, rows = Batches(), 0
            for step in range(_length(named)):
                batch = _draw(sampler, schedule, step)
                found.append(batch.n_id.astype(np.int32))
                rows += len(batch.n_id)
                if rows > SEQUENCE_ROWS:
                    break
        except SamplerError as error:
            return str(error)
        _write(place, found)
        return found

    def _unusual(self, what: str) -> str:
        """Say why this dataset cannot be drawn differently; empty where it can."""
        if is_link(self.graph):
            return f"task link is {what}"
        return f"model rgcn is {what}" if is_typed(self.settings.workload) else ""

    def _schedule(self, num_ranks: int) -> SeedSchedule:
        return seed_schedule(self.graph, self.settings.workload, num_ranks)

    def _sampler(
        self,
        named: Sampler,
        schedule: SeedSchedule,
        *,
        local: NDArray[np.int64] | None = None,
    ) -> BatchSampler:
        work, graph = self.settings.workload, self.graph
        return build_sampler(
            named,
            graph.indptr,
            graph.indices,
            work.fanouts,
            work.seed,
            edge_weight=graph.edge_weight,
            local=local,
            steps_per_epoch=schedule.num_steps,
        )

    def _key(self, named: Sampler, num_ranks: int) -> str:
        first, sampler = self._decided(named, num_ranks)
        return codec.content_hash([first, [_length(named), SEQUENCE_ROWS], sampler])[:32]

    def _decided(self, named: Sampler, num_ranks: int) -> list[object]:
        work = self.settings.workload
        return [
            [self.graph.fingerprint, work.fanouts, work.seed, work.batch_size, num_ranks],
            named,
        ]

    @staticmethod
    def _folder() -> Path:
        return cache.cache_folder().with_name("sequences")


def _length(named: Sampler) -> int:
    return LONG_SEQUENCE if float(named.parameters.get("kappa", 1)) == 1.0 else SEQUENCE


def _sampler_choice(*, las: float | None, kappa: int | None) -> Candidate:
    """Return a candidate that only says how its sampler draws."""
    factor = {} if las is None else {"factor": las}
    shared = {} if kappa is None else {"kappa": float(kappa)}
    name = DEFAULT_SAMPLER if las is None else find_sampler(DEFAULT_SAMPLER).local_form
    sampler = Sampler(name=name, parameters={**factor, **shared})
    return make_candidate(list_cores(1), sampler=sampler)


def _draw(sampler: BatchSampler, schedule: SeedSchedule, index: int) -> MiniBatch:
    """Draw a batch; beyond an epoch's last one they go on in the next, as training does."""
    return prepare_batch(sampler, schedule, *epoch_and_step(index, schedule.num_steps))()


def _read(place: Path) -> Batches:
    """Read a kept sequence; a damaged one raises ValueError."""
    with place.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as stored:
                ends, ids = _member(stored, "ends", ENDS), _member(stored, "ids", IDS)
            if (np.diff(ends, prepend=0) < 0).any() or ends[-1] != len(ids):
                raise ValueError("expected rising ends, the last of them that of the ids")
            return [np.asarray(part) for part in np.split(ids, ends[:-1])]
        except Exception as error:  # of zipfile, zlib and numpy, whatever is wrong
            raise ValueError(f"{place}: not a kept sequence ({type(error).__name__})") from None


def _member(stored: zipfile.ZipFile, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Read one array, whose size is checked before memory is asked for."""
    info = stored.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > info.compress_size:
        raise ValueError(f"{name}: expected a member as it was written, found another size")
    found = npy_of(stored.read(info))
    if found.dtype != dtype or found.ndim != 1:
        raise ValueError(f"{name}: expected a list of {dtype}, found another array")
    return found


def _write(place: Path, batches: Batches) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum([len(ids) for ids in batches])
    handle, staging = tempfile.mkstemp(dir=place.parent, prefix=".sequence.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, ids=np.concatenate(batches), ends=ends)
        Path(staging).replace(place)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise
