"""Seeds of one or several batches, checked and put on a device."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.errors import SamplerError
from runtime.sampling.checks import bad_seed


def seeds_on_device(
    batches: Sequence[NDArray[np.int64]], num_nodes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The seeds of some batches one after another, and where each batch ends: [total], [k + 1].

    Raises:
        SamplerError: a seed is out of range, or occurs twice in its batch.
    """
    for seeds in batches:
        refuse_bad_seeds(seeds, num_nodes)
    ends = np.cumsum([0, *(seeds.shape[0] for seeds in batches)])
    nodes = np.concatenate([np.zeros(0, np.int64), *batches])
    return torch.from_numpy(nodes).to(device), torch.from_numpy(ends).to(device)


def refuse_bad_seeds(seeds: NDArray[np.int64], num_nodes: int) -> None:
    """Check one batch's seeds.

    Raises:
        SamplerError: one is out of range, or occurs twice.
    """
    ordered = np.sort(seeds)
    inside = seeds.size == 0 or (ordered[0] >= 0 and ordered[-1] < num_nodes)
    if not inside or (ordered[1:] == ordered[:-1]).any():
        raise _bad_seed(seeds, num_nodes)


def _bad_seed(seeds: NDArray[np.int64], num_nodes: int) -> SamplerError:
    """What is wrong with the first seed that is out of range or repeated."""
    _, firsts = np.unique(seeds, return_index=True)
    again = np.setdiff1d(np.arange(seeds.shape[0]), firsts)
    outside = np.flatnonzero((seeds < 0) | (seeds >= num_nodes))
    return bad_seed(seeds, int(np.concatenate([outside, again]).min()), num_nodes)
