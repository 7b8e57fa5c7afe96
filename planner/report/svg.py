"""Draw SVG by plain functions; every text and attribute is escaped here.

Charts use percentages across and pixels down, so they fill any width while words keep their size.
CSS classes give the colours, for light and dark pages.
"""

import re

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
) -> Markup:
    """Write a whole picture, with a title and a description for readers who cannot see it.

    Args:
        name: beginning of its ids, unique on the page: letters and hyphens.
        title: what it shows.
        description: what there is to see, in words.
        children: its elements.
        height: pixels.
        width: pixels; None: as wide as possible, with percentages across.
    """
    size: dict[str, Attribute] = {"height": height, "width": "100%" if width is None else width}
    if width is not None:
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
