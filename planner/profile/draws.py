"""What the search asks of the sampler beside the profile: sizes, sequences and the rate of stacks.

All are kept in the cache folder, so a repeated plan draws nothing and stays the same to the byte.
Where something cannot be drawn, the answer is a sentence that says why.

What a few batches told, kept beside the profiles: a repeated plan reads it and draws nothing.

Sizes are pure functions of graph and settings; seconds are not, and it is the file that makes a
repeated plan the same to the byte.
"""

import contextlib
import hashlib
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, list_cores, make_candidate
from gnnplan.planner.machine.model import Table
from gnnplan.planner.profile import cache
from gnnplan.planner.profile.cache import keep_answer
from gnnplan.planner.profile.draw import PROFILE_EPOCH
from gnnplan.planner.search.dimensions.stacks import BULKS
from gnnplan.planner.search.drawn import LocalBatches
from gnnplan.planner.search.samplers import plan_sampler
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.task_checks import is_link
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
"""Stacks of each size that are timed, after one that warms up."""
DEPENDENT = 8
"""Batches timed for each kappa: two turns of the smallest."""
SINGLES = 3
"""Single batches timed beside each stack; they take turns, so that load meets both."""


def stack_rates(
    sizes: Sequence[int],
    stack: Callable[[int, int], object],
    single: Callable[[int], object],
    between: Callable[[], object],
) -> Table:
    """Seconds of a batch in a stack of k over those of one alone, by k.

    Args:
        sizes: values of k, rising.
        stack: stack(first, k) draws batches first .. first + k - 1 together.
        single: draws one batch.
        between: work of a model between two draws, which leaves the caches as training does.
    """
    ratios: list[float] = []
    spreads: list[float] = []
    for k in sizes:
        found: list[float] = []
        for turn in range(ROUNDS + 1):
            between()
            together = _seconds(lambda at=turn * k, k=k: stack(at, k)) / k
            alone: list[float] = []
            for step in range(turn * k, turn * k + min(k, SINGLES)):
                between()
                alone.append(_seconds(lambda step=step: single(step)))
            found.append(together / float(np.median(alone)))
        found = found[1:]
        ratios.append(float(np.median(found)))
        spreads.append((max(found) - min(found)) / 2 / ratios[-1])
    return Table(
        unit="ratio",
        axes=["batches"],
        points=[[float(k) for k in sizes]],
        values=ratios,
        spread=float(np.median(spreads)),
    )


def dependent_rates(
    kappas: Sequence[int], draw: Callable[[int | None, int], object], between: Callable[[], object]
) -> Table:
    """Mean seconds of batches that hang together over those of independent ones, by kappa.

    Args:
        kappas: rising.
        draw: draw(kappa, step) draws one batch; kappa None: as the user's sampler says.
        between: work of a model between two draws, which leaves the caches as training does.
    """

    def seconds(kappa: int | None) -> list[float]:
        found: list[float] = []
        # The batch at a multiple of kappa needs one set of numbers, those between mix two.
        for step in range(1, DEPENDENT + 1):
            between()
            found.append(_seconds(lambda step=step: draw(kappa, step)))
        return found

    for kappa in (None, *kappas):
        draw(kappa, 0)  # grows the workspace
    alone = seconds(None)
    means = [float(np.mean(seconds(kappa))) for kappa in kappas]
    return Table(
        unit="ratio",
        axes=["kappa"],
        points=[[float(k) for k in kappas]],
        values=[mean / float(np.mean(alone)) for mean in means],
        spread=float(np.std(alone) / np.mean(alone)),
    )


def _seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


TIMED_KAPPAS = (4, 64)
"""Batches that hang together, in the timed draws; the rate at other kappas lies between or near."""
PILOT = 4
"""Batches whose bytes tell those of a stack."""
SEQUENCE = 96
"""Most successive batches that are drawn to see how soon rows come back, where they hang together:
rows then come back within kappa batches, or late."""
LONG_SEQUENCE = 512
"""And where they do not: a row that is read now and then stays in a large cache for hundreds."""
SEQUENCE_ROWS = 8_000_000
"""Most rows in them together: what is kept in the cache folder is four times as many bytes."""
IN_FLIGHT = 3
"""Batches of a stack that get arrays of their own: those ready ahead at the least depth, and one in
use (`runtime.loader.bulk`)."""
LOCAL_BATCHES = 8
"""Batches drawn with a preference for local neighbours."""

