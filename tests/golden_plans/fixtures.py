"""Profiles kept as they were once, so that plans do not depend on how profiles are made.

Batches were drawn by the runtime's samplers; the seconds of mini-batches were made up from their
sizes (`timings`), those of full graphs measured. One file of plain arrays and JSON holds them all,
by the names of cases, in the order in which a plan asks for them.
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner import pipeline
from gnnplan.planner.fullgraph import plan as full_graph_plan
from gnnplan.planner.fullgraph.profile import CutProfile, FullProfile
from gnnplan.planner.machine.model import Table
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.draws import GraphDraws
from gnnplan.planner.workload import Hotness, WorkloadProfile
from gnnplan.runtime import codec
from tests.golden_plans.cases import Case

FILE = Path(__file__).with_name("profiles.npz")
RATES = {"stack rate": 0.6, "dependent rate": 1.3}
"""Seconds of a batch in a stack, and of one that hangs together with others, over one alone."""
SIZES = {"stack rate": "batches", "dependent rate": "kappa"}
JOINED: dict[str, Callable[[Any], bool]] = {
    "cooperative": lambda candidate: candidate.batching == "cooperative",
    "grid": lambda candidate: candidate.topology.policy == "partitioned",
}
"""Candidates among which cases of that mode choose."""
FIELDS: dict[str, str] = {}
"""Fields of profiles that have another name since: old -> new."""
NUMBERS, ARRAYS = ("seeds_per_rank", "num_batches"), ("first_half", "second_half", "topology")
"""What is kept of a hotness."""


class Fixtures:
    """Profiles by name; read from the file, or added and written."""

    def __init__(self, arrays: dict[str, NDArray[Any]] | None = None) -> None:
        self._arrays = arrays if arrays is not None else dict[str, NDArray[Any]]()

    @staticmethod
    def read() -> "Fixtures":
        """What the file holds."""
        with np.load(FILE) as pack:
            return Fixtures({name: pack[name] for name in pack.files})

    def write(self) -> None:
        """Replace the file."""
        np.savez_compressed(FILE, **self._arrays)  # type: ignore[arg-type]

    def __contains__(self, name: str) -> bool:
        return f"{name}/room" in self._arrays

    def room(self, name: str) -> int | None:
        """Bytes of a rank's memory where it is tight; None where its plan is refused anyway."""
        return int(self._arrays[f"{name}/room"][()]) or None

    def add(self, name: str, found: Sequence[Profile | FullProfile], room: int) -> None:
        """Keep the profiles that a plan asked for, and the room for its tight cases."""
        self._arrays[f"{name}/room"] = np.array(room)
        for number, each in enumerate(found):
            place = f"{name}/{number}"
            if isinstance(each, FullProfile):
                document: Any = {"cut": codec.to_plain(each.numbers)}
                self._arrays[f"{place}/partition"] = each.partition
            else:
                plain = {
                    seeds: {name: getattr(hot, name) for name in NUMBERS}
                    for seeds, hot in each.hotness.items()
                }
                document = {"numbers": codec.to_plain(each.numbers), "hotness": plain}
                for seeds, hot in each.hotness.items():
                    for each_name in ARRAYS:
                        self._arrays[f"{place}/{seeds}/{each_name}"] = getattr(hot, each_name)
            text = json.dumps(document, sort_keys=True).encode()
            self._arrays[place] = np.frombuffer(text, np.uint8)

    def take(self, name: str) -> list[Any]:
        """What was kept under that name, made anew."""
        found = list[Any]()
        while (place := f"{name}/{len(found)}") in self._arrays:
            document = _renamed(json.loads(self._arrays[place].tobytes()))
            if "cut" in document:
                numbers = codec.decode(CutProfile, document["cut"])
                partition = self._arrays[f"{place}/partition"]
                found.append(FullProfile(numbers=numbers, partition=partition))
                continue
            hotness = dict[int, Hotness]()
            for seeds, plain in document["hotness"].items():
                first, second, topology = (self._arrays[f"{place}/{seeds}/{x}"] for x in ARRAYS)
                hotness[int(seeds)] = Hotness(
                    **plain, first_half=first, second_half=second, topology=topology
                )
            numbers = codec.decode(WorkloadProfile, document["numbers"])
            found.append(Profile(numbers=numbers, hotness=hotness))
        return found


@contextmanager
def replayed(case: Case, fixtures: Fixtures) -> Generator[None]:
    """Plan with the case's kept profiles: nothing is profiled or timed.

    Raises:
        LookupError: more profiles are asked for than are kept.
    """
    found = fixtures.take(case.profile)

    def take() -> Any:
        if not found:
            raise LookupError(f"{case.profile}: more profiles are asked for than are kept")
        return found.pop(0)

    def of_cores(graph: Any, wanted: Sequence[Any], *args: Any, **named: Any) -> list[Any]:
        return [take() for _ in wanted]

    def of_gpus(*args: Any, **named: Any) -> Any:
        return take()

    def of_full_graph(*args: Any, **named: Any) -> list[Any]:
        return [take() for _ in range(len(found))]

    with patched(of_cores, of_gpus, of_full_graph), _chosen_among(case):
        yield


@contextmanager
def patched(of_cores: Any, of_gpus: Any, of_full_graph: Any) -> Generator[None]:
    """Put these in place of what profiles a request: the one place that knows where that is."""
    with (
        mock.patch("gnnplan.planner.profile.profile.profiles", of_cores),
        mock.patch("gnnplan.planner.profile.profile.gpu_profile", of_gpus),
        mock.patch.object(full_graph_plan, "profile_cuts", of_full_graph),
        mock.patch.object(GraphDraws, "_rate", _rate),
    ):
        yield


@contextmanager
def _chosen_among(case: Case) -> Generator[None]:
    """Leave the mode's candidates alone to choose from."""
    wanted, choose = JOINED.get(case.mode, lambda candidate: True), pipeline._choose

    def chosen(search: Any, priced: list[Any]) -> Any:
        return choose(search, [each for each in priced if wanted(each.candidate)])

    with mock.patch.object(pipeline, "_choose", chosen):
        yield


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {FIELDS.get(key, key): _renamed(each) for key, each in value.items()}
    return [_renamed(each) for each in value] if isinstance(value, list) else value


def _rate(self: GraphDraws, name: str, sizes: tuple[int, ...], num_ranks: int, timed: Any) -> Table:
    points = [float(size) for size in sizes]
    return Table(
        unit="ratio", axes=[SIZES[name]], points=[points],
        values=[RATES[name] * (1 + 0.01 * num_ranks) for _ in points], spread=0.02,
    )  # fmt: skip
