"""A step over padded shapes trains what the step over a batch's own shapes does."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.emulation.gpu import EmulatedGpu
from gnnplan.runtime.emulation.memory import OrderError
from gnnplan.runtime.emulation.threads import start, stop
from gnnplan.runtime.errors import GnnplanError, PlanError
from gnnplan.runtime.graph.dataset import Graph, is_typed, types_of
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import STEP, StageMeter
from gnnplan.runtime.models.adjacency import device_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import Plan, StepShapes
from gnnplan.runtime.processor import EMULATED
from gnnplan.runtime.sampling.gpu.padded import PaddedBatch, PaddedDraws
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.captured import CapturedLoop
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
from gnnplan.runtime.train.precision import Precision
from tests.support.emulated_ranks import make_graph
from tests.support.plans import make_plan, with_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")

SEEDS, FANOUTS, HIDDEN = 12, [3, 2], 8
ROOMY = StepShapes(rows=[16, 64, 121], edges=[40, 140], drawn=True)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate_sbm(
        tmp_path_factory.mktemp("captured") / "graph", num_nodes=120, degree=6.0, feature_dim=6,
        num_classes=3, seed=3, train_fraction=0.35,
    )  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    started = EmulatedGpu()
    start(started)
    yield started
    stop()


Batches = Callable[..., tuple[Plan, list[MiniBatch]]]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Batches:
    """An epoch's batches of a model, drawn by the host."""

    def draw(graph: Graph, model: str, **work: Any) -> tuple[Plan, list[MiniBatch]]:
        folder = tmp_path_factory.mktemp("plan")
        plan = make_plan(
            graph, folder, model=model, fanouts=FANOUTS, batch_size=SEEDS, hidden=HIDDEN, **work
        )
        loader = PlannedLoader(folder, graph)
        found = list(loader.batches(4))
        loader.close()
        return plan, found

    return draw


def moved(batch: MiniBatch) -> MiniBatch:
    """A copy of a batch, on the emulated GPU."""
    return replace(
        batch, x=batch.x.to(EMULATED), y=batch.y.to(EMULATED),
        device_blocks=device_blocks(batch, EMULATED),
    )  # fmt: skip


def loop_of(plan: Plan, graph: Graph, shapes: StepShapes, every: int = 3) -> CapturedLoop:
    types = types_of(graph) if is_typed(plan.workload) else None
    model = build_model(
        plan.workload, graph.feature_dim, graph.num_classes, str(graph.task), types=types
    ).to(EMULATED)
    loop = TrainLoop(
        model=model, optimizer=make_optimizer(model, learning_rate=0.01, weight_decay=1e-3),
        gradients=GradientBuffer(model, flagged=True), comm=Communicator(), meter=StageMeter(),
        task=str(graph.task), seed=plan.workload.seed,
        precision=Precision(plan.workload.precision),
    )  # fmt: skip
    device = replace(plan.strategy.devices[0], kind="cuda", emulated=True)
    strategy = replace(plan.strategy, step="captured", shapes=shapes, devices=[device])
    return replace(CapturedLoop.of(loop, replace(plan, strategy=strategy)), every=every)


def parameters(loop: TrainLoop) -> list[torch.Tensor]:
    return [each.detach().cpu() for each in loop.model.parameters()]


def eager(loop: CapturedLoop, drawn: list[MiniBatch]) -> list[float]:
    loop.model.train()
    return [loop.step(moved(batch), index) for index, batch in enumerate(drawn)]


def replayed(loop: CapturedLoop, drawn: list[MiniBatch]) -> tuple[list[float], list[float]]:
    told: list[float] = []
    return loop.run(map(moved, drawn), 0, told.append), told


