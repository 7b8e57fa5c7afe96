"""Profiles, answers and planning requests on disk, so that a repeated plan reads the same numbers.

A profile is a folder named by the hash of all that decided it, in gnnplan/profiles of the user's
cache folder or of `GNNPLAN_CACHE`. Answers of a few batches or processes lie beside it. So do the
requests of plans, under their ids: `why-not`, `whatif` and `tune` price something else with them,
and plan folders stay the same to the byte wherever they are made.
"""

import contextlib
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gnnplan.planner.array_cache import cache_folder as root_folder
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Hotness, WorkloadProfile
from gnnplan.runtime import codec
from gnnplan.runtime.folders import Unfinished, sweep_unfinished, take_name
from gnnplan.runtime.npy import map_npy
from gnnplan.runtime.plan.schema import Plan

T = TypeVar("T")

PROFILE_FILE = "profile.json"
ARRAYS = ("first_half", "second_half", "topology")
MAPPED_BYTES = 1 << 28
"""Bytes of one batch size's arrays from which they are mapped from the disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The numbers of a profile, and its hotness by seeds per rank."""

    numbers: WorkloadProfile
    hotness: dict[int, Hotness]


def cache_folder() -> Path:
    """Return the folder of the profiles, or raise InputError if it cannot be written."""
    return root_folder() / "profiles"


def load(key: str, folder: Path | None = None) -> Profile | None:
    """Read the cached profile of a key; None where there is none, or a damaged one."""
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
    """A profile in the making, whose arrays are on disk before its numbers are known."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.finished = False

    def keep(self, hotness: Hotness) -> Hotness:
        """Write the arrays, and return them, mapped where they are large."""
        seeds = hotness.seeds_per_rank
        for name in ARRAYS:
            np.save(_array_file(self._place, name, seeds), getattr(hotness, name))
        return _load_hotness(self._place, seeds, hotness.num_batches)

    def finish(self, numbers: WorkloadProfile) -> None:
        """Write the numbers, which make the profile whole."""
        (self._place / PROFILE_FILE).write_text(codec.dumps(numbers))
        self.finished = True


@contextmanager
def staged(key: str, folder: Path | None = None) -> Generator[Staged]:
    """Make a profile piece by piece; it is kept once it is finished, as a whole or not at all.

    What killed processes have left of profiles is removed.
    """
    place = folder or cache_folder()
    place.mkdir(parents=True, exist_ok=True)
    sweep_unfinished(place)
    staging = Unfinished(place / key)
    try:
        made = Staged(staging.folder)
        yield made
        if made.finished:
            staging.finish()
            # What was there is damaged, or another process's, and as good as this.
            earlier = take_name(staging.folder, place / key)
            if earlier is not None:
                shutil.rmtree(earlier, ignore_errors=True)
    finally:
        staging.remove()


def save(key: str, profile: Profile, folder: Path | None = None) -> None:
    """Keep a profile, as a whole or not at all."""
    with staged(key, folder) as made:
        for hotness in profile.hotness.values():
            made.keep(hotness)
        made.finish(profile.numbers)


def keep_answer(decided: Sequence[Any], cls: type[T], make: Callable[[], T | str]) -> T | str:
    """Read a kept answer, or make it and keep it; a refusal (a sentence) is not kept.

    Args:
        decided: all that decides the answer, the name of the question first.
        cls: dataclass of the answer.
        make: returns the answer or the refusal.
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
    """The request of one plan: settings and machine."""

    settings: PlanSettings
    machine: MachineModel
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """Calibration factors of the prediction, by stage; empty: the raw model."""


def record_path(plan_id: str) -> Path:
    """Return the file of a plan's request."""
    return cache_folder().parent / "requests" / f"{plan_id}.json"


def save_record(record: PlanRecord, plan_id: str) -> None:
    """Keep a plan's request."""
    path = record_path(plan_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    codec.write_text_atomically(path, codec.dumps(record))


def load_record(plan: Plan) -> PlanRecord:
    """Read the request that a plan was made from, or raise SettingsError if it is not there."""
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
