"""Counts of planner/profile/operations.py against what the runtime does, call by call."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.planner.probe import computing
from gnnplan.planner.profile import operations as core
from gnnplan.planner.profile.operations import LayerShape, layer_operations, product
from gnnplan.planner.profile.roofline import core_work
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.models import functions, kernels
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.train.gradients import GradientBuffer
from tests.support.profiles import batch_profile, exactly

VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select",
    "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
"""Calls that move nothing."""
ROOM = {"empty", "new_empty", "new_empty_strided"}
"""Calls that make room and write nothing."""


class Calls(TorchDispatchMode):
    """Torch's calls, forward and back, and the sizes of what each gives."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.sizes = list[str](), list[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
            self.sizes.append(found.numel() if isinstance(found, torch.Tensor) else 0)
        return found


def calls_of(step: Callable[[], object]) -> Calls:
    """Record a step that was taken once before."""
    step()
    with Calls() as calls:
        step()
    return calls


SOURCES, TARGETS, DEGREE, CLASSES = 48, 20, 3, 7
WIDTH, HEADS, COLUMNS = 9, 2, 5


INDPTR = torch.arange(TARGETS + 1) * DEGREE
INDICES = torch.arange(TARGETS * DEGREE, dtype=torch.int32) % (SOURCES - TARGETS) + TARGETS


def block_of() -> TorchBlock:
    return TorchBlock(num_src=SOURCES, num_dst=TARGETS, indptr=INDPTR, indices=INDICES)


def attention_step(*, last: bool) -> Callable[[], object]:
    """A layer of attention whose inputs need a gradient, forward and back."""
    work = Workload(model="gat", num_layers=2, fanouts=[2, 2], hidden=HEADS * COLUMNS, heads=HEADS)
    inputs = HEADS * COLUMNS if last else WIDTH
    model: Any = build_model(work, WIDTH, COLUMNS, "multiclass")
    x = torch.randn(SOURCES, inputs, requires_grad=True)
    seed = torch.ones(TARGETS, COLUMNS if last else HEADS * COLUMNS)

    def step() -> None:
        x.grad = None
        model.zero_grad()
        model.forward_layer(int(last), x, block_of()).backward(seed)

    return step


def typed_step(active: int, relations: int, types: int) -> Callable[[], object]:
    """A layer of R-GCN whose first relations have edges."""
    work = Workload(model="rgcn", num_layers=1, fanouts=[2], hidden=WIDTH)
    named = GraphTypes(
        node_types=[str(i) for i in range(types)],
        edge_types=[str(i) for i in range(relations)],
        widths=[4] * types,
    )
    model = build_model(work, 4, CLASSES, "multiclass", types=named)
    counts = np.zeros((TARGETS, relations), np.int64)
    counts[:, :active] = 1
    edges: dict[str, Any] = {
        "indptr": torch.arange(TARGETS + 1) * active,
        "indices": torch.arange(TARGETS * active, dtype=torch.int32),
        "relation_ptr": torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        "src_type": torch.arange(SOURCES + 99, dtype=torch.int32) % types,
    }
    x, seed = torch.randn(SOURCES + 99, 4), torch.ones(TARGETS, CLASSES)

    def step() -> None:
        model.zero_grad()
        block = TorchBlock(num_src=SOURCES + 99, num_dst=TARGETS, **edges)
        model(x, [block]).backward(seed)

    return step


def test_a_start_is_that_many_calls_in_the_probes_small_step() -> None:
    calls = calls_of(computing.make_step(computing.SHAPES[computing.STARTS]))
    counted = layer_operations("sage", computing.SHAPES[computing.STARTS])
    assert len(calls.names) == pytest.approx(core.CALLS_PER_START * len(list(counted)))


@pytest.mark.parametrize("last", [False, True])
def test_a_layer_of_attention_takes_its_calls(last: bool) -> None:
    assert len(calls_of(attention_step(last=last)).names) == core.ATTENTION_CALLS


def test_attention_passes_over_rows_as_often_as_torch_writes_them() -> None:
    calls = calls_of(attention_step(last=False))
    width = HEADS * COLUMNS
    wrote = Counter(
        size for name, size in zip(calls.names, calls.sizes, strict=True) if name not in ROOM
    )
    shape = LayerShape(
        num_src=SOURCES, num_dst=TARGETS, num_edges=0.0, in_dim=WIDTH, out_dim=width, inputs=False,
        heads=HEADS,
    )  # fmt: skip
    counted = core.attention_work(shape).operations
    # One more is the product itself. Three times h, or a gradient of before, is read.
    of_sources, read = wrote[SOURCES * width] - 1, 3
    assert core.passes(SOURCES, width, of_sources + read) in counted
    # The gradient of scores is copied among the sources'; h is read twice, and the result once.
    of_targets, copied, read = wrote[TARGETS * width], 1, 3
    counts = [each.flops / (TARGETS * width) for each in counted]
    assert sum(counts[-2:]) == of_targets + copied + read