if TYPE_CHECKING:
    from gnnplan.runtime.sampling.bulk.bulk import BulkSampler

Batches = list[NDArray[np.int32]]
ENDS, IDS = np.dtype(np.int64), np.dtype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GraphDraws:
    """Draws on one dataset under one request (`planner.search.drawn.Draws`)."""

    graph: Graph
    settings: PlanSettings
    machine: str = ""
    """Fingerprint of the machine: whose seconds are kept."""
    measure: bool = True
    """False: sequences and rates come from the cache folder or not at all."""
    rates: dict[tuple[str, int], Table | str] = field(
        default_factory=dict[tuple[str, int], Table | str]
    )
    """Timed draws, by what was drawn and ranks."""
    kept: dict[tuple[int, int | None], Batches | str] = field(
        default_factory=dict[tuple[int, int | None], Batches | str]
    )
    """Sequences by ranks and kappa."""

    def bulk(self, num_ranks: int) -> BulkBytes | str:
        """Bytes of stacks of one rank's batches."""

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
            ["stack", PILOT, *self._decided(named, num_ranks)], BulkBytes, drawn
        )

    def stack_rate(self, num_ranks: int) -> Table | str:
        """Seconds of a batch in a stack over those of one alone, by one thread."""
        return self._rate("stack rate", BULKS, num_ranks, self._timed_stacks)

    def dependent_rate(self, num_ranks: int) -> Table | str:
        """Seconds of a batch that hangs together with others over an independent one's."""
        return self._rate("dependent rate", TIMED_KAPPAS, num_ranks, self._timed_dependence)

    def _rate(
        self, name: str, sizes: tuple[int, ...], num_ranks: int, timed: Callable[[int], Table | str]
    ) -> Table | str:
        """Timed once, then kept with the profile."""
        if (name, num_ranks) not in self.rates:
            decided = self._decided(plan_sampler(self.settings), num_ranks)
            key = [name, sizes, self.machine, *decided]
            self.rates[name, num_ranks] = keep_answer(key, Table, lambda: timed(num_ranks))
        return self.rates[name, num_ranks]

    def _timed_dependence(self, num_ranks: int) -> Table | str:
        if not self.measure:
            return "batches that hang together were not timed when the plan was made; plan again"
        from gnnplan.planner.probe.burst import Interlude  # torch, which other draws do without

        schedule = self._schedule(num_ranks)
        try:
            samplers = {
                kappa: self._sampler(plan_sampler(self.settings, _with(las=None, kappa=kappa)),
                                     schedule)
                for kappa in (None, *TIMED_KAPPAS)
            }  # fmt: skip
        except SamplerError as error:
            return str(error)

        def draw(kappa: int | None, step: int) -> None:
            ahead, at = divmod(step, schedule.num_steps)
            _draw(samplers[kappa], schedule, at, epoch=PROFILE_EPOCH + ahead)

        return dependent_rates(TIMED_KAPPAS, draw, Interlude())

    def _timed_stacks(self, num_ranks: int) -> Table | str:
        if not self.measure:
            return "stacks were not timed when the plan was made; plan again"
        from gnnplan.planner.probe.burst import Interlude  # torch, which other draws do without
        from gnnplan.runtime.loader.bulk import with_own_arrays
        from gnnplan.runtime.sampling.minibatch import Request

        schedule = self._schedule(num_ranks)
        bulk = self._stacks(schedule)
        if isinstance(bulk, str):
            return bulk
        single = self._sampler(plan_sampler(self.settings), schedule)

        def place(index: int) -> tuple[int, int]:
            ahead, step = divmod(index, schedule.num_steps)
            return PROFILE_EPOCH + ahead, step

        def request(index: int) -> Request:
            epoch, step = place(index)
            seeds, input_id, total = schedule.share(epoch, step)
            seeds = np.ascontiguousarray(seeds)
            return Request(
                seeds=seeds, epoch=epoch, step=step, input_id=input_id, global_num_seeds=total
            )

        def stack(first: int, k: int) -> None:
            (found,) = bulk.stacks([request(first + i) for i in range(k)])
            for batch in found[-IN_FLIGHT:]:  # as the loader does, so that a stack can be freed
                with_own_arrays(batch)

        sizes = sorted({min(k, schedule.num_steps) for k in BULKS} - {1})
        if not sizes:
            return "an epoch is a single step"
        return stack_rates(
            sizes,
            stack,
            lambda index: _draw(single, schedule, place(index)[1], epoch=place(index)[0]),
            Interlude(),
        )

    def _stacks(self, schedule: SeedSchedule) -> "BulkSampler | str":
        """The user's sampler, many batches at once."""
        from gnnplan.runtime.sampling.bulk.bulk import BulkSampler

        try:
            return BulkSampler.of(self._sampler(plan_sampler(self.settings), schedule))
        except SamplerError:
            return f"sampler {self.settings.sampler} with these parameters has no bulk form"

    def batches(self, num_ranks: int, kappa: int | None) -> Batches | str:
        """Successive batches of one rank, as ids, with that dependence."""
        key = (num_ranks, kappa)
        if key not in self.kept:
            self.kept[key] = self._sequence(num_ranks, kappa)
        return self.kept[key]

    def local(self, num_ranks: int, factor: float, own: NDArray[np.int64]) -> LocalBatches | str:
        """Sizes of batches that prefer neighbours among `own`."""
        named = plan_sampler(self.settings, _with(las=factor, kappa=None))
        held = hashlib.sha256(np.ascontiguousarray(own, np.int64).tobytes()).hexdigest()
        return self._unusual("sampled without preference") or keep_answer(
            ["local", LOCAL_BATCHES, held, *self._decided(named, num_ranks)],
            LocalBatches,
            lambda: self._local(num_ranks, named, own),
        )

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
        )

    def _sequence(self, num_ranks: int, kappa: int | None) -> Batches | str:
        why = self._unusual("sampled from independent numbers")
        if why:
            return why
        named = plan_sampler(self.settings, _with(las=None, kappa=kappa))
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
                # Steps beyond the epoch's last one go on in the next, as training does.
                ahead, at = divmod(step, schedule.num_steps)
                batch = _draw(sampler, schedule, at, epoch=PROFILE_EPOCH + ahead)
                found.append(batch.n_id.astype(np.int32))
                rows += len(batch.n_id)
                if rows > SEQUENCE_ROWS:
                    break
        except SamplerError as error:
            return str(error)
        _write(place, found)
        return found

    def _unusual(self, what: str) -> str:
        """Why nothing of this dataset can be drawn otherwise than it is."""
        if is_link(self.graph):
            return f"task link is {what}"
        return f"model rgcn is {what}" if is_typed(self.settings.workload) else ""

    def _schedule(self, num_ranks: int) -> SeedSchedule:
        work = self.settings.workload
        return SeedSchedule(
            self.graph.train_idx, work.batch_size, seed=work.seed, num_ranks=num_ranks, rank=0
        )

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
        """All that decides a rank's batches."""
        work = self.settings.workload
        return [
            [self.graph.fingerprint, work.fanouts, work.seed, work.batch_size, num_ranks],
            named,
        ]

    @staticmethod
    def _folder() -> Path:
        return cache.cache_folder().with_name("sequences")


