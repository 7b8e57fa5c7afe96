"""Write docs/published.md and docs/published.svg: published figures beside our predictions.

python -m tests.benchmarks.published --csv FILE --page
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gnnplan.planner.report.page import style
from gnnplan.planner.report.svg import element
from tests.benchmarks.published_cases import Case
from tests.benchmarks.published_csv import Found
from tests.benchmarks.published_score import Scored

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE = ROOT / "docs" / "published.md", ROOT / "docs" / "published.svg"
SIZE, PAD, FOOT = 460, 64, 46
"""Of one panel and its margins, in pixels."""
KINDS = ("cpu_loader", "uva", "gpu_cache", "full_graph", "disk")
KIND_WORDS = {
    "cpu_loader": "cores draw batches",
    "uva": "GPU draws from the host's memory",
    "gpu_cache": "rows cached on GPUs",
    "full_graph": "whole graph at once",
    "disk": "rows on disk",
    "count": "counts",
}
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#475569")
STYLES = (":root", "@media (prefers", "--", "svg ", ".size")


def _span(values: Sequence[float]) -> tuple[int, int]:
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def _tick(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"


def _panel(title: str, points: Sequence[tuple[float, float, str]], left: float) -> Markup:
    """Predicted against published, both axes in powers of ten, with lines of factor 1 and 2."""
    low, high = _span([x for a, b, _ in points for x in (a, b)])

    def at(value: float) -> float:
        return (math.log10(value) - low) / max(1, high - low) * SIZE

    def x(value: float) -> float:
        return left + at(value)

    def y(value: float) -> float:
        return PAD + SIZE - at(value)

    parts = [
        element("text", title, class_="size", x=left, y=PAD - 14),
        element("rect", x=left, y=PAD, width=SIZE, height=SIZE, fill="none", stroke="currentColor"),
    ]
    least, most = 10.0**low, 10.0**high
    for factor, dash in ((1.0, "0"), (2.0, "4 4"), (0.5, "4 4")):
        a, b = max(least, least / factor), min(most, most / factor)
        parts.append(
            element("line", x1=x(a), y1=y(a * factor), x2=x(b), y2=y(b * factor),
                    stroke="currentColor", stroke_dasharray=dash, opacity=0.5)
        )  # fmt: skip
    for power in range(low, high + 1):
        mark = 10.0**power
        parts.append(
            element("text", _tick(power), class_="size", x=x(mark), y=PAD + SIZE + 18,
                    text_anchor="middle")
        )  # fmt: skip
        parts.append(
            element("text", _tick(power), class_="size", x=left - 8, y=y(mark) + 4,
                    text_anchor="end")
        )  # fmt: skip
    for published, predicted, kind in points:
        colour = COLOURS[list(KIND_WORDS).index(kind)]
        parts.append(
            element("circle", cx=round(x(published), 1), cy=round(y(predicted), 1), r=3.2,
                    fill=colour, opacity=0.65)
        )  # fmt: skip
    parts.append(
        element("text", "published", class_="size", x=left + SIZE / 2, y=PAD + SIZE + 38,
                text_anchor="middle")
    )  # fmt: skip
    return Markup("").join(parts)


def draw(found: Found) -> str:
    """Two panels: seconds with their paper left out, and counts."""
    kinds = {row.priced.case.row.id: row.kind for row in found.timed}
    times = [(x.published * x.case.asked.scale, x.value * x.case.asked.scale, kinds[x.case.row.id])
             for x in found.scored if x.case.asked.kind == "time"]  # fmt: skip
    counts = [(x.published, x.value, "count") for x in found.scored
              if x.is_count and x.published > 0 < x.value]  # fmt: skip
    panels = [(title, points) for title, points in (
        ("seconds predicted, each paper left out", times), ("counts predicted", counts),
    ) if points]  # fmt: skip
    width = PAD + len(panels) * (SIZE + PAD + 20)
    height = PAD + SIZE + FOOT + 26
    css = "\n".join(line for line in style().splitlines() if line.startswith(STYLES))
    drawn = [_panel(title, points, PAD + i * (SIZE + PAD + 20))
             for i, (title, points) in enumerate(panels)]  # fmt: skip
    for i, words in enumerate(KIND_WORDS.values()):
        across = PAD + i * (width - PAD) / len(KIND_WORDS)
        drawn.append(element("circle", cx=across, cy=height - 12, r=4, fill=COLOURS[i]))
        drawn.append(element("text", words, class_="size", x=across + 9, y=height - 8))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="predicted against published figures">\n<style>{css}</style>\n'
        f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>\n'
        f"{Markup('').join(drawn)}\n</svg>\n"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


HEAD = """\
# Published figures, predicted

`python -m tests.benchmarks.published --json --csv FILE` predicts every figure of a file of
published ones: the machine is a preset, the graph a law, the framework a model of how it samples
and moves rows, with one overhead for each framework. Nothing was run for this page. Each paper's
times are predicted with that paper left out whole; counts have no overhead at all, and those that a
graph's law was fitted to are not in the shares. Lines in the picture: equality, a factor of two.

![predicted against published figures](published.svg)

"""


def _summary(lines: Sequence[dict[str, Any]]) -> str:
    """The summaries as a table."""
    shown = [line for line in lines if str(line["name"]).startswith("csv_")]
    rows = [
        f"| {str(x['name'])[4:].replace('_', ' ')} | {_number(x['value'])} {x['unit']} | "
        f"{_number(x['baseline']) if x['baseline'] is not None else '-'} |"
        for x in shown
    ]
    return "| | found | of, or wanted |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _line(case: Case, each: Scored | None, reason: str) -> str:
    row = case.row
    unit = row.unit if row.unit not in ("share",) else ""
    printed = f"{_number(row.value)} {unit}".strip()
    if each is None:
        return f"| {row.id} | {row.quantity} | {printed} | - | {reason} |"
    ratio = f"{each.value / row.value:.2f}" if row.value else "-"
    ours = f"{_number(each.value)} ({_number(each.low)} to {_number(each.high)})"
    return f"| {row.id} | {row.quantity} | {printed} | {ours} | {ratio} |"


def write(cases: Sequence[Case], found: Found, lines: Sequence[dict[str, Any]]) -> None:
    """Write the page and its picture."""
    by_id = {each.case.row.id: each for each in found.scored}
    sources: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        sources[case.row.source.split(" (")[0]].append(case)
    text = [HEAD, _summary(lines)]
    for source, mine in sources.items():
        text.append(f"\n## {source}\n\n| figure | what | published | predicted (90%) | ratio |\n"
                    "|---|---|---|---|---|\n")  # fmt: skip
        text += [_line(c, by_id.get(c.row.id), found.reasons.get(c.row.id, "")) + "\n"
                 for c in mine]  # fmt: skip
    PAGE.write_text("".join(text))
    PICTURE.write_text(draw(found))
