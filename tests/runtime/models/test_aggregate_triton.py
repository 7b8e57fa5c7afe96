"""The GPU's sums over a block and their gradients are torch's own; in the interpreter here."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnplan.runtime.models import functions, functions as backends
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.functions import (
    aggregate_dense,
    aggregate_plain,
    aggregate_sums as aggregate,
    linear,
)

pytest.importorskip("triton")


def block_of(
    degrees: list[int], num_src: int, device: torch.device, *, weighted: bool = False
) -> TorchBlock:
    """Random sources, some again and again."""
    rng = np.random.default_rng()
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, num_src, indptr[-1]).astype(np.int32)
    weight = torch.from_numpy(rng.random(indptr[-1]).astype(np.float32)).to(device)
    return TorchBlock(
        num_src=num_src, num_dst=len(degrees), weight=weight if weighted else None,
        indptr=torch.from_numpy(indptr).to(device), indices=torch.from_numpy(indices).to(device),
    )  # fmt: skip


DEGREES = [0, 1, 3, 40, 0, 7, 33]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_root", [False, True])
@pytest.mark.parametrize("width", [1, 3, 47, 100, 128, 300])
def test_sums_and_their_gradient_are_torchs(
    width: int, with_root: bool, weighted: bool, kernel_device: torch.device, poisoned: None
) -> None:
    from gnnplan.runtime.models.aggregate_triton import spread_rows, sum_rows

    block = block_of(DEGREES, 11, kernel_device, weighted=weighted)
    x = torch.rand((11, width), device=kernel_device).requires_grad_()
    expected = aggregate_plain(x, block)
    if with_root:
        expected = torch.cat([expected, x[: block.num_dst]], dim=1)
    found = sum_rows(x.detach(), block, with_root=with_root)
    torch.testing.assert_close(found, expected)
    grad = torch.rand_like(expected)
    expected.backward(grad)
    spread = spread_rows(grad, block, width, with_root=with_root)
    torch.testing.assert_close(spread, x.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(dtype: torch.dtype, kernel_device: torch.device) -> None:
    from gnnplan.runtime.models.aggregate_triton import DeviceSums

    block = block_of([400, 0, 5], 9, kernel_device)
    sums = DeviceSums(block)
    x = torch.rand((9, 20), device=kernel_device).to(dtype).requires_grad_()
    twin = x.detach().float().requires_grad_()
    found, expected = aggregate(x, sums), aggregate_plain(twin, block)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype))
    found.sum().backward()
    expected.sum().backward()
    assert x.grad is not None
    assert twin.grad is not None
    torch.testing.assert_close(x.grad, twin.grad.to(dtype))


def test_rows_apart_in_memory_are_read_and_nothing_beside_the_result_is_written(
    kernel_device: torch.device,
) -> None:
    from gnnplan.runtime.models.aggregate_triton import sum_rows

    block = block_of(DEGREES, 11, kernel_device)
    apart = torch.rand((11, 12), device=kernel_device)[:, :10]
    across = torch.rand((10, 11), device=kernel_device).t()
    for x in (apart, across):
        torch.testing.assert_close(sum_rows(x, block), aggregate_plain(x, block))


@pytest.mark.parametrize("degrees", [[], [0, 0]])
def test_blocks_without_rows_or_edges(degrees: list[int], kernel_device: torch.device) -> None:
    from gnnplan.runtime.models.aggregate_triton import spread_rows, sum_rows

    block = block_of(degrees, 4, kernel_device)
    x = torch.rand((4, 6), device=kernel_device)
    found = sum_rows(x, block, with_root=True)
    assert torch.equal(found[:, :6], torch.zeros_like(found[:, :6]))
    assert torch.equal(found[:, 6:], x[: len(degrees)])
    spread = spread_rows(torch.ones_like(found), block, 6, with_root=True)
    assert float(spread.sum()) == 6 * len(degrees)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_root", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_layer_and_all_its_gradients_are_torchs(
    weighted: bool, with_root: bool, relu: bool, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.models.aggregate_triton import DeviceSums

    block = block_of(DEGREES, 11, kernel_device, weighted=weighted)

    def inputs() -> dict[str, Tensor]:
        torch.manual_seed(3)
        made = {
            "x": torch.rand((11, 6)), "weight": torch.randn((5, 6)),
            "root": torch.randn((5, 6)), "bias": torch.randn(5),
        }  # fmt: skip
        return {k: v.to(kernel_device).requires_grad_() for k, v in made.items()}

    mine, theirs = inputs(), inputs()
    root = mine["root"] if with_root else None
    sums = DeviceSums(block)
    found = aggregate_dense(mine["x"], mine["weight"], root, mine["bias"], sums, relu=relu)
    plain = linear(aggregate_plain(theirs["x"], block), theirs["weight"], theirs["bias"])
    if with_root:
        plain = plain + theirs["x"][: block.num_dst] @ theirs["root"].t()
    plain = plain.relu() if relu else plain
    torch.testing.assert_close(found, plain)
    grad = torch.randn_like(plain)
    found.backward(grad)
    plain.backward(grad)
    for name in ("x", "weight", "bias", *(["root"] if with_root else [])):
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_the_order_of_sum_and_product_is_the_devices(kernel_device: torch.device) -> None:
    block = block_of([5] * 10, 100, kernel_device)
    # 64 columns to 8 without gradients: sum first costs 10 x 512 + P 50 64, product first
    # 100 x 512 + P 50 8 (P multiply-adds a summed element): sum first while P is below 16.5.
    first = functions.transforms_first(block, 64, 8, trains=False, inner=False)
    assert first == (kernel_device.type == "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_layers_take_the_kernels_unless_one_order_is_asked_for() -> None:
    device = torch.device("cuda")
    x = torch.rand((4, 3), device=device)
    assert backends.runs_on_device(x)
    assert not backends.runs_on_device(x.double())
    torch.use_deterministic_algorithms(True)
    try:
        assert not backends.runs_on_device(x)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("width", [3, 100, 300])
def test_sums_are_put_in_place_and_added(width: int, kernel_device: torch.device) -> None:
    from gnnplan.runtime.models.aggregate_triton import sum_rows

    first, second = (block_of(DEGREES, 11, kernel_device, weighted=True) for _ in range(2))
    x, y = (torch.rand((11, width), device=kernel_device) for _ in range(2))
    out = torch.full((len(DEGREES) + 2, 2 * width), 7.0, device=kernel_device)
    sum_rows(x, first, with_root=True, out=out)
    sum_rows(y, second, out=out, add=True)
    expected = aggregate_plain(x, first) + aggregate_plain(y, second)
    torch.testing.assert_close(out[: len(DEGREES), :width], expected)
    assert torch.equal(out[: len(DEGREES), width:], x[: len(DEGREES)])
    assert bool((out[len(DEGREES) :] == 7.0).all())


@pytest.mark.parametrize(("heads", "width"), [(1, 5), (2, 3), (4, 40), (2, 300)])
def test_sums_by_head_and_all_their_gradients_are_a_dense_products(
    heads: int, width: int, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.models.aggregate_triton import sum_by_head

    block = block_of(DEGREES, 11, kernel_device)
    x = torch.rand((11, heads * width), device=kernel_device).requires_grad_()
    weight = torch.rand((block.num_edges, heads), device=kernel_device).requires_grad_()
    found = sum_by_head(x, weight, block)
    grad = torch.rand_like(found)
    gradients = torch.autograd.grad(found, (x, weight), grad)
    # Dense: a matrix of each head, whose entries are the sums of its edges' weights.
    place = block.row_of_edge() * 11 + block.indices.long()
    zeros = torch.zeros((len(DEGREES) * 11, heads), device=kernel_device)
    matrices = zeros.index_add(0, place, weight).view(len(DEGREES), 11, heads)
    expected = torch.einsum("ijk,jkc->ikc", matrices, x.view(11, heads, width)).flatten(1)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        gradients, torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_behind_the_count_are_no_rows(
    weighted: bool, kernel_device: torch.device, poisoned: None
) -> None:
    from dataclasses import replace

    from gnnplan.runtime.models.aggregate_triton import spread_rows, sum_rows

    whole = block_of(DEGREES, 11, kernel_device, weighted=weighted)
    count, edges = 4, sum(DEGREES[:4])
    weight = None if whole.weight is None else whole.weight[:edges]
    true = replace(
        whole, num_dst=count, indptr=whole.indptr[: count + 1], indices=whole.indices[:edges],
        weight=weight,
    )  # fmt: skip
    counted = replace(whole, live=torch.tensor([count], device=kernel_device))
    x, grad = (torch.rand((rows, 5), device=kernel_device) for rows in (11, len(DEGREES)))
    found = sum_rows(x, counted, with_root=True)
    assert torch.equal(found[:count], sum_rows(x, true, with_root=True))
    assert not found[count:].any()
    given = torch.cat([grad, grad], dim=1)
    given[count:] = float("nan")  # nobody reads it
    expected = spread_rows(given[:count], true, 5, with_root=True)
    assert torch.equal(spread_rows(given, counted, 5, with_root=True), expected)


def test_a_heads_gradient_of_padding_is_zero(kernel_device: torch.device, poisoned: None) -> None:
    from dataclasses import replace

    from gnnplan.runtime.models.aggregate_triton import dot_rows

    whole = block_of(DEGREES, 11, kernel_device)
    counted = replace(whole, live=torch.tensor([4], device=kernel_device))
    x, grad = (torch.rand((rows, 6), device=kernel_device) for rows in (11, len(DEGREES)))
    found, expected = dot_rows(grad, x, counted, 2), dot_rows(grad, x, whole, 2)
    edges = sum(DEGREES[:4])
    assert torch.equal(found[:edges], expected[:edges])
    assert not found[edges:].any()


def test_dropout_by_counter_depends_on_a_rows_number_alone(kernel_device: torch.device) -> None:
    from gnnplan.runtime.models.functions import drawing_by, drop

    key = torch.tensor([-5], device=kernel_device)
    few, more = (torch.ones((rows, 7), device=kernel_device) for rows in (90, 300))
    few.requires_grad_()
    with drawing_by(key):
        first, second = drop(few, 0.25), drop(few, 0.25)
    with drawing_by(key):
        longer = drop(more, 0.25)
    assert torch.equal(longer[:90], first)
    assert not torch.equal(first, second)
    kept = float((longer > 0).float().mean())
    # 2100 draws: four standard deviations are 0.038.
    assert abs(kept - 0.75) < 0.038
    assert torch.equal(longer[longer > 0], torch.full_like(longer[longer > 0], 1 / 0.75))
    first.sum().backward()
    assert few.grad is not None
    assert torch.equal(few.grad, first)
