"""A loader's work by the thread that takes the steps, before each of them: done, and timed.

So it is in a run without loader threads: a batch is sampled, its rows are gathered while the
sampler's tables fill the caches, and a step computes on them. Timed where the model is, it meets
the same neighbours: of rounds that were disturbed neither is kept.
"""

import numpy as np
from numpy.typing import NDArray

from planner.profiling.loader_kept import Loader
from planner.profiling.loader_seconds import InLine, TimedGather, seconds_of
from planner.profiling.serving import half_width
from runtime.sampling.minibatch import MiniBatch


class InLineWork:
    """Samples and gathers, one batch a step.

    Rows come from private memory, and from the dataset's mapped ones after `to_next_rows`: not in
    turn, since what caches keep of a table is there in the next step.
    """

    def __init__(self, loader: Loader, least_rows: int) -> None:
        """Work of `loader`, whose batches have room for `least_rows` rows."""
        self._loader, self._reading = loader, loader.reading(least_rows)
        self._kinds = sorted(self._reading.gathered)
        """Private rows first; those that are gathered now are the first."""
        self._sampled = list[float]()
        self._gathered: dict[str, list[float]] = {kind: [] for kind in self._reading.gathered}

    @property
    def rows(self) -> NDArray[np.float32] | None:
        """Where rows are put, [rows, feature_dim]; None: the graph has none."""
        return self._reading.out if self._reading.gathered else None

    def do(self) -> None:
        """A batch's work."""
        self._sampled.append(seconds_of(self._loader.choose()))  # without its seeds
        self.gather()

    def sample(self) -> MiniBatch:
        """Draw the next batch, untimed."""
        return self._loader.sample()

    def gather(self) -> None:
        """The part of a batch's work that follows sampling."""
        if self._kinds:
            kind = self._kinds[0]
            self._gathered[kind].append(self._reading.gathered[kind].work())

    def to_next_rows(self) -> None:
        """Gather the other rows from here on, where there are two."""
        self._kinds = self._kinds[-1:]

    def forget(self) -> None:
        """Leave out what was done so far: the first batches make room for all."""
        for found in (self._sampled, *self._gathered.values()):
            found.clear()

    def found(self) -> InLine:
        """Medians over what was done."""
        return InLine(
            sample_seconds=float(np.median(self._sampled)),
            sample_spread=half_width(self._sampled),
            gathers={
                kind: TimedGather(
                    seconds=float(np.median(self._gathered[kind])),
                    rows=of_kind.rows,
                    row_bytes=of_kind.row_bytes,
                    table_bytes=of_kind.table_bytes,
                )
                for kind, of_kind in self._reading.gathered.items()
            },
        )