class Counting:
    """An array whose single loads and stores are counted."""

    def __init__(self, array: Any, counts: Counter[str], name: str) -> None:
        self.array, self.counts, self.name = array, counts, name
        self.shape = array.shape

    def __getitem__(self, key: Any) -> Any:
        found = self.array[key]
        if np.ndim(found):
            return Counting(found, self.counts, self.name)
        self.counts[self.name] += 1
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[key] = value
        if not np.ndim(self.array[key]):
            self.counts[self.name] += 1


def test_loops_of_attention_load_and_store_the_numbers_that_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(kernels, "_head", kernels._head.py_func)
    monkeypatch.setattr(kernels, "_prefetch_rows", lambda rows, *_: fetched.append(rows.name))
    rng, edges = np.random.default_rng(0), TARGETS * DEGREE
    width, pairs = HEADS * COLUMNS, edges * HEADS
    block, slope = block_of(), np.float32(0.2)
    sizes = (SOURCES, width), (SOURCES, HEADS), (TARGETS, HEADS), (TARGETS, width)
    h, source, target, grad = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    none, alpha = np.empty((0, HEADS), np.float32), np.empty((edges, HEADS), np.float32)
    found: list[Counter[str]] = []
    outputs = [[np.zeros_like(grad)], [np.zeros_like(a) for a in (h, source, target)]]
    names = [["out"], ["dh", "d_src", "d_dst"]]
    for loop, given, into, named in zip(
        (kernels.attend_rows, kernels.attention_gradient), ([], [grad]), outputs, names, strict=True
    ):
        counts = Counter[str]()

        def seen(array: Any, name: str, counts: Counter[str] = counts) -> Counting:
            return Counting(array, counts, name)

        loop.py_func(
            block.indptr.numpy(),
            seen(block.indices.numpy(), "indices"),
            *(seen(a, n) for a, n in ((h, "h"), (source, "score"), (target, "score"))),
            slope, none, seen(alpha, "alpha"),
            *(seen(a, "grad") for a in given),
            *(seen(a, n) for a, n in zip(into, named, strict=True)),
        )  # fmt: skip
        found.append(counts)
    numbers = edges * width
    forward, back = found
    # Rows of sources are fetched ahead; a destination's stay in a cache.
    assert Counter(fetched) == {"h": 2 * edges, "dh": edges}
    assert forward["h"] == core.ATTENTION_ROWS * numbers
    # The gradient of a source is read and written.
    assert back["h"] + back["dh"] == core.GRADIENT_ROWS * numbers
    coefficients = forward["score"] + forward["alpha"]
    assert coefficients == core.ATTENTION_NUMBERS * pairs
    coefficients = sum(back[each] for each in ("score", "alpha", "d_src", "d_dst"))
    # Arrays of the loop's own have each pair's product, and a destination's sum of them.
    assert coefficients + (2 + 3) * pairs == core.GRADIENT_NUMBERS * pairs


@pytest.mark.parametrize(("active", "types"), [(1, 2), (2, 2), (3, 2), (2, 3), (2, 1)])
def test_a_layer_of_relations_takes_the_calls_of_those_with_edges(active: int, types: int) -> None:
    calls = calls_of(typed_step(active, 3, types))
    # The gradient of a relation without edges is a matrix of zeros.
    found = len(calls.names) - (3 - active)
    shape = LayerShape(
        num_src=SOURCES, num_dst=TARGETS, num_edges=1.0, in_dim=WIDTH, out_dim=CLASSES,
        inputs=False, heads=1, relations=active,
    )  # fmt: skip
    work = core.relations_work(shape, []) + core.encoding_work(SOURCES, 4, WIDTH, types)
    assert found == pytest.approx(core.CALLS_PER_START * work.starts)


