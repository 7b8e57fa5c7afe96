"""Profiles, answers and requests on disk: a repeated plan reads the same numbers.

A profile is a folder named by the hash of all that decided it, in gnnplan/profiles of the user's
cache folder or of `GNNPLAN_CACHE`. Answers of a few batches or processes lie beside it. A plan's
request, settings and machine, lies there under the plan's id: what prices something else
(`why-not`, `whatif`, `tune`) needs it, and plan folders stay the same to the byte wherever they
are made.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gnnplan.planner.cache_folder import cache_folder as root_folder
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Hotness, WorkloadProfile
from gnnplan.runtime import codec
from gnnplan.runtime.folders import take_name
from gnnplan.runtime.npy import map_npy
from gnnplan.runtime.plan.schema import Plan

T = TypeVar("T")

PROFILE_FILE = "profile.json"
ARRAYS = ("first_half", "second_half", "topology")
MAPPED_BYTES = 1 << 28
"""Of one number of ranks' arrays, from which they stay on the disk and are mapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What profiling hands over: the numbers, and hotness by seeds per rank."""

    numbers: WorkloadProfile
    hotness: dict[int, Hotness]


def cache_folder() -> Path:
    """Where profiles are kept.

    Raises:
        InputError: GNNPLAN_CACHE names a folder that cannot be written.
    """
    return root_folder() / "profiles"


def load(key: str, folder: Path | None = None) -> Profile | None:
    """The cached profile of that key; None where there is none that can be read.

    A damaged entry counts as absent: it is measured again and replaced.
    """
    place = (folder or cache_folder()) / key
    try:
        document = codec.parse((place / PROFILE_FILE).read_bytes())
        numbers = codec.decode(WorkloadProfile, document)
        hotness = {
            b.seeds_per_rank: _load_hotness(place, b.seeds_per_rank, b.num_batches)
            for b in numbers.batches
        }
    except (OSError, ValueError):
        return None
    return Profile(numbers=numbers, hotness=hotness)


class Staged:
    """A profile that is being made: its arrays are on disk before the last of it is known."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.finished = False

    def keep(self, hotness: Hotness) -> Hotness:
        """The same, whose arrays are mapped from the disk where they are large.

        Raises:
            OSError: they cannot be written.
        """
        seeds = hotness.seeds_per_rank
        for name in ARRAYS:
            np.save(_array_file(self._place, name, seeds), getattr(hotness, name))
        return _load_hotness(self._place, seeds, hotness.num_batches)

    def finish(self, numbers: WorkloadProfile) -> None:
        """Write what the arrays belong to: the profile is whole.

        Raises:
            OSError: it cannot be written.
        """
        (self._place / PROFILE_FILE).write_text(codec.dumps(numbers))
        self.finished = True


@contextmanager
def staged(key: str, folder: Path | None = None) -> Generator[Staged]:
    """Make a profile piece by piece; it is kept once it is finished, as a whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    place = folder or cache_folder()
    place.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=place, prefix=f".{key}."))
    try:
        made = Staged(staging)
        yield made
        if made.finished:
            # What was there is damaged, or another process's, and as good as this.
            earlier = take_name(staging, place / key)
            if earlier is not None:
                shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save(key: str, profile: Profile, folder: Path | None = None) -> None:
    """Keep a profile, as a whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    with staged(key, folder) as made:
        for hotness in profile.hotness.values():
            made.keep(hotness)
        made.finish(profile.numbers)


def keep_answer(decided: Sequence[Any], cls: type[T], make: Callable[[], T | str]) -> T | str:
    """Read an answer, or make it and keep it; a sentence (why there is none) is not kept.

    Args:
        decided: all that decides the answer, the name of the question first.
        cls: dataclass of the answer.
        make: answers.
    """
    name = f"{codec.content_hash(list(decided))[:32]}.json"
    place = cache_folder().with_name("pilots") / name
    with contextlib.suppress(OSError, ValueError):
        return codec.decode(cls, codec.parse(place.read_bytes()))
    made = make()
    if isinstance(made, str):
        return made
    place.parent.mkdir(parents=True, exist_ok=True)
    codec.write_text_atomically(place, codec.dumps(made))
    return codec.decode(cls, codec.parse(place.read_bytes()))


def _array_file(place: Path, name: str, seeds: int) -> Path:
    return place / f"{name}_{seeds}.npy"


def _load_hotness(place: Path, seeds: int, num_batches: int) -> Hotness:
    mapped = [map_npy(_array_file(place, name, seeds)) for name in ARRAYS]
    large = sum(array.nbytes for array in mapped) >= MAPPED_BYTES
    first, second, topology = mapped if large else [np.array(array) for array in mapped]
    if first.ndim != 1 or any(a.shape != first.shape for a in (second, topology)):
        raise ValueError(f"{place}: expected one value per node")
    if {a.dtype for a in (first, second, topology)} != {np.dtype(np.float32)}:
        raise ValueError(f"{place}: expected float32")
    return Hotness(
        seeds_per_rank=seeds,
        first_half=first,
        second_half=second,
        num_batches=num_batches,
        topology=topology,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """One planning request."""

    settings: PlanSettings
    machine: MachineModel
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """Calibration by stage that the prediction was multiplied with; empty: the raw model."""


def record_path(plan_id: str) -> Path:
    """Where the request of a plan is kept."""
    return cache_folder().parent / "requests" / f"{plan_id}.json"


def save_record(record: PlanRecord, plan_id: str) -> None:
    """Keep a request.

    Raises:
        OSError: the cache cannot be written.
    """
    path = record_path(plan_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    codec.write_text_atomically(path, codec.dumps(record))


def load_record(plan: Plan) -> PlanRecord:
    """The request that a plan was made from.

    Raises:
        SettingsError: none is kept, or it cannot be read.
    """
    path = record_path(plan.plan_id)
    if not path.is_file():
        raise SettingsError(
            f"expected the request of plan {plan.plan_id[:12]} in {path.parent}, found none: it "
            "was planned elsewhere or the cache was emptied; plan again"
        )
    try:
        return codec.decode(PlanRecord, codec.parse(path.read_bytes()))
    except (OSError, ValueError, SettingsError) as error:
        raise SettingsError(f"{path}: not readable ({error}); plan again") from None
