"""Bar charts of a plan: the stages of a step, what fills each memory, where rows come from.

A stage's bar is as long as its seconds. Batches that are loaded synchronously delay the training
thread, so the loader's bars come before the model's. Prefetched batches are loaded beside it, so
both lanes begin at 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.report.svg import element, figure, labelled_row, percent
from gnnplan.planner.report.words import (
    SOURCE_ORDER,
    SOURCE_WORDS,
    share_text,
    stage_words,
    time_text,
)
from gnnplan.planner.units import by_number
from gnnplan.runtime.plan.schema import MemoryUse, Plan
from gnnplan.runtime.stages import LOADER_STAGES, TRAINING_STAGES, Stage

STAGE_ROW = 36
STAGE_BAR = 12
MEMORY_ROW = 44
MEMORY_BAR = 16
SOURCE_ROW = 40
SOURCE_BAR = 14
"""Heights in pixels: a row holds a line of words and a bar."""
BAR_TOP = 20
"""Pixels from the top of a row to its bar."""
NARROW = 0.4
"""Share of the width below which the words at the step's end stand to the right of its mark."""
TONES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One stage's place in the step."""

    stage: str
    words: str
    lane: Literal["loader", "training"]
    start_seconds: float
    seconds: float
    share: float
    provenance: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The bars of a step, the loader's first."""

    bars: list[Bar]
    step_seconds: float
    inline: bool
    """True where batches are loaded synchronously."""
    loader_threads: int
    other_seconds: float
    """Seconds of the step beyond the training thread's bars; below 0 where bars overlap."""

    @property
    def loaded_by(self) -> str:
        """Say what loads the batches."""
        if self.inline:
            return "loading on the training thread"
        return "loader" if self.loader_threads else "the step's graph"

    def thread_of(self, bar: Bar) -> str:
        """Return the name of the thread, or the graph of kernels, that runs a bar's stage."""
        return "training" if self.inline or bar.lane == "training" else self.loaded_by

    @property
    def end_seconds(self) -> float:
        """Return the end of the step or of the last bar, whichever is later."""
        return max([self.step_seconds, *(b.start_seconds + b.seconds for b in self.bars)])


def timeline(plan: Plan) -> Timeline:
    """Lay a plan's predicted stages end to end on the two threads."""
    found, threads = plan.prediction.stages, plan.strategy.threads.sample
    inline = not plan.strategy.loads_ahead
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
    """Draw one row per stage, with a mark on each at the end of the step.

    Args:
        found: what is drawn.
        name: beginning of the picture's ids.
        whole_seconds: seconds of the full width, to draw pictures to one scale; None: until the
            last bar ends.
    """
    whole = whole_seconds or found.end_seconds or 1.0
    top, parts = 0, list[Markup]()
    share = min(1.0, found.step_seconds / whole)
    end_of_step, anchor = percent(share), "end" if share > NARROW else "start"
    height = STAGE_ROW * len(found.bars) + 24
    marked = found.step_seconds < 0.995 * whole
    for bar in found.bars:
        parts.append(_stage_row(bar, top, whole))
        if marked:  # over the bar alone: a line from top to bottom would cross the numbers
            low, high = top + BAR_TOP - 2, top + BAR_TOP + STAGE_BAR + 2
            line = element("line", class_="mark", x1=end_of_step, x2=end_of_step, y1=low, y2=high)
            parts.append(line)
        top += STAGE_ROW
    if share > NARROW:
        parts.append(element("text", "0", class_="axis", x=0, y=height - 4))
    words = f"step ends, {time_text(found.step_seconds)}"
    end = element("text", words, class_="axis", x=end_of_step, y=height - 4, text_anchor=anchor)
    return figure(
        name, "Predicted timeline of one step", _in_words(found), *parts, end, height=height
    )


def _stage_row(bar: Bar, top: int, whole_seconds: float) -> Markup:
    value = f"{time_text(bar.seconds)}, {share_text(bar.share)}"
    place = {"y": top + BAR_TOP, "height": STAGE_BAR, "rx": 2}
    return labelled_row(
        bar.stage,
        value,
        element("rect", class_="track", x=0, width="100%", **place),
        element(
            "rect",
            class_=f"bar {bar.lane}",
            x=percent(bar.start_seconds / whole_seconds),
            width=percent(bar.seconds / whole_seconds),
            **place,
        ),
        top=top,
        title=f"{bar.stage}: {value}; {bar.words}",
    )


def _in_words(found: Timeline) -> str:
    def listed(bars: Iterable[Bar]) -> str:
        return ", then ".join(f"{b.stage} {time_text(b.seconds)}" for b in bars)

    if found.inline:
        return f"One after the other: {listed(found.bars)}."
    ahead = listed(b for b in found.bars if b.lane == "loader")
    mine = listed(b for b in found.bars if b.lane == "training")
    return f"Ahead of the training thread: {ahead}. On the training thread: {mine}."


@dataclass(frozen=True, kw_only=True, slots=True)
class BarGroup:
    """Neighbouring ranks or memories of which a chart shows the same."""

    names: list[str]

    @property
    def name(self) -> str:
        """Return the names together.

        >>> BarGroup(names=["rank0", "rank1", "rank2"]).name
        'rank0 to rank2'
        """
        if len(self.names) <= 2:
            return " and ".join(self.names)
        return f"{self.names[0]} to {self.names[-1]}"


