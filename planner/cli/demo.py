"""`gnnplan demo`: the whole main job on a generated graph, in about two minutes on a laptop.

Generate, probe, plan, train, compare. Nothing is fitted to the graph that is predicted: the probe
calibrates on graphs of its own. At last two GPU machines are planned for without being here; the
output marks their numbers as predicted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnplan.planner.cli.common import JsonFlag, console, emit_json, print_text, progress_bar
from gnnplan.planner.cli.planning import print_explanation
from gnnplan.planner.cli.training import event_line, print_comparison
from gnnplan.planner.machine.model import save_machine
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import counted
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan, Workload

if TYPE_CHECKING:
    from gnnplan.planner.queries.compare import Comparison
    from gnnplan.runtime.graph.dataset import Graph

FOLDERS = ("graph", "plan", "elsewhere")
MACHINE_FILE = "machine.json"
FEATURES = 100
CLASSES = 16
DEMO_MACHINES = ("siton", "dgx-v100")
DEMO_SHARE = 0.2
"""Share of the rows that a GPU has room for in the second plan; Song and Jiang's buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetPlan:
    """Plan for a machine that is not here."""

    machine: str
    room: str
    """Words for what a GPU's memory was taken to hold."""
    plan_id: str
    summary: str
    step_seconds: float
    read: dict[str, float]
    """Share of the rows by place, mean over the GPUs."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """What `gnnplan demo --json` prints."""

    num_nodes: int
    num_edges: int
    plan_id: str
    comparison: "Comparison"
    losses: list[float]
    test_accuracy: float | None
    logistic_regression_accuracy: float
    elsewhere: list[PresetPlan]
    """Plans for presets; predicted, not run."""
    seconds: float


def register(parent: typer.Typer) -> None:
    """Add the verb to the top level."""
    parent.command("demo")(demo_command)


def demo_command(
    folder: Annotated[Path, typer.Option("--dir", help="Where graph and plan go.")] = Path("demo"),
    nodes: Annotated[int, typer.Option(help="Nodes of the generated graph.")] = 200_000,
    degree: Annotated[float, typer.Option(help="Mean stored in-degree.")] = 30.0,
    ranks: Annotated[int, typer.Option(help="Ranks to train on.")] = 2,
    epochs: Annotated[int, typer.Option(help="Epochs to train.")] = 3,
    as_json: JsonFlag = False,
) -> None:
    """Generate a graph, probe, plan, train, and hold the prediction against what was measured."""
    started = time.monotonic()
    screen = console(as_json)

    def say(text: str) -> None:
        screen.print(text, markup=False)

    refuse_other_content(folder)
    folder.mkdir(parents=True, exist_ok=True)

    say(f"1/6 generating a graph of {nodes:,} nodes")
    graph = demo_graph(folder / "graph", nodes, degree)
    say(f"    {graph.num_nodes:,} nodes, {graph.num_edges:,} stored edges")

    say("2/6 probing this machine (memory, disk, exchange, sampling)")
    from gnnplan.planner.probe.probe import probe

    with progress_bar("probe") as progress:
        machine = probe(quick=True, progress=progress)
    save_machine(machine, folder / MACHINE_FILE)

    say(f"3/6 planning for {counted(ranks, 'rank')}")
    from gnnplan.planner.pipeline import plan

    settings, place = demo_settings(ranks), folder / "plan"
    with progress_bar("plan") as progress:
        made = plan(folder / "graph", settings, machine=machine, out=place, progress=progress)
    if not as_json:
        print_explanation(place)

    say(f"4/6 training {counted(epochs, 'epoch')} on {counted(ranks, 'rank')}")
    from gnnplan.runtime.launch.launch import train

    def on_event(event: dict[str, object]) -> None:
        if line := event_line(event):
            say("    " + line)

    report = train(place, epochs=epochs, eval_every=epochs, progress=on_event)

    say("5/6 predicted against measured")
    from gnnplan.planner.queries.compare import compare
    from gnnplan.runtime.models.metrics import logistic_regression_accuracy

    comparison = compare(load_plan(place), report)
    baseline = logistic_regression_accuracy(graph)

    say("6/6 planning the same graph for GPUs that are not here")
    elsewhere = plan_elsewhere(folder / "graph", settings, folder / "elsewhere")
    result = DemoResult(
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        plan_id=made.plan_id,
        comparison=comparison,
        losses=[epoch.loss for epoch in report.epochs],
        test_accuracy=report.test_score,
        logistic_regression_accuracy=baseline,
        elsewhere=elsewhere,
        seconds=time.monotonic() - started,
    )
    if as_json:
        emit_json(result)
        return
    print_comparison(comparison)
    print_text(render_elsewhere(elsewhere))
    say(
        f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} over "
        f"{counted(epochs, 'epoch')}; "
        f"test accuracy {result.test_accuracy or 0.0:.1%}, logistic regression on the features "
        f"{baseline:.1%}; {result.seconds:.0f} s in all"
    )


def refuse_other_content(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier demo."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder for the demo, found a file")
    known = {*FOLDERS, MACHINE_FILE}
    others = sorted(p.name for p in folder.iterdir() if p.name not in known)
    if others:
        raise InputError(
            f"{folder}: expected an empty folder or an earlier demo, found {others[0]}; "
            "choose another with --dir"
        )


def demo_graph(folder: Path, nodes: int, degree: float) -> "Graph":
    """Generate the demo's graph, or open the same graph of an earlier demo."""
    from gnnplan.runtime.graph.dataset import open_graph
    from gnnplan.runtime.graph.generate import generate_sbm

    if folder.exists():
        graph = open_graph(folder)
        same_degree = abs(graph.num_edges / max(graph.num_nodes, 1) - degree) < 0.05 * degree
        sizes = (graph.num_nodes, graph.feature_dim, graph.num_classes)
        if sizes == (nodes, FEATURES, CLASSES) and same_degree:
            return graph
        raise InputError(
            f"{folder}: holds another graph ({graph.name}); remove it or choose another --dir"
        )
    with progress_bar("generate"):
        return generate_sbm(
            folder,
            num_nodes=nodes,
            degree=degree,
            feature_dim=FEATURES,
            num_classes=CLASSES,
            seed=1,
        )