def waits_of(loop: CapturedLoop, patch: pytest.MonkeyPatch) -> list[str]:
    """Operations of a replayed step, its update apart, that make the host wait for the device."""
    found: list[str] = []
    wait = EmulatedGpu.wait_for_lane

    def watched(self: EmulatedGpu) -> None:
        found.append(repr(inspect.stack()[1].frame.f_locals.get("func")))
        wait(self)

    patch.setattr(EmulatedGpu, "wait_for_lane", watched)
    patch.setattr(loop.optimizer, "step", lambda: None)
    loop._steps()
    return found


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("sage", {}),
    ("sage", {"dropout": 0.4}),
    ("sage", {"dialect": "every_hop"}),
    ("gcn", {"dropout": 0.4}),
    ("gat", {"heads": 2, "dropout": 0.4}),
]


@pytest.mark.parametrize(("model", "work"), MODELS)
def test_padded_steps_train_what_eager_ones_do(
    model: str, work: dict[str, Any], graph: Graph, batches: Batches, gpu: EmulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan, drawn = batches(graph, model, **work)
    plain, padded = (loop_of(plan, graph, ROOMY) for _ in range(2))
    first = parameters(plain)
    expected = eager(plain, drawn)
    found, told = replayed(padded, drawn)
    assert padded.overflowed == 0
    assert told == found
    # Sums over more rows may be taken in another order: the last bits, and no more.
    assert found == pytest.approx(expected, rel=1e-6)
    for mine, theirs, before in zip(parameters(padded), parameters(plain), first, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert not torch.equal(mine, before)
    steps = len(drawn)
    assert len(padded.meter.seconds(STEP)) == len(padded.meter.seconds(Stage.WAIT)) == steps
    assert waits_of(padded, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["links", "typed"])
def test_links_and_typed_graphs_are_padded_too(
    kind: str, batches: Batches, gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop()  # graphs and batches are the host's
    typed = kind == "typed"
    graph = make_graph(tmp_path / "graph", kind)
    work: dict[str, Any] = {"model": "rgcn"} if typed else {"model": "sage"}
    plan, drawn = batches(graph, **work, dropout=0.4)
    start(gpu)
    shapes = StepShapes(rows=[64, 200, 241], edges=[200, 600])
    plain, padded = (loop_of(plan, graph, shapes) for _ in range(2))
    expected, (found, _) = eager(plain, drawn), replayed(padded, drawn)
    assert padded.overflowed == 0
    assert found == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(parameters(padded), parameters(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert waits_of(padded, monkeypatch) == []


def test_a_batch_that_does_not_fit_is_taken_eagerly_in_its_place(
    graph: Graph, batches: Batches, gpu: EmulatedGpu
) -> None:
    plan, drawn = batches(graph, "sage", dropout=0.4)
    sizes = sorted(batch.n_id.shape[0] for batch in drawn)
    tight = replace(ROOMY, rows=[16, 64, sizes[-1]])  # one row is padding's
    plain, padded = loop_of(plan, graph, ROOMY), loop_of(plan, graph, tight)
    expected, (found, told) = eager(plain, drawn), replayed(padded, drawn)
    assert padded.overflowed == sizes.count(sizes[-1])
    assert told == found == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(parameters(padded), parameters(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert len(padded.meter.seconds(STEP)) == len(drawn)


def test_updates_behind_an_overflow_wait_for_the_host(
    graph: Graph, batches: Batches, gpu: EmulatedGpu
) -> None:
    """A rank that learns of another's overflow late leaves no trace of the steps between."""
    plan, drawn = batches(graph, "sage")
    plain, padded = loop_of(plan, graph, ROOMY), loop_of(plan, graph, ROOMY, every=len(drawn))
    padded.comm.size = 2  # the window keeps its batches; what is summed is one rank's
    overflows = iter([0.0, 1.0, *[0.0] * 2 * len(drawn)])

    def summed(flat: torch.Tensor) -> torch.Tensor:
        flat[-2] = next(overflows)
        return flat

    padded.comm.all_reduce_sum = summed  # pyright: ignore[reportAttributeAccessIssue]
    expected, (found, _) = eager(plain, drawn), replayed(padded, drawn)
    assert padded.overflowed == 1
    assert found == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(parameters(padded), parameters(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_not_finite_names_its_step(
    graph: Graph, batches: Batches, gpu: EmulatedGpu
) -> None:
    plan, drawn = batches(graph, "sage")
    drawn[1].x[:] = float("nan")
    with pytest.raises(GnnplanError, match="epoch 0 step 1: the loss is nan"):
        replayed(loop_of(plan, graph, ROOMY), drawn)


def test_what_cannot_be_captured_is_refused_with_the_reason(
    graph: Graph, batches: Batches, gpu: EmulatedGpu
) -> None:
    plan, _ = batches(graph, "sage")
    loop = loop_of(plan, graph, ROOMY)
    with pytest.raises(PlanError, match=r"on GPUs alone.*--step eager"):
        CapturedLoop.of(loop, plan)
    device = replace(plan.strategy.devices[0], kind="cuda")
    strategy = replace(plan.strategy, devices=[device])
    with pytest.raises(PlanError, match="no shapes"):
        CapturedLoop.of(loop, replace(plan, strategy=strategy))
    work = replace(plan.workload, precision="float16")
    with pytest.raises(PlanError, match="float16"):
        CapturedLoop.of(loop, replace(plan, strategy=strategy, workload=work))


def drawing_loader(
    graph: Graph, folder: Path, shapes: StepShapes, *, comm: Communicator | None = None, **work: Any
) -> PlannedLoader:
    """A loader under a plan of captured steps, which the device draws where it can."""
    made = make_plan(graph, folder, fanouts=FANOUTS, batch_size=SEEDS, hidden=HIDDEN, **work)
    arrays = {name: np.load(folder / ref.file) for name, ref in made.arrays.items()}
    device = replace(made.strategy.devices[0], kind="cuda", emulated=True)
    strategy = replace(made.strategy, step="captured", shapes=shapes, devices=[device])
    save_plan(replace(made, strategy=strategy), arrays, folder)
    loader = PlannedLoader(folder, graph, device=EMULATED, row_dtype=None, comm=comm)
    loader.draw_padded()
    return loader


def trains_alike(
    loops: tuple[CapturedLoop, CapturedLoop], loader: PlannedLoader, drawn: list[MiniBatch],
    tolerance: float = 1e-6,
) -> CapturedLoop:  # fmt: skip
    """Train one loop on the host's batches and one on the device's; return the latter."""
    plain, padded = loops
    padded = replace(padded, meter=loader.meter)
    expected = eager(plain, drawn)
    found = padded.run(loader.batches(len(drawn)), 0, lambda _: None)
    assert padded._inputs is not None
    assert padded._inputs.draws is not None
    assert found == pytest.approx(expected, rel=tolerance)
    for mine, theirs in zip(parameters(padded), parameters(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=10 * tolerance, atol=tolerance)
    return padded


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "tight"),
    [
        ("sage", True),
        ("gcn", False),
        pytest.param("gcn", True, marks=SLOW),
        pytest.param("sage", False, marks=SLOW),
        pytest.param("gat", False, marks=SLOW),
        pytest.param("gat", True, marks=SLOW),
    ],
)
def test_steps_draw_their_batches_on_the_device(
    model: str, tight: bool, graph: Graph, batches: Batches, gpu: EmulatedGpu, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    work: dict[str, Any] = {"dropout": 0.4} | ({"heads": 2} if model == "gat" else {})
    host, drawn = batches(graph, model, **work)
    drawn = drawn[:2]
    sizes = [batch.n_id.shape[0] for batch in drawn]
    shapes = replace(ROOMY, rows=[16, 56, max(sizes) if tight else 121])
    loops = loop_of(host, graph, shapes), loop_of(host, graph, shapes)
    loader = drawing_loader(graph, tmp_path, shapes, model=model, **work)
    padded = trains_alike(loops, loader, drawn)
    assert padded._inputs is not None
    assert padded.overflowed == (sizes.count(max(sizes)) if tight else 0)
    rows = sum(loader.meter.totals()[0].values())
    assert rows >= sum(sizes)
    if not tight:
        assert rows == sum(sizes)
        padded._inputs.draws.begin_epoch(0)
        assert waits_of(padded, monkeypatch) == []
    loader.close()


def drawn_loop(
    graph: Graph, folder: Path, shapes: StepShapes, **work: Any
) -> tuple[PlannedLoader, CapturedLoop]:
    """A loader whose batches the steps of a loop draw."""
    loader = drawing_loader(graph, folder, shapes, **work)
    return loader, replace(loop_of(loader.plan, graph, shapes), meter=loader.meter)


@pytest.mark.slow
def test_steps_gather_rows_of_bfloat16_into_what_the_first_product_reads(
    graph: Graph, gpu: EmulatedGpu, tmp_path: Path
) -> None:
    """Their losses are those of the rows in float32, rounded: to the order of bfloat16 sums."""
    half = convert_rows(np.array(graph.x), BFLOAT16)
    found: list[list[float]] = []
    for x, dtype in (
        (half, torch.bfloat16), (convert_rows(half, np.dtype(np.float32)), torch.float32),
    ):  # fmt: skip
        folder = tmp_path / str(dtype)
        stored = with_rows(graph, folder / "graph", x)
        loader, loop = drawn_loop(stored, folder / "plan", ROOMY, precision="bfloat16")
        found.append(loop.run(loader.batches(2), 0, lambda _: None))
        assert loop._inputs is not None
        assert loop._inputs.x.dtype == dtype
        assert loop._inputs.draws is not None
        loader.close()
    assert found[0] == pytest.approx(found[1], rel=2.0**-7)


def train_in_parts(
    loader: PlannedLoader, loop: CapturedLoop, parts: tuple[int | None, ...]
) -> list[float]:
    """Losses of iterations of so many steps; an epoch has four, the last one short."""
    losses: list[float] = []
    for most in parts:
        losses += loop.run(loader.batches(most), len(losses), lambda _: None)
    loader.close()
    return losses


@pytest.mark.parametrize(
    ("tight", "model"),
    [
        (False, "sage"),
        *(pytest.param(True, model, marks=pytest.mark.slow) for model in ("sage", "gcn", "gat")),
    ],
)
def test_a_batch_drawn_beside_a_step_changes_nothing(
    tight: bool, model: str, graph: Graph, batches: Batches, gpu: EmulatedGpu, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fills: list[tuple[str, int]] = []
    fill = PaddedDraws.fill

    def noted(self: PaddedDraws, batch: PaddedBatch) -> None:
        fill(self, batch)
        fills.append((gpu.lanes.current, int(batch.now[1]) if int(batch.now[2]) else -1))

    monkeypatch.setattr(PaddedDraws, "fill", noted)
    sizes = [batch.n_id.shape[0] for batch in batches(graph, "sage")[1]]
    shapes = replace(ROOMY, rows=[16, 56, max(sizes) if tight else 121])
    parts = (2, None, 1) if tight else (3, None)
    found: list[tuple[list[float], list[torch.Tensor], dict[str, int], int]] = []
    for ahead in (0, 1):
        fills.clear()
        loader, loop = drawn_loop(
            graph,
            tmp_path / str(ahead),
            replace(shapes, ahead=ahead),
            dropout=0.4,
            model=model,
        )
        losses = train_in_parts(loader, loop, parts)
        found.append((losses, parameters(loop), loader.meter.totals()[0], loop.overflowed))
    turns, beside = found
    assert len(turns[0]) == (5 if tight else 4)
    assert beside[0] == turns[0]  # to the bit
    assert all(torch.equal(a, b) for a, b in zip(beside[1], turns[1], strict=True))
    assert beside[3] == turns[3]
    assert (turns[3] > 0) == tight
    if tight:
        return
    assert beside[2] == turns[2]
    # The first batch of each iteration in turn; behind its last one, none.
    assert fills == [
        ("", 0), ("draw", 1), ("draw", 2), ("draw", -1),
        ("", 3), ("draw", -1),
    ]  # fmt: skip


def test_lanes_that_are_not_joined_are_refused(
    graph: Graph, gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, loop = drawn_loop(graph, tmp_path, replace(ROOMY, ahead=1))
    monkeypatch.setattr(loop._streams, "wait", lambda mark: None)
    with pytest.raises(OrderError, match="does not wait"):
        loop.run(loader.batches(2), 0, lambda _: None)
    loader.close()


def test_a_sum_that_a_replay_cannot_keep_in_its_turn_stands_between_graphs(
    graph: Graph, batches: Batches, gpu: EmulatedGpu
) -> None:
    loop = loop_of(batches(graph, "sage")[0], graph, ROOMY)
    assert [whole for _, whole in loop._pieces()] == [True]
    loop.comm.size = 2  # of ranks that share a GPU: gloo
    assert [whole for _, whole in loop._pieces()] == [True, False, True]
    loop.comm._device = EMULATED  # between GPUs: NCCL
    assert [whole for _, whole in loop._pieces()] == [True]
    order = CollectiveOrder(1, lambda: None)  # in whose turns rows are exchanged, too
    loop.comm.follow(order)
    assert [whole for _, whole in loop._pieces()] == [True, False, True]
    loop.comm.follow(None)
    order.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["links", "typed"])
@pytest.mark.parametrize("tight", [False, True])
def test_steps_draw_links_and_types_on_the_device(
    kind: str, tight: bool, batches: Batches, gpu: EmulatedGpu, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stop()  # graphs and batches are the host's
    graph = make_graph(tmp_path / "graph", kind)
    work: dict[str, Any] = {"model": "rgcn" if kind == "typed" else "sage", "dropout": 0.4}
    host, drawn = batches(graph, **work)
    drawn = drawn[:2]
    start(gpu)
    sizes = [batch.n_id.shape[0] for batch in drawn]
    room = max(sizes) if tight else 241
    shapes = StepShapes(rows=[64, min(180, room), room], edges=[200, 600], drawn=True)
    loops = loop_of(host, graph, shapes), loop_of(host, graph, shapes)
    loader = drawing_loader(graph, tmp_path / "drawn", shapes, **work)
    padded = trains_alike(loops, loader, drawn, 1e-5)
    assert padded._inputs is not None
    assert padded.overflowed == (sizes.count(max(sizes)) if tight else 0)
    if not tight:
        padded._inputs.draws.begin_epoch(0)
        assert waits_of(padded, monkeypatch) == []
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["links", "typed"])
def test_links_and_types_drawn_beside_a_step_change_nothing(
    kind: str, gpu: EmulatedGpu, tmp_path: Path
) -> None:
    stop()  # the graph is the host's
    graph = make_graph(tmp_path / "graph", kind)
    start(gpu)
    work: dict[str, Any] = {"model": "rgcn" if kind == "typed" else "sage", "dropout": 0.4}
    found: list[tuple[list[float], list[torch.Tensor]]] = []
    for ahead in (0, 1):
        shapes = StepShapes(rows=[64, 180, 241], edges=[200, 600], drawn=True, ahead=ahead)
        loader, loop = drawn_loop(graph, tmp_path / str(ahead), shapes, **work)
        assert bool(ahead) == (loop.shapes.ahead > 0)
        found.append((train_in_parts(loader, loop, (2, 1)), parameters(loop)))
    assert len(found[0][0]) == 3
    assert found[1][0] == found[0][0]  # to the bit
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