def _length(named: Sampler) -> int:
    """Most successive batches to draw of a sampler."""
    return LONG_SEQUENCE if float(named.parameters.get("kappa", 1)) == 1.0 else SEQUENCE


def _with(*, las: float | None, kappa: int | None) -> Candidate:
    """A candidate with these choices of the sampler and nothing else to say."""
    factor = {} if las is None else {"factor": las}
    shared = {} if kappa is None else {"kappa": float(kappa)}
    name = DEFAULT_SAMPLER if las is None else find_sampler(DEFAULT_SAMPLER).local_form
    sampler = Sampler(name=name, parameters={**factor, **shared})
    return make_candidate(list_cores(1), sampler=sampler)


def _draw(
    sampler: BatchSampler, schedule: SeedSchedule, step: int, epoch: int = PROFILE_EPOCH
) -> MiniBatch:
    seeds, input_id, total = schedule.share(epoch, step)
    return sampler.sample(seeds, epoch=epoch, step=step, input_id=input_id, global_num_seeds=total)


def _read(place: Path) -> Batches:
    """A kept sequence.

    Raises:
        OSError: there is none.
        ValueError: it is damaged.
    """
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
    """One list; its size is held against what is stored, before memory is asked for.

    Raises:
        ValueError: they do not fit.
    """
    info = stored.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > info.compress_size:
        raise ValueError(f"{name}: expected a member as it was written, found another size")
    found = npy_of(stored.read(info))
    if found.dtype != dtype or found.ndim != 1:
        raise ValueError(f"{name}: expected a list of {dtype}, found another array")
    return found


def _write(place: Path, batches: Batches) -> None:
    """Keep a sequence, as a whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
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
