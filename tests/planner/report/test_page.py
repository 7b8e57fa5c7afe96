"""A plan's page: whole, safe whatever a name says, and its sums are the plan's."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gnnplan.planner.cost.link_use import link_rows
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.compare import StageComparison
from gnnplan.planner.queries.explain import explain, render
from gnnplan.planner.report.charts import device_rows, memory_bars, timeline
from gnnplan.planner.report.measured import off_text
from gnnplan.planner.report.page import choices, report_html, sections
from gnnplan.planner.report.svg import CurvePoint, draw_curve, smooth
from gnnplan.planner.report.topology import draw_topology, layout
from gnnplan.planner.report.words import STAGE_WORDS, rate_text
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import (
    Alternative,
    Device,
    Interval,
    MachineRef,
    MemoryUse,
    Plan,
    StepShapes,
    Threads,
)
from gnnplan.runtime.stages import Stage
from tests.support.plans import make_plan
from tests.support.reports import run_report

VOID = {"meta", "br", "img", "link", "hr", "input", "wbr"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>\x00\x0b&amp;{{7*7}}</title>'


class Page(HTMLParser):
    """Tags of a page, in balance; its text; its ids and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.words = list[str](), list[str](), list[str]()
        self.ids, self.addresses = list[str](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [
            v or "" for n, v in attrs if n in ("href", "src", "action", "xlink:href")
        ]
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def cpu_plan(small_graph: Graph, tmp_path: Path) -> Plan:
    """Two ranks, batches in line: 4 ms of loading, 6 ms of training, by hand."""
    plan = make_plan(small_graph, tmp_path / "plan", ranks=2, own_rows=100)
    stages = {"sample": 3e-3, "gather": 1e-3, "wait": 4e-3, "forward_backward": 5e-3}
    memory = MemoryUse(parts={"model": 30, "rows": 70}, total=100, capacity=400, headroom=300)
    prediction = replace(
        plan.prediction,
        step_seconds=Interval(value=10e-3, low=8e-3, high=12e-3),
        stages={**stages, "optimizer": 1e-3},
        hit_rates={"rank0": {"own": 0.25, "host": 0.75}, "rank1": {"own": 0.25, "host": 0.75}},
        memory_bytes={
            "rank0": memory,
            "rank1": memory,
            "host0": MemoryUse(parts={"ranks": 200}, total=200, capacity=400, headroom=200),
        },
        traffic_bytes={"memory0.read": 1.4e6},
        bottleneck="forward_backward",
        provenance={"sample": "measured: here"},
    )
    return replace(
        plan,
        prediction=prediction,
        machine=MachineRef(name="cpu-2core", fingerprint="f", calibration="c", provenance="preset"),
        shadow_prices={"memory0.read +10%": 1e-4, "host0 +1 GiB": 0.0},
        alternatives=[Alternative(name="1 rank", step_seconds=2e-2, why="twice as slow")],
    )


@pytest.fixture
def cpu_machine() -> MachineModel:
    return load_preset("cpu-2core")


def gpu_plan(plan: Plan, machine: MachineModel) -> Plan:
    devices = [
        Device(rank=i, kind="cuda", memory=gpu.memory, index=i)
        for i, gpu in enumerate(machine.gpus)
    ]
    return replace(
        plan, strategy=replace(plan.strategy, devices=devices, threads=Threads(sample=2))
    )


def test_every_stage_has_words():
    assert set(STAGE_WORDS) == set(Stage)


def test_the_page_parses_names_every_stage_and_asks_for_nothing_outside(
    cpu_plan: Plan, cpu_machine: MachineModel
):
    text = report_html(cpu_plan, cpu_machine)
    page = Page(text)
    words = " ".join(page.words)
    for name in cpu_plan.prediction.stages:
        if name != "wait":  # in line the loader's own stages are the wait
            assert name in words
    assert "twice as slow" in words
    assert "memory0.read 10% faster would save 100.0 \N{MICRO SIGN}s per step (1.0%)." in words
    assert len(page.ids) == len(set(page.ids))
    assert all(address.startswith("#") for address in page.addresses)
    assert {a[1:] for a in page.addresses} <= set(page.ids)
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(page.tags)
    # The only address is the name of SVG's own vocabulary, which nothing fetches.
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|src=", text)


@pytest.mark.parametrize("machine", ["siton", "dgx-v100", "hgx-h100", "perlmutter:2"])
def test_pictures_of_gpu_machines_are_xml_with_title_and_description(cpu_plan: Plan, machine: str):
    model = load_preset(machine)
    text = report_html(gpu_plan(cpu_plan, model), model)
    Page(text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    for picture in pictures:
        root = ET.fromstring(picture)
        if root.get("role") == "img":
            ids = (root.get("aria-labelledby") or "").split()
            assert [child.get("id") for child in root[:2]] == ids
            assert all(child.text for child in root[:2])
    (topology,) = [p for p in pictures if 'id="topology-title"' in p]
    for part in (*model.gpus, *model.switches):
        assert part.name in topology


def test_a_hostile_name_stays_text(cpu_plan: Plan, cpu_machine: MachineModel):
    plan = replace(
        cpu_plan,
        graph=replace(cpu_plan.graph, name=HOSTILE),
        machine=replace(cpu_plan.machine, name=HOSTILE),
        alternatives=[Alternative(name=HOSTILE, step_seconds=None, why=HOSTILE)],
        shadow_prices={f"{HOSTILE} +10%": 1.0},
        prediction=replace(
            cpu_plan.prediction,
            bottleneck=HOSTILE,
            stages={**cpu_plan.prediction.stages, HOSTILE: 1e-3},
            provenance={HOSTILE: HOSTILE},
            traffic_bytes={HOSTILE: 1.0},
            hit_rates={"rank0": {HOSTILE: 1.0}},
            memory_bytes={HOSTILE: MemoryUse(parts={HOSTILE: 1}, total=1, capacity=2, headroom=1)},
        ),
    )
    text = report_html(plan, replace(cpu_machine, name=HOSTILE, notes=[HOSTILE]))
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert "\x00" not in text
    assert "\x0b" not in text
    assert "{{7*7}}" in "".join(page.words)


def test_bars_and_tables_add_up(cpu_plan: Plan, cpu_machine: MachineModel):
    laid = timeline(cpu_plan)
    assert laid.inline
    assert sum(b.seconds for b in laid.bars) == pytest.approx(10e-3)
    assert [b.stage for b in laid.bars] == ["sample", "gather", "forward_backward", "optimizer"]
    assert [b.start_seconds for b in laid.bars] == pytest.approx([0, 3e-3, 4e-3, 9e-3])
    assert laid.other_seconds == pytest.approx(0.0)
    for bar in memory_bars(cpu_plan):
        assert sum(p.size_bytes for p in bar.parts) == bar.total_bytes
    assert [bar.name for bar in memory_bars(cpu_plan)] == ["host0", "rank0 and rank1"]
    (device,) = device_rows(cpu_plan)
    assert [s.source for s in device.shares] == ["own", "host"]
    assert sum(s.share for s in device.shares) == pytest.approx(1.0)
    # 1.4 MB at 14 GB/s take 0.1 ms of a step of 10 ms, by hand.
    (link,) = [x for x in link_rows(cpu_machine, cpu_plan) if x.name == "memory0.read"]
    assert link.load == pytest.approx(0.01)
    assert link.step_bytes == 1.4e6


def test_loader_threads_stand_beside_the_training_thread(cpu_plan: Plan):
    strategy = replace(cpu_plan.strategy, threads=Threads(sample=1))
    laid = timeline(replace(cpu_plan, strategy=strategy))
    training = [b for b in laid.bars if b.lane == "training"]
    assert [b.stage for b in training] == ["wait", "forward_backward", "optimizer"]
    assert [b.start_seconds for b in training] == pytest.approx([0, 4e-3, 9e-3])
    assert sum(b.seconds for b in training) == pytest.approx(laid.step_seconds)


def test_a_page_names_a_loader_where_the_plan_has_one(cpu_plan: Plan):
    def threads(plan: Plan) -> list[str]:
        laid = timeline(plan)
        return [laid.thread_of(bar) for bar in laid.bars]

    text = " ".join(Page(report_html(cpu_plan)).words).partition("The predicted step")[2]
    assert " loading on the training thread" in text
    assert not re.search(r"\bloader\b(?! threads? each)", text)  # "0 loader threads each"
    assert set(threads(cpu_plan)) == {"training"}
    strategy = replace(cpu_plan.strategy, threads=Threads(sample=1))
    ahead = replace(cpu_plan, strategy=strategy)
    assert threads(ahead) == ["loader"] * 2 + ["training"] * 3
    shapes = StepShapes(rows=[8, 8], edges=[8], drawn=True, ahead=1)
    drawn = replace(cpu_plan, strategy=replace(cpu_plan.strategy, shapes=shapes))
    assert threads(drawn) == ["the step's graph"] * 2 + ["training"] * 3


def test_one_of_a_thing_is_no_plural(cpu_plan: Plan):
    strategy = replace(cpu_plan.strategy, threads=Threads(sample=1), prefetch_depth=1)
    one = replace(cpu_plan.prediction, steps_per_epoch=1)
    plan = replace(cpu_plan, strategy=strategy, prediction=one)
    run = run_report(plan)
    run = replace(run, step_seconds=replace(run.step_seconds, count=1))
    text = " ".join(Page(report_html(plan, None, run)).words)
    for words in ("1 batch ahead", "median of 1 step)", "1 step;"):
        assert words in text
    told = render(explain(plan))
    assert "in 1 step, " in told
    assert "1 loader thread 1 batch ahead" in told
    assert not re.search(r"\b1 (batches|steps|epochs|ranks|threads|runs)\b", text + told)


def test_time_that_no_stage_explains_is_a_row_of_its_own(cpu_plan: Plan):
    longer = replace(cpu_plan.prediction, step_seconds=Interval(value=12e-3, low=0, high=1))
    plan = replace(cpu_plan, prediction=longer)
    assert timeline(plan).other_seconds == pytest.approx(2e-3)
    assert "own work between stages" in report_html(plan)
    assert "own work between stages" not in report_html(cpu_plan)


def test_a_full_graph_plan_has_a_page(cpu_plan: Plan):
    strategy = replace(cpu_plan.strategy, mode="full-graph")
    stages = {"forward_backward": 6e-3, "halo_exchange": 3e-3, "all_reduce": 1e-3}
    prediction = replace(cpu_plan.prediction, stages=stages, hit_rates={})
    text = report_html(replace(cpu_plan, strategy=strategy, prediction=prediction))
    Page(text)
    assert "halo_exchange" in text
    assert "Every step is an epoch" in text


def test_a_run_stands_beside_the_prediction(cpu_plan: Plan):
    told = sections(cpu_plan, None, run_report(cpu_plan))
    assert [name for name, _ in told["run"].stages] == ["step", "sample", "forward_backward"]
    assert {s.source: (s.predicted, s.measured) for s in told["run"].sources} == {
        "host": (0.75, 0.7),
        "own": (0.25, 0.3),
    }
    text = report_html(cpu_plan, None, run_report(cpu_plan))
    Page(text)
    assert "11.0 ms per step" in text
    assert "10.0 ms predicted" in text


def test_a_run_of_another_plan_is_refused_in_words(cpu_plan: Plan):
    other = replace(run_report(cpu_plan), plan_id="0" * 32)
    text = report_html(cpu_plan, None, other)
    Page(text)
    assert "expected a report of plan" in text


def test_the_plan_stands_among_its_alternatives_and_what_comes_to_the_same_is_folded(
    cpu_plan: Plan,
):
    def lost(name: str, seconds: float | None, why: str) -> Alternative:
        return Alternative(name=name, step_seconds=seconds, why=why)

    others = [
        lost("quick", 9.9e-3, "1.0% faster, which is within the noise"),
        lost("a", 2.001e-2, "slower by 50.0%"),
        lost("b", 2.002e-2, "slower by 50.1%"),
        lost("c", 2.001e-2, "another reason"),
        lost("d", 2.9e-2, "slower by 65%"),
        lost("e", None, "does not fit"),
        lost("f", None, "does not fit"),
    ]
    found = choices(replace(cpu_plan, alternatives=others))
    assert [(row.name, row.alike, row.chosen) for row in found if not row.chosen] == [
        ("quick", [], False),
        ("a", ["b"], False),
        ("c", [], False),
        ("d", [], False),
        ("e", [], False),
        ("f", [], False),
    ]
    assert [row.chosen for row in found].index(True) == 1  # 10 ms, by its time
    page = Page(report_html(replace(cpu_plan, alternatives=others)))
    text = " ".join(page.words)
    assert "this plan" in text
    assert "and 1 that comes to the same: b" in text


@pytest.mark.parametrize("tried", [False, True])
def test_a_page_does_not_say_that_nothing_was_run_where_something_was(cpu_plan: Plan, tried: bool):
    words = " ".join(Page(report_html(cpu_plan, tried=tried)).words)
    assert ("nothing of this plan has been run" in words) != tried
    measured = " ".join(Page(report_html(cpu_plan, None, run_report(cpu_plan), tried=tried)).words)
    assert "nothing of this plan has been run" not in measured
    assert "Measured by a run" in measured


def test_no_name_turns_the_text_around_it(cpu_plan: Plan):
    name = "a\N{RIGHT-TO-LEFT OVERRIDE}b\N{LEFT-TO-RIGHT ISOLATE}c\N{ARABIC LETTER MARK}"
    graph = replace(cpu_plan.graph, name=name)
    page = report_html(replace(cpu_plan, graph=graph))
    assert not set(name) & set(page) - set("abc")


def test_a_memory_is_told_in_the_units_that_it_is_sold_in():
    picture = str(sections_of("hgx-h100"))
    assert "80 GiB" in picture
    assert "85.9 GB" not in picture


def sections_of(preset: str) -> object:
    machine = load_preset(preset)
    return draw_topology(machine, link_rows(machine, None))


@pytest.mark.parametrize("preset", ["dgx-v100", "hgx-h100"])
def test_every_part_and_link_says_what_it_is_where_it_is_pointed_at(cpu_plan: Plan, preset: str):
    machine = load_preset(preset)
    plan = gpu_plan(cpu_plan, machine)
    link = next(x for x in machine.links if x.target == machine.gpus[0].memory)
    carried = 0.5 * link.bandwidth_bytes_per_second * plan.prediction.step_seconds.value
    traffic = replace(plan.prediction, traffic_bytes={link.name: carried})
    rows = link_rows(machine, replace(plan, prediction=traffic))
    root = ET.fromstring(str(draw_topology(machine, rows)))
    svg = "{http://www.w3.org/2000/svg}"
    groups = [g for g in root.iter(f"{svg}g") if g.get("class") == "hover"]
    boxes = [g for g in groups if g.find(f"{svg}rect") is not None]
    lines = [g for g in groups if g.find(f"{svg}path") is not None]
    assert len(boxes) == len(layout(machine).nodes)
    assert boxes + lines != []
    assert len(groups) == len(boxes) + len(lines)
    told = ["".join(g.findall(f"{svg}text")[-1].itertext()) for g in groups]
    assert all(told)
    assert all("/s" in text for text in told if " to " in text)
    (busy,) = [text for text in told if "load 50.0%" in text]
    assert rate_text(link.bandwidth_bytes_per_second) in busy
    assert "50% busy" in "".join(root.itertext())


def test_a_curve_has_every_value_and_its_mean_and_stays_text():
    points = [CurvePoint(x=i / 10, y=float(i % 7), words=f"{HOSTILE} {i}") for i in range(60)]
    root = ET.fromstring(
        str(draw_curve(points, name="c", title=HOSTILE, words=HOSTILE, weight=0.5))
    )
    svg = "{http://www.w3.org/2000/svg}"
    raw, mean = list(root.iter(f"{svg}polyline"))
    assert [len(line.attrib["points"].split()) for line in (raw, mean)] == [60, 60]
    for place in (raw.attrib["points"] + " " + mean.attrib["points"]).split():
        assert all(0 <= float(value) <= 1000 for value in place.split(","))
    tips = ["".join(text.itertext()) for text in root.iter(f"{svg}text") if
            text.get("class") == "tip"]  # fmt: skip
    means = smooth([point.y for point in points], 0.5)
    assert [float(tip.split("smoothed ")[1]) for tip in tips] == pytest.approx(means, rel=1e-3)
    assert not list(root.iter(f"{svg}script"))
    strips = [x for x in root.iter(f"{svg}rect") if x.get("class") == "strip"]
    assert sum(float(x.attrib["width"][:-1]) for x in strips) == pytest.approx(100, abs=0.1)


def test_a_curve_of_one_value_or_of_equal_ones_is_drawn():
    for count in (1, 2):
        same = [CurvePoint(x=3.0, y=5.0, words="it")] * count
        ET.fromstring(str(draw_curve(same, name="c", title="t", words="w")))


def test_a_prediction_that_is_off_is_told_with_its_sign():
    for predicted, words in ((12.0, "20.0% too long"), (8.0, "20.0% too short"),
                             (10.0, "as measured")):  # fmt: skip
        assert off_text(StageComparison(predicted=predicted, measured=10.0, ape=0.2)) == words
