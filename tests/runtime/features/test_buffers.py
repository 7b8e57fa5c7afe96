"""A buffer is re-used when, and only when, nothing refers to its rows."""

import numpy as np
import torch

from gnnplan.runtime.loader.stages import BufferRing


def address(rows: np.ndarray) -> int:
    return rows.__array_interface__["data"][0]


def test_a_released_buffer_comes_back() -> None:
    ring = BufferRing(1, 4)
    first = ring.take(100)
    where = address(first)
    del first
    assert address(ring.take(50)) == where
    assert ring.overflows == 0


def test_a_buffer_in_use_is_never_handed_out_again() -> None:
    ring = BufferRing(2, 4)
    kept = [ring.take(10) for _ in range(5)]
    assert len({address(rows) for rows in kept}) == 5
    assert ring.overflows == 3


def test_a_view_of_a_tensor_keeps_its_buffer_in_use() -> None:
    ring = BufferRing(1, 4)
    rows = ring.take(8)
    rows[:] = 1.0
    view = torch.from_numpy(rows)[2:3].t()
    del rows
    other = ring.take(8)
    other[:] = 2.0
    assert torch.equal(view, torch.ones(4, 1))
    del view, other
    assert ring.overflows == 1
    before = ring.overflows
    ring.take(8)
    assert ring.overflows == before


def test_a_gradient_graph_keeps_its_buffer_in_use() -> None:
    ring = BufferRing(1, 4)
    weight = torch.ones(4, 2, requires_grad=True)
    rows = ring.take(3)
    rows[:] = 3.0
    loss = (torch.from_numpy(rows) @ weight).sum()
    del rows
    ring.take(3)[:] = 100.0
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((4, 2), 9.0))  # three rows of 3, by hand


def test_buffers_grow_and_then_stay() -> None:
    ring = BufferRing(1, 4)
    ring.take(100)
    grown = ring.num_bytes
    assert grown >= 100 * 16
    for rows in (10, 100, 60):
        assert ring.take(rows).shape == (rows, 4)
    assert ring.num_bytes == grown


def test_no_more_buffers_are_touched_than_are_in_use_at_once():
    ring = BufferRing(4, 4)
    for _ in range(10):
        first = ring.take(100)
        second = ring.take(100)
        del first, second
    assert ring.num_bytes == 2 * 112 * 4 * 4  # two of them, an eighth larger than asked for