def test_rows_that_relations_hand_on_are_those_that_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, loops = 3, list[int]()
    whole = functions.source_gradient

    def seen(*args: Any) -> None:
        loops.append(args[4].size)
        whole(*args)

    monkeypatch.setattr(functions, "source_gradient", seen)
    step = typed_step(count, count, 2)
    step()
    loops.clear()
    calls, rows = calls_of(step), (SOURCES + 99) * WIDTH
    wrote = Counter(n for n, size in zip(calls.names, calls.sizes, strict=True) if size == rows)
    # Of each relation a row of every source, of which the calls took two steps.
    assert loops == [rows] * (2 * count)
    added = wrote["add"] + wrote["add_"]
    assert (added, wrote["slice_backward"]) == (count, 1)
    shape = LayerShape(
        num_src=SOURCES + 99, num_dst=TARGETS, num_edges=1.0, in_dim=WIDTH, out_dim=CLASSES,
        inputs=False, heads=1, relations=count,
    )  # fmt: skip
    counted = core.relations_work(shape, []).operations
    assert core.passes(SOURCES + 99, WIDTH, count) in counted
    assert core.passes(SOURCES + 99, WIDTH, 2 * added + wrote["slice_backward"]) in counted


@pytest.mark.parametrize("task", core.LOSS_CALLS)
def test_a_loss_takes_its_calls(task: str) -> None:
    logits = torch.randn(SOURCES, 1 if task == "binary" else CLASSES, requires_grad=True)
    y = {
        "multiclass": torch.randint(0, CLASSES, (SOURCES,)),
        "multilabel": torch.randint(0, 2, (SOURCES, CLASSES)),
        "binary": torch.randint(0, 2, (SOURCES,)),
        "link": torch.randint(0, SOURCES, (9, 3)),
    }[task]

    def step() -> None:
        logits.grad = None
        (loss_sum(logits, y, task) / SOURCES).backward()

    assert len(calls_of(step).names) == core.LOSS_CALLS[task]


def test_picked_rows_take_their_calls() -> None:
    x, rows = torch.randn(SOURCES, WIDTH, requires_grad=True), torch.arange(5)
    seed = torch.ones(5, WIDTH)

    def step() -> None:
        x.grad = None
        x[rows].backward(seed)

    assert len(calls_of(step).names) == core.PICKING_CALLS


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_a_layers_gradients_are_added_tensor_by_tensor(model: str) -> None:
    work = Workload(model=model, num_layers=1, fanouts=[2], hidden=8, heads=2)
    built = build_model(work, WIDTH, CLASSES, "multiclass")
    GradientBuffer(built)  # whose views are there before, so that each is added to
    assert sum(1 for _ in built.parameters()) == core.TENSORS[model]


def one_hop(**more: Any) -> BatchProfile:
    """Ten seeds, 40 vertices and 60 edges."""
    vertices, edges = [exactly(10.0), exactly(40.0)], [exactly(60.0)]
    return replace(batch_profile(10), vertices=vertices, edges=edges, block_edges=edges, **more)


def test_a_step_has_its_layers_its_loss_and_its_gradients() -> None:
    batch = one_hop()
    work = Workload(model="gat", num_layers=1, fanouts=[6], hidden=8, heads=2)
    whole = core_work(work, batch, [(WIDTH, CLASSES, 2)], WIDTH, 1.0, "multiclass")
    shape = LayerShape(
        num_src=40.0, num_dst=10.0, num_edges=70.0, in_dim=WIDTH, out_dim=2 * CLASSES, inputs=True,
        heads=2,
    )  # fmt: skip
    layer = core.attention_work(shape)
    assert layer.operations.count(product(40.0, WIDTH, 2 * CLASSES)) == 2
    parameters = WIDTH * 2 * CLASSES + 2 * 2 * CLASSES + CLASSES
    rest = core.loss_work("multiclass", 10.0, CLASSES) + core.gradient_work(4, parameters)
    assert whole == layer + rest


def test_relations_without_edges_cost_nothing_on_cores() -> None:
    work = Workload(model="rgcn", num_layers=1, fanouts=[6], hidden=8)
    found: list[core.CoreWork] = []
    for shares in ([0.5, 0.5], [0.5, 0.5, 0.0]):
        batch = one_hop(edge_types=shares)
        found.append(core_work(work, batch, [(8, CLASSES, 1)], WIDTH, 1.0, "multiclass"))
    fewer, more = found
    assert fewer.starts == more.starts
    moved = [sum(one.moved_bytes for one in each.operations) for each in found]
    # The one difference is the parameters, which the third relation has too.
    assert moved[1] - moved[0] == pytest.approx(2 * 4 * 8 * CLASSES)
