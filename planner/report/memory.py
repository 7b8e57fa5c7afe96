"""Memory bars: what fills each device and host, and what stays free."""

from dataclasses import dataclass

from markupsafe import Markup

from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.report.svg import element, figure, percent
from gnnplan.planner.report.words import share_text
from gnnplan.planner.units import by_number
from gnnplan.runtime.plan.schema import MemoryUse, Plan

ROW = 44
BAR = 16
TONES = 6
"""Shades that parts of a bar take in turn; the table names each part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing in a memory."""

    name: str
    size_bytes: int
    tone: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar:
    """One memory, or several that are filled alike."""

    names: list[str]
    parts: list[Part]
    """Largest first; together `total_bytes`."""
    total_bytes: int
    capacity_bytes: int
    headroom_bytes: int

    @property
    def name(self) -> str:
        """The names together.

        >>> bar = MemoryBar(
        ...     names=["rank0", "rank1", "rank2"], parts=[], total_bytes=0, capacity_bytes=1,
        ...     headroom_bytes=1)
        >>> bar.name
        'rank0 to rank2'
        """
        if len(self.names) <= 2:
            return " and ".join(self.names)
        return f"{self.names[0]} to {self.names[-1]}"

    @property
    def used_share(self) -> float:
        """Of the capacity; more than 1 where it does not fit."""
        return self.total_bytes / self.capacity_bytes if self.capacity_bytes > 0 else 1.0


def memory_bars(plan: Plan) -> list[MemoryBar]:
    """A bar per memory; neighbours filled alike share one."""
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
    """The same shade for the same part everywhere, the largest parts first."""
    largest: dict[str, int] = {}
    for use in uses.values():
        for part, size in use.parts.items():
            largest[part] = max(largest.get(part, 0), size)
    order = sorted(largest, key=lambda part: (-largest[part], part))
    return {part: 1 + i % TONES for i, part in enumerate(order)}


def draw_memory(bars: list[MemoryBar], *, name: str = "memory") -> Markup:
    """A bar per memory, as long as its capacity."""
    rows = [_row(bar, i * ROW) for i, bar in enumerate(bars)]
    words = "; ".join(
        f"{bar.name}: {size_text(bar.total_bytes)} of {size_text(bar.capacity_bytes)}, "
        f"{size_text(bar.headroom_bytes)} free"
        for bar in bars
    )
    return figure(name, "Predicted peak memory", words + ".", *rows, height=max(1, ROW * len(bars)))


def _row(bar: MemoryBar, top: int) -> Markup:
    whole = max(bar.capacity_bytes, bar.total_bytes, 1)
    value = (
        f"{size_text(bar.total_bytes)} of {size_text(bar.capacity_bytes)} "
        f"({share_text(bar.used_share)})"
    )
    pieces, at = list[Markup](), 0
    for part in bar.parts:
        if part.size_bytes > 0:
            pieces.append(
                element(
                    "rect",
                    element("title", f"{part.name}: {size_text(part.size_bytes)}"),
                    class_=f"tone{part.tone}",
                    x=percent(at / whole),
                    y=top + 20,
                    width=percent(part.size_bytes / whole),
                    height=BAR,
                )
            )
        at += part.size_bytes
    return element(
        "g",
        element("text", bar.name, class_="name", x=0, y=top + 14),
        element("text", value, class_="value", x="100%", y=top + 14, text_anchor="end"),
        element("rect", class_="track", x=0, y=top + 20, width="100%", height=BAR),
        *pieces,
    )
