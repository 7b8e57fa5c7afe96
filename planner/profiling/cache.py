"""Profiles on disk: a repeated plan reads the same numbers, and so is the same to the byte.

A profile is a folder named by the hash of all that decided it. `GNNPLAN_CACHE` names the place;
otherwise it is ~/.cache/gnnplan/profiles.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.workload import Hotness, WorkloadProfile
from runtime import codec
from runtime.folders import take_name
from runtime.npy import map_npy

PROFILE_FILE = "profile.json"
ARRAYS = ("first_half", "second_half", "topology")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What profiling hands over: the numbers, and hotness by seeds per rank."""

    numbers: WorkloadProfile
    hotness: dict[int, Hotness]


def cache_folder() -> Path:
    """Where profiles are kept."""
    chosen = os.environ.get("GNNPLAN_CACHE")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "gnnplan"
    return root / "profiles"


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


def save(key: str, profile: Profile, folder: Path | None = None) -> None:
    """Keep a profile, as a whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    root = folder or cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=root, prefix=f".{key}."))
    try:
        for seeds, hotness in profile.hotness.items():
            for name in ARRAYS:
                np.save(staging / f"{name}_{seeds}.npy", getattr(hotness, name))
        (staging / PROFILE_FILE).write_text(codec.dumps(profile.numbers))
        # What was there is damaged, or another process's, and as good as this.
        earlier = take_name(staging, root / key)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _load_hotness(place: Path, seeds: int, num_batches: int) -> Hotness:
    first, second, topology = (np.array(map_npy(place / f"{name}_{seeds}.npy")) for name in ARRAYS)
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
