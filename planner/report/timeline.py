"""The predicted step as a timeline: which stage runs when, on the loader and the training thread.

Bars are the plan's stage seconds laid end to end. Batches made in line delay the training thread,
so the loader's stages stand before the model's; loader threads run ahead, so theirs stand beside.
"""

from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from gnnplan.planner.report.svg import element, figure, percent
from gnnplan.planner.report.words import share_text, stage_words, time_text
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.stages import LOADER_STAGES, TRAINING_STAGES, Stage

ROW = 36
"""Pixels of a stage: a line of words and a bar."""
BAR = 12
NARROW = 0.4
"""Share of the width below which the words at the step's end stand behind its line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One stage's place in the step."""

    stage: str
    words: str
    lane: Literal["loader", "training"]
    start_seconds: float
    seconds: float
    share: float
    """Of the step."""
    provenance: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A step's bars in order, and what they leave unexplained."""

    bars: list[Bar]
    step_seconds: float
    inline: bool
    """True where no thread runs ahead: one stage after the other."""
    loader_threads: int
    other_seconds: float
    """Of the step beyond its training-thread bars; below 0 where they overlap."""

    @property
    def end_seconds(self) -> float:
        """Where the last bar ends."""
        return max([self.step_seconds, *(b.start_seconds + b.seconds for b in self.bars)])


def timeline(plan: Plan) -> Timeline:
    """Lay a plan's predicted stages end to end."""
    found, threads = plan.prediction.stages, plan.strategy.threads.sample
    inline = threads == 0
    loader = [s.value for s in LOADER_STAGES if s in found]
    training = [s.value for s in TRAINING_STAGES if s in found]
    if inline and loader:
        training = [name for name in training if name != Stage.WAIT]
    known = {*loader, *training, Stage.WAIT.value}
    training += sorted(name for name in found if name not in known)
    step = plan.prediction.step_seconds.value
    bars, ready = _lane(plan, loader, "loader", 0.0)
    trained, end = _lane(plan, training, "training", ready if inline else 0.0)
    return Timeline(
        bars=bars + trained,
        step_seconds=step,
        inline=inline,
        loader_threads=threads,
        other_seconds=step - end,
    )


def _lane(
    plan: Plan, names: list[str], lane: Literal["loader", "training"], start: float
) -> tuple[list[Bar], float]:
    """Bars one after the other, and when the last one ends."""
    prediction, step, bars = plan.prediction, plan.prediction.step_seconds.value, list[Bar]()
    for name in names:
        seconds = prediction.stages[name]
        bars.append(
            Bar(
                stage=name,
                words=stage_words(name),
                lane=lane,
                start_seconds=start,
                seconds=seconds,
                share=seconds / step if step > 0 else 0.0,
                provenance=prediction.provenance.get(name, "derived"),
            )
        )
        start += seconds
    return bars, start


def draw_timeline(
    found: Timeline, *, name: str = "timeline", whole_seconds: float | None = None
) -> Markup:
    """One row per stage, each bar where it runs; a mark on each row shows the end of the step.

    `whole_seconds` is what the width means where pictures stand side by side; None: as long as the
    last bar.
    """
    whole = whole_seconds or found.end_seconds or 1.0
    top, parts = 0, list[Markup]()
    share = min(1.0, found.step_seconds / whole)
    end_of_step, anchor = percent(share), "end" if share > NARROW else "start"
    height = ROW * len(found.bars) + 24
    marked = found.step_seconds < 0.995 * whole
    for bar in found.bars:
        parts.append(_row(bar, top, whole))
        if marked:  # over the bar alone: a line from top to bottom would cross the numbers
            low, high = top + 18, top + 22 + BAR
            line = element("line", class_="mark", x1=end_of_step, x2=end_of_step, y1=low, y2=high)
            parts.append(line)
        top += ROW
    if share > NARROW:
        parts.append(element("text", "0", class_="axis", x=0, y=height - 4))
    words = f"step ends, {time_text(found.step_seconds)}"
    end = element("text", words, class_="axis", x=end_of_step, y=height - 4, text_anchor=anchor)
    return figure(
        name, "Predicted timeline of one step", describe(found), *parts, end, height=height
    )


def _row(bar: Bar, top: int, whole: float) -> Markup:
    x, width = percent(bar.start_seconds / whole), percent(bar.seconds / whole)
    value = f"{time_text(bar.seconds)}, {share_text(bar.share)}"
    return element(
        "g",
        element("title", f"{bar.stage}: {value}; {bar.words}"),
        element("text", bar.stage, class_="name", x=0, y=top + 14),
        element("text", value, class_="value", x="100%", y=top + 14, text_anchor="end"),
        element("rect", class_="track", x=0, y=top + 20, width="100%", height=BAR, rx=2),
        element(
            "rect",
            class_=f"bar {bar.lane}",
            x=x,
            y=top + 20,
            width=width,
            height=BAR,
            rx=2,
        ),
    )


def describe(found: Timeline) -> str:
    """The picture in words."""
    order = ", then ".join(f"{b.stage} {time_text(b.seconds)}" for b in found.bars)
    if found.inline:
        return f"One after the other: {order}."
    loader = [b for b in found.bars if b.lane == "loader"]
    training = [b for b in found.bars if b.lane == "training"]
    ahead = ", then ".join(f"{b.stage} {time_text(b.seconds)}" for b in loader)
    mine = ", then ".join(f"{b.stage} {time_text(b.seconds)}" for b in training)
    return f"Ahead of the training thread: {ahead}. On the training thread: {mine}."
