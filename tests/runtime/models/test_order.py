"""Which comes first of a layer's sum and its product: the faster one, with the same result."""

import pytest
import torch

from gnnplan.runtime.models import functions
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.functions import aggregate_linear, transforms_first

# Sources, destinations and edges of outer blocks, columns in and out, and which order was faster on
# two threads, forward and back (2-core Intel, 2026-11-24): milliseconds of a step either way.
MEASURED = [
    ("coauthor-physics neighbor: 13.5, 22.1", 11995, 4069, 21335, 512, False),
    ("coauthor-physics ladies: 5.3, 8.0", 3274, 1521, 9216, 512, False),
    ("amazon-computers neighbor: 17.7, 23.9", 7918, 3494, 19194, 767, False),
    ("amazon-computers ladies: 13.9, 12.6", 3118, 1498, 51848, 767, True),
    ("github-social neighbor: 5.6, 10.6", 7401, 2600, 13079, 256, False),
    ("rmat-15 ladies: 13.6, 11.3", 3073, 1513, 117982, 512, True),
    ("wordnet-synsets neighbor: 2.8, 5.6", 5176, 1798, 6159, 128, False),
    ("flickr-attr neighbor: 14.9, 17.0", 3963, 2317, 13690, 1024, False),
]


def block(num_src: int, num_dst: int, num_edges: int) -> TorchBlock:
    """Edges spread evenly over destinations and sources."""
    indptr = torch.linspace(0, num_edges, num_dst + 1).round().to(torch.int64)
    indices = (torch.arange(num_edges) % num_src).to(torch.int32)
    return TorchBlock(indptr=indptr, indices=indices, num_src=num_src, num_dst=num_dst)


@pytest.mark.parametrize(("words", "src", "dst", "edges", "width", "product_first"), MEASURED)
def test_the_order_is_the_one_that_was_faster(
    words: str, src: int, dst: int, edges: int, width: int, product_first: bool
) -> None:
    found = transforms_first(block(src, dst, edges), width, 128, trains=True, inner=False)
    assert found == product_first, words


def test_without_gradients_only_the_forward_pass_counts() -> None:
    # By hand, 100 sources, 10 destinations, 64 columns to 8, 14 a summed element: forward, sum
    # first 10 x 512 + 14 E 64, product first 100 x 512 + 14 E 8; they meet at E = 58.8.
    for edges, first in ((58, False), (59, True)):
        made = block(100, 10, edges)
        assert transforms_first(made, 64, 8, trains=False, inner=False) == first
    # Back as well: 20 x 512 + 14 E 64 against 200 x 512 + 28 E 8: at 137.1.
    for edges, first in ((137, False), (138, True)):
        made = block(100, 10, edges)
        assert transforms_first(made, 64, 8, trains=True, inner=False) == first
    # And for the rows: 30 x 512 + 28 E 64 against 300 x 512 + 28 E 8: at 88.2.
    for edges, first in ((88, False), (89, True)):
        made = block(100, 10, edges)
        assert transforms_first(made, 64, 8, trains=True, inner=True) == first


@pytest.fixture(params=[False, True])
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(functions, "transforms_first", lambda *_, **__: request.param)
    return request.param


def test_both_orders_compute_the_same(forced: bool) -> None:
    del forced  # each against torch's own operations in float64
    generator = torch.Generator().manual_seed(3)
    made = block(60, 20, 150)
    x = torch.randn(60, 24, generator=generator, requires_grad=True)
    weight, root = (torch.randn(8, 24, generator=generator, requires_grad=True) for _ in range(2))
    bias = torch.randn(8, generator=generator, requires_grad=True)
    given = x, weight, root, bias
    wide = x2, weight2, root2, bias2 = tuple(
        torch.tensor(each.tolist(), dtype=torch.float64, requires_grad=True) for each in given
    )
    aggregate_linear(x, weight, root, bias, made, relu=True).square().sum().backward()
    aggregate_linear(x2, weight2, root2, bias2, made, relu=True).square().sum().backward()
    for mine, reference in zip(given, wide, strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-4, atol=1e-4)
