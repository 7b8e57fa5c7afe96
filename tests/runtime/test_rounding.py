"""Square roots are correctly rounded, whatever torch makes of them."""

import numpy as np
import pytest
import torch

from gnnplan.runtime.processor import square_root


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_roots_are_correctly_rounded(kind: type, kernel_device: torch.device) -> None:
    """IEEE 754: x lies between the squares of the midpoints beside its root."""
    x = np.concatenate([np.arange(200_000), np.random.default_rng(0).random(100_000)]).astype(kind)
    found = square_root(torch.from_numpy(x).to(kernel_device)).cpu().numpy()
    assert found.dtype == kind
    exact, r = x.astype(np.longdouble), found.astype(np.longdouble)
    up, down = np.nextafter(found, kind(np.inf)), np.nextafter(found, kind(-np.inf))
    above, below = (r + up) / 2, (r + np.maximum(down, 0)) / 2
    assert (exact <= above * above).all()
    assert (exact >= below * below).all()