def demo_settings(ranks: int) -> PlanSettings:
    """Return settings: two GraphSAGE layers of 128 columns, fan-outs 15,10, batch 1024."""
    return PlanSettings(
        workload=Workload(hidden=128, fanouts=[15, 10], batch_size=1024), devices=ranks
    )


def plan_elsewhere(
    graph: Path, settings: PlanSettings, out: Path, machines: Sequence[str] = DEMO_MACHINES
) -> list[PresetPlan]:
    """Plan a graph for presets, each with whole GPUs and with room for some of the rows.

    Plans are written to `out`, as `<machine>` and `<machine>-tight`.

    Raises:
        InputError: as `plan`.
    """
    from gnnplan.planner.pipeline import plan
    from gnnplan.planner.probe.presets import load_preset

    found: list[PresetPlan] = []
    for name in machines:
        machine = load_preset(name)
        whole = plan(graph, replace(settings, devices=None), machine=machine, out=out / name)
        found.append(_told(whole, "all of a GPU's memory"))
        every = replace(settings, devices=len(machine.gpus))
        tight = replace(every, device_memory_bytes=_budget(graph, every, name, out))
        made = plan(graph, tight, machine=machine, out=out / f"{name}-tight")
        found.append(_told(made, f"all GPUs, each with room for {DEMO_SHARE:.0%} of the rows"))
    return found


def _budget(graph: Path, settings: PlanSettings, name: str, out: Path) -> int:
    """Return the device memory that leaves room for `DEMO_SHARE` of the rows beside all else."""
    from gnnplan.planner.pipeline import plan
    from gnnplan.planner.probe.presets import load_preset

    bare = plan(
        graph,
        replace(settings, policy="none"),
        machine=load_preset(name),
        out=out / f"{name}-tight",
    )
    uses = [u for k, u in bare.prediction.memory_bytes.items() if k.startswith("rank")]
    fixed = max(u.total - u.parts["reserve"] for u in uses)
    share = max(u.parts["reserve"] / u.capacity for u in uses)
    rows = round(DEMO_SHARE * bare.graph.num_nodes) * bare.strategy.features.row_bytes
    return int((fixed + rows) / (1 - share)) + 1


def _told(made: Plan, room: str) -> PresetPlan:
    from gnnplan.planner.queries.explain import explain

    told = explain(made)
    rates = list(made.prediction.hit_rates.values())
    read = {
        place: sum(r.get(place, 0.0) for r in rates) / len(rates)
        for place in ("own", "peer", "host", "disk")
    }
    other = told.runner_up
    why = f"bound by {told.bottleneck}; within {told.gap:.1%} of the bound"
    if other is not None:
        why += f"; next: {other.name}, {other.why}"
    return PresetPlan(
        machine=made.machine.name,
        room=room,
        plan_id=made.plan_id,
        summary=told.summary,
        step_seconds=told.step_seconds,
        read={place: share for place, share in read.items() if share > 0},
        why=why,
    )


def render_elsewhere(plans: Sequence[PresetPlan]) -> str:
    """Write four lines for each plan, marked as predicted."""
    from gnnplan.planner.units import seconds_text

    lines = ["predicted from presets; nothing of this was measured on such machines:"]
    for each in plans:
        places = ", ".join(f"{share:.1%} {place}" for place, share in each.read.items())
        lines += [
            f"  {each.machine}, {each.room}: step {seconds_text(each.step_seconds)} (predicted)",
            f"    {each.summary}",
            f"    rows read: {places}",
            f"    why: {each.why}",
        ]
    return "\n".join(lines)