def _draw_stacked(
    name: str, value: str, pieces: Iterable[tuple[str, str, float]], *, top: int, height: int
) -> Markup:
    """Draw a bar of pieces, given as CSS class, title and share of the width."""
    place, parts, at = {"y": top + BAR_TOP, "height": height}, list[Markup](), 0.0
    for css_class, title, share in pieces:
        if share > 0:
            x, width = percent(at), percent(share)
            words = element("title", title)
            parts.append(element("rect", words, class_=css_class, x=x, width=width, **place))
        at += share
    track = element("rect", class_="track", x=0, width="100%", **place)
    return labelled_row(name, value, track, *parts, top=top)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a memory's content."""

    name: str
    size_bytes: int
    tone: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar(BarGroup):
    """Parts that fill each of some equal memories."""

    parts: list[Part]
    """Parts of the content, the largest first; they add up to `total_bytes`."""
    total_bytes: int
    capacity_bytes: int
    headroom_bytes: int

    @property
    def used_share(self) -> float:
        """Return the filled share of the capacity; above 1 where the parts do not fit."""
        return self.total_bytes / self.capacity_bytes if self.capacity_bytes > 0 else 1.0


def memory_bars(plan: Plan) -> list[MemoryBar]:
    """Return one bar for each run of memories that are filled equally."""
    uses = plan.prediction.memory_bytes
    tones = _tones(uses)
    bars: list[MemoryBar] = []
    before: MemoryUse | None = None
    for name in sorted(uses, key=by_number):
        use = uses[name]
        if before == use:
            bars[-1].names.append(name)
            continue
        before = use
        parts = [
            Part(name=part, size_bytes=size, tone=tones[part])
            for part, size in sorted(use.parts.items(), key=lambda item: (-item[1], item[0]))
        ]
        bars.append(
            MemoryBar(
                names=[name],
                parts=parts,
                total_bytes=use.total,
                capacity_bytes=use.capacity,
                headroom_bytes=use.headroom,
            )
        )
    return bars


def _tones(uses: dict[str, MemoryUse]) -> dict[str, int]:
    """Give each part one shade in all memories, the largest parts first."""
    largest: dict[str, int] = {}
    for use in uses.values():
        for part, size in use.parts.items():
            largest[part] = max(largest.get(part, 0), size)
    order = sorted(largest, key=lambda part: (-largest[part], part))
    return {part: 1 + i % TONES for i, part in enumerate(order)}


def draw_memory(bars: list[MemoryBar]) -> Markup:
    """Draw a bar per memory, whose full width is its capacity."""
    rows = [_memory_row(bar, i * MEMORY_ROW) for i, bar in enumerate(bars)]
    words = "; ".join(
        f"{bar.name}: {size_text(bar.total_bytes)} of {size_text(bar.capacity_bytes)}, "
        f"{size_text(bar.headroom_bytes)} free"
        for bar in bars
    )
    height = max(1, MEMORY_ROW * len(bars))
    return figure("memory", "Predicted peak memory", f"{words}.", *rows, height=height)


def _memory_row(bar: MemoryBar, top: int) -> Markup:
    whole = max(bar.capacity_bytes, bar.total_bytes, 1)
    used = f"{size_text(bar.total_bytes)} of {size_text(bar.capacity_bytes)}"
    pieces = (
        (f"tone{part.tone}", f"{part.name}: {size_text(part.size_bytes)}", part.size_bytes / whole)
        for part in bar.parts
    )
    value = f"{used} ({share_text(bar.used_share)})"
    return _draw_stacked(bar.name, value, pieces, top=top, height=MEMORY_BAR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One source's share of a device's rows."""

    source: str
    words: str
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows(BarGroup):
    """Sources that each of some equal ranks reads its rows from."""

    shares: list[Share]
    """Share of each source, the cheapest first, adding up to 1; empty where no rows are read."""
    own_rows: int
    """Number of rows that each keeps in its own memory."""


def device_rows(plan: Plan) -> list[DeviceRows]:
    """Return the predicted shares of each run of ranks that read equally."""
    own = plan.strategy.features.own_rows
    found: list[DeviceRows] = []
    for rank in range(plan.num_ranks):
        name = f"rank{rank}"
        rates = plan.prediction.hit_rates.get(name, {})
        order = sorted(rates, key=lambda s: (_place(s), s))
        shares = [
            Share(source=s, words=SOURCE_WORDS.get(s, s), share=rates[s])
            for s in order
            if rates[s] > 0
        ]
        kept = own[rank] if rank < len(own) else 0
        if found and (found[-1].shares, found[-1].own_rows) == (shares, kept):
            found[-1].names.append(name)
        else:
            found.append(DeviceRows(names=[name], shares=shares, own_rows=kept))
    return found


def _place(source: str) -> int:
    return SOURCE_ORDER.index(source) if source in SOURCE_ORDER else len(SOURCE_ORDER)


def draw_sources(devices: list[DeviceRows]) -> Markup:
    """Draw a bar per device, whose full width is all of its rows."""
    rows = [_source_row(device, i * SOURCE_ROW) for i, device in enumerate(devices)]
    shares = {
        d.name: ", ".join(f"{share_text(s.share)} {s.words}" for s in d.shares) for d in devices
    }
    words = "; ".join(f"{device}: {share or 'no rows'}" for device, share in shares.items())
    height = max(1, SOURCE_ROW * len(devices))
    title = "Predicted share of feature rows by source"
    return figure("sources", title, f"{words}.", *rows, height=height)


def _source_row(device: DeviceRows, top: int) -> Markup:
    pieces = (
        (f"source-{each.source}", f"{share_text(each.share)} {each.words}", each.share)
        for each in device.shares
    )
    value = ", ".join(f"{each.source} {share_text(each.share)}" for each in device.shares)
    return _draw_stacked(device.name, value, pieces, top=top, height=SOURCE_BAR)
