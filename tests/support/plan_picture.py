"""README's picture of a plan and the answer beside it: `python -m tests.support.plan_picture`.

A graph is generated and planned for a preset, so every number is predicted. The picture
(docs/plan.svg) is made of the drawings of the page; the text is what `gnnplan explain` prints.
"""

import os
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from gnnplan.planner.cli.common import wrap_line
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.report.page import sections, style
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.schema import Plan, Workload

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "plan.svg"
README = ROOT / "README.md"
MARK = "<!-- answer -->\n\n```\n"
"""Stands before the fenced answer."""
MACHINE = "dgx-v100"
COMMAND = "python -m tests.support.plan_picture"
WIDTH, PAD = 1000, 24
LONGEST = 118
"""Characters of a line of the answer."""
STYLES = (":root", "@media (prefers", "--", "svg ", ".tone", ".source", ".link", ".part", ".clique")
"""Beginnings of the page's style sheet's lines that its drawings need."""
SHOWN = ("asked first",)
"""Sections of the explanation that README shows behind its head."""


def make_plan(folder: Path) -> Plan:
    """Plan a generated graph for the preset, with caches in a folder of its own."""
    os.environ["GNNPLAN_CACHE"] = str(folder / "cache")
    graph = generate_rmat(
        folder / "demo", num_nodes=200_000, degree=30.0, feature_dim=512, train_fraction=0.5
    )
    work = Workload(batch_size=8192, fanouts=[15, 10])
    settings = PlanSettings(workload=work)
    return plan(graph.path, settings, machine=load_preset(MACHINE), out=folder / "plan")


def answer(text: str) -> str:
    """The first lines of an explanation and the sections that README shows."""
    head, *others = text.rstrip("\n").split("\n\n")
    kept = [section for section in others if section.split("\n")[0] in SHOWN]
    lines = "\n".join([*head.split("\n")[:2], *kept]).split("\n")
    return "\n".join(part for line in lines for part in wrap_line(line, LONGEST))


def _still(picture: str) -> str:
    """A drawing without the words that are shown where it is pointed at."""
    return re.sub(r'<text class="(?:tip|size hint)".*?</text>', "", picture)


def draw(made: Plan) -> str:
    """The picture: what the machine's links carry, the step, and what fills the memories."""
    shown: dict[str, Any] = sections(made, load_preset(MACHINE), None)
    told, half = shown["told"], (WIDTH - 3 * PAD) / 2
    head = [("name", line) for line in textwrap.wrap(told.summary, 120)]
    head += [("value", f"{render(told).splitlines()[1]}; links in GB/s")]
    top = 12 + 22 * len(head)
    topology, height = _scaled(_still(str(shown["topology_picture"])), PAD, top, WIDTH - 2 * PAD)
    left, right, below = PAD, 2 * PAD + half, top + height + 20
    step, first = _placed(str(shown["timeline_picture"]), left, below, half)
    memory, second = _placed(str(shown["memory_picture"]), right, below, half)
    rows = below + second + 30
    sources, third = _placed(str(shown["sources_picture"]), right, rows, half)
    total = round(max(below + first, rows + third) + PAD)
    css = "\n".join(line for line in style().splitlines() if line.startswith(STYLES))
    words = "\n".join(
        f'<text class="{kind}" x="{PAD}" y="{28 + 22 * i}">{line}</text>'
        for i, (kind, line) in enumerate(head)
    ) + "".join(
        f'\n<text class="size" x="{x:g}" y="{y - 10:g}">{caption}</text>'
        for x, y, caption in (
            (left, below, "A STEP, STAGE BY STAGE"),
            (right, below, "WHAT FILLS THE MEMORY"),
            (right, rows, "WHERE ROWS ARE READ"),
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img" '
        f'aria-label="{told.summary}">\n<!-- {COMMAND} -->\n<style>{css}</style>\n'
        f'<rect width="{WIDTH}" height="{total}" style="fill:var(--paper)"/>\n'
        f"{words}\n{topology}\n{step}\n{memory}\n{sources}\n</svg>\n"
    )


def _scaled(picture: str, x: float, y: float, width: float) -> tuple[str, float]:
    """A picture with sizes of its own, put somewhere and made as wide; and its height then."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    assert box is not None
    height = width * float(box[2]) / float(box[1])
    inner = re.sub(r' (width|height)="[^"]*"', "", picture[: picture.index(">")])
    place = f' x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f"{inner}{place}{picture[picture.index('>') :]}", height


def _placed(picture: str, x: float, y: float, width: float) -> tuple[str, float]:
    """A chart that is as wide as there is room, put somewhere; and its height."""
    found = re.search(r'height="([\d.]+)"', picture)
    assert found is not None
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{found[1]}"'
    return f"<svg {place}>{picture}</svg>", float(found[1])


def make() -> tuple[str, str]:
    """The picture and the answer."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_plan(Path(folder))
        return draw(made), answer(render(explain(made)))


def committed() -> str:
    """The answer that README shows."""
    return README.read_text().partition(MARK)[2].partition("\n```")[0]


def main() -> None:
    """Write both."""
    picture, text = make()
    PICTURE.write_text(picture)
    before, _, rest = README.read_text().partition(MARK)
    README.write_text(f"{before}{MARK}{text}\n{rest[rest.index('```') :]}")


if __name__ == "__main__":
    main()
