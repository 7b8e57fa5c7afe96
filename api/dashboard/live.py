"""A run's losses as they come, from the events that its process writes."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from api.jobs.events import EVENTS_FILE, event_of
from api.service.jobs import end_of
from planner.report.svg import element, figure

HEIGHT = 220
TOP = 18
MOST_POINTS = 400
MOST_DOTS = 40
MOST_LOSS = 1e300
"""A loss beyond it has diverged: differences of such numbers are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One step's loss per seed, or the mean of an epoch's steps."""

    epoch: int
    step: int | None
    """None for the mean."""
    loss: float

    @property
    def place(self) -> str:
        """Where in the run."""
        return f"epoch {self.epoch}, {'mean' if self.step is None else f'step {self.step}'}"


def losses(folder: Path) -> list[Loss]:
    """Losses that a job has told of last, thinned to what a picture shows.

    Steps are told of ten times a second at most; where that is less often than epochs end, the
    epochs' means say more.
    """
    told: dict[str, list[Loss]] = {"step": [], "epoch": []}
    for line in end_of(folder / EVENTS_FILE).splitlines():
        event = event_of(line) or {}
        kind, data = event.get("event"), event.get("data", {})
        if kind in told and (loss := _loss(data, mean=kind == "epoch")) is not None:
            told[kind].append(loss)
    found = max(told["step"], told["epoch"], key=len)
    every = 1 + len(found) // MOST_POINTS
    return found[::-1][::every][::-1]


def _loss(data: dict[str, Any], *, mean: bool) -> Loss | None:
    """What an event tells of a loss; None where that is no number that can be drawn."""
    loss, epoch, step = data.get("loss"), data.get("epoch", 0), data.get("step", 0)
    if not isinstance(loss, float) or not abs(loss) < MOST_LOSS:
        return None
    if not isinstance(epoch, int) or not isinstance(step, int):
        return None
    return Loss(epoch=epoch, step=None if mean else step, loss=loss)


def draw_losses(found: list[Loss]) -> Markup:
    """Loss over the steps told of, first to last across the picture."""
    high, low = max(x.loss for x in found), min(x.loss for x in found)
    span = (high - low) or 1.0
    places = [
        (i / max(1, len(found) - 1), TOP + (high - x.loss) / span * (HEIGHT - TOP - 26))
        for i, x in enumerate(found)
    ]
    lines = [
        element(
            "line",
            class_="loss",
            x1=f"{100 * xa:.2f}%",
            y1=ya,
            x2=f"{100 * xb:.2f}%",
            y2=yb,
        )
        for (xa, ya), (xb, yb) in pairwise(places)
    ]
    dots = [
        element("circle", class_="point", cx=f"{100 * x:.2f}%", cy=y, r=3)
        for x, y in (places if len(places) <= MOST_DOTS else [])
    ]
    first, last = found[0], found[-1]
    words = (
        f"Loss {first.loss:.3f} at {first.place}; {last.loss:.3f} at {last.place}; "
        f"between {low:.3f} and {high:.3f}."
    )
    return figure(
        "losses",
        "Loss per seed, as measured",
        words,
        element("line", class_="grid", x1=0, x2="100%", y1=TOP, y2=TOP),
        element("line", class_="grid", x1=0, x2="100%", y1=HEIGHT - 26, y2=HEIGHT - 26),
        *lines,
        *dots,
        element("text", f"{high:.3f}", class_="axis", x=0, y=TOP - 5),
        element("text", f"{low:.3f}", class_="axis", x=0, y=HEIGHT - 31),
        element("text", first.place, class_="axis", x=0, y=HEIGHT - 8),
        element(
            "text",
            f"{last.place}: {last.loss:.3f}",
            class_="axis",
            x="100%",
            y=HEIGHT - 8,
            text_anchor="end",
        ),
        height=HEIGHT,
    )
