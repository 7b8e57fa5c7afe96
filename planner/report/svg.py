"""Draw SVG by plain functions, rows of bars and curves too; every text and attribute is escaped.

Charts use percentages across and pixels down, so they fill any width while words keep their size.
CSS classes give the colours, for light and dark pages.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
"""Characters that XML forbids."""
TURNING = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Invisible characters that change the direction of text."""

Attribute = str | int | float


def plain(text: str) -> str:
    """Replace characters that XML forbids, or that change the direction of text.

    >>> plain("a" + chr(0) + "b")
    'a\N{REPLACEMENT CHARACTER}b'
    >>> plain("a" + chr(0x202E) + "b")
    'a\N{REPLACEMENT CHARACTER}b'
    """
    mark = "\N{REPLACEMENT CHARACTER}"
    return TURNING.sub(mark, FORBIDDEN.sub(mark, text))


def element(name: str, *children: str | Markup, **attributes: Attribute) -> Markup:
    """Write one element; children that are not markup are escaped.

    Attributes' names lose a trailing underscore; other underscores become hyphens.

    >>> element("text", "a < b", class_="name", text_anchor="end", x=1.50)
    Markup('<text class="name" text-anchor="end" x="1.5">a &lt; b</text>')
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number_text(value))}"'
        for key, value in attributes.items()
    )
    inside = "".join(
        str(escape(plain(child))) if _is_text(child) else str(child) for child in children
    )
    return Markup(f"<{name}{words}>{inside}</{name}>")


def figure(
    name: str,
    title: str,
    description: str,
    *children: str | Markup,
    height: float,
    width: float | None = None,
    scale: float = 1.0,
) -> Markup:
    """Write a whole picture, with a title and a description for readers who cannot see it.

    Args:
        name: beginning of its ids, unique on the page: letters and hyphens.
        title: what it shows.
        description: what there is to see, in words.
        children: its elements.
        height: pixels.
        width: pixels; None: as wide as possible, with percentages across.
        scale: how much larger than its width and height it is drawn, where there is room.
    """
    size: dict[str, Attribute] = {"height": height, "width": "100%"}
    if width is not None:
        size = {"height": height * scale, "width": width * scale}
        size["viewBox"] = f"0 0 {_number_text(width)} {_number_text(height)}"
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *children,
        class_="chart" if width is None else "picture",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        xmlns="http://www.w3.org/2000/svg",
        **size,
    )


def labelled_row(name: str, value: str, *bars: Markup, top: int, title: str = "") -> Markup:
    """Draw a row of a bar chart: a line with a name and a value, above some bars."""
    return element(
        "g",
        *([element("title", title)] if title else []),
        element("text", name, class_="name", x=0, y=top + 14),
        element("text", value, class_="value", x="100%", y=top + 14, text_anchor="end"),
        *bars,
    )


def percent(share: float) -> str:
    """Write a share as SVG and CSS do.

    >>> percent(0.12345)
    '12.345%'
    """
    return f"{_number_text(round(100 * share, 3))}%"


def _is_text(child: str | Markup) -> bool:
    return not isinstance(child, Markup)


def _number_text(value: Attribute) -> str:
    if isinstance(value, str):
        return plain(value)
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


CURVE_HEIGHT, CURVE_TOP, CURVE_FOOT = 240, 16, 24
"""Heights in pixels of a curve's picture, of the room above it, and of the axis below."""
CURVE_UNITS = 1000
"""Width and height of the plane in which a curve's points are given."""
MOST_TICKS = 5
FEW_POINTS = 40
"""Points up to which each has a mark of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """One measured value, and what is said of it where it is pointed at."""

    x: float
    y: float
    words: str


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential mean of values, without the bias of its beginning.

    Args:
        values: in order.
        weight: share of the mean before that each mean keeps, 0 for none, below 1.

    Source: Kingma and Ba, ICLR 2015, section 3 (bias correction).

    >>> smooth([1.0, 3.0], 0.5), smooth([1.0, 3.0], 0.0)
    ([1.0, 2.3333333333333335], [1.0, 3.0])
    """
    found, mean, weights = list[float](), 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        weights = weight * weights + (1 - weight)
        found.append(mean / weights)
    return found


def ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers from `low` to `high`.

    >>> ticks(0.0, 1.0), ticks(7.0, 7.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [7.0])
    """
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / MOST_TICKS))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= MOST_TICKS)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def draw_curve(
    points: Sequence[CurvePoint], *, name: str, title: str, words: str, weight: float = 0.0
) -> Markup:
    """Draw values over epochs, smoothed where a weight is given, with what each point says.

    Args:
        points: at least one, in order of x.
        name: beginning of the picture's ids.
        title: what is drawn.
        words: the picture in words.
        weight: as of `smooth`; the values themselves stay as a pale line behind their mean.
    """
    low, high = min(p.y for p in points), max(p.y for p in points)
    spare = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - spare, high + spare
    first, last = points[0].x, points[-1].x
    across = [
        (p.x - first) / (last - first) if last > first else i / max(1, len(points) - 1)
        for i, p in enumerate(points)
    ]
    tall = CURVE_HEIGHT - CURVE_TOP - CURVE_FOOT

    def down(value: float) -> float:
        return (high - value) / (high - low)

    means = smooth([p.y for p in points], weight)
    lines = [("curve", means)] if not weight else [("curve raw", [p.y for p in points])]
    lines += [("curve", means)] if weight else []
    plane = element(
        "svg",
        *(_curve_line(kind, across, [down(y) for y in values]) for kind, values in lines),
        y=CURVE_TOP,
        width="100%",
        height=tall,
        viewBox=f"0 0 {CURVE_UNITS} {CURVE_UNITS}",
        preserveAspectRatio="none",
        overflow="visible",
    )
    marks = [
        element("circle", class_="point", cx=percent(x), cy=CURVE_TOP + tall * down(y), r=3)
        for x, y in zip(across, means if len(points) <= FEW_POINTS else [], strict=False)
    ]
    return figure(
        name,
        title,
        words,
        *_curve_grid(low, high, tall),
        *_curve_foot(first, last),
        plane,
        *marks,
        *_curve_tips(points, across, means if weight else [], tall),
        height=CURVE_HEIGHT,
    )


def _curve_line(kind: str, across: list[float], down: list[float]) -> Markup:
    places = zip(across, down, strict=True)
    text = " ".join(f"{CURVE_UNITS * x:.1f},{CURVE_UNITS * y:.1f}" for x, y in places)
    return element("polyline", class_=kind, points=text, vector_effect="non-scaling-stroke")


def _curve_grid(low: float, high: float, tall: int) -> list[Markup]:
    parts: list[Markup] = []
    for value in ticks(low, high):
        y = CURVE_TOP + tall * (high - value) / (high - low)
        parts.append(element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))
        parts.append(element("text", f"{value:g}", class_="axis", x=0, y=y - 4))
    return parts


def _curve_foot(first: float, last: float) -> list[Markup]:
    parts: list[Markup] = []
    for value in ticks(first, last):
        share = (value - first) / (last - first) if last > first else 0.0
        anchor = "start" if share < 0.05 else "end" if share > 0.95 else "middle"
        text = f"epoch {value:g}" if not parts else f"{value:g}"
        place = {"x": percent(share), "y": CURVE_HEIGHT - 6, "text_anchor": anchor}
        parts.append(element("text", text, class_="axis", **place))
    return parts


def _curve_tips(
    points: Sequence[CurvePoint], across: list[float], means: list[float], tall: int
) -> list[Markup]:
    """Draw a strip over each point that shows what the point says while it is pointed at."""
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(across)), 1.0]
    parts: list[Markup] = []
    for i, point in enumerate(points):
        text = point.words + (f", smoothed {means[i]:.4g}" if means else "")
        parts.append(
            element(
                "g",
                element(
                    "rect",
                    class_="strip",
                    x=percent(edges[i]),
                    width=percent(max(edges[i + 1] - edges[i], 0.0)),
                    y=CURVE_TOP,
                    height=tall,
                ),
                element("text", text, class_="tip", x="100%", y=CURVE_TOP - 4, text_anchor="end"),
                class_="hover",
            )
        )
    return parts
