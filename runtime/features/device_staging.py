"""Rows that a GPU cannot address: fetched by the host into page-locked rows, then put in place.

Disk, sparse features, rows behind another host: the tiers of the host's store read them. Which
rows those are the host must know, so this waits for the ids; the copy back runs on the stream.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.features.counters import Counters
from runtime.features.location import MAX_SOURCES
from runtime.features.tiers import Tiers

_NO_LANE = 255


class Staged:
    """The tiers of some sources, read for a device."""

    def __init__(self, tiers: Tiers, width: int, device: torch.device, *, pinned: bool) -> None:
        """Wrap a rank's tiers.

        Args:
            tiers: each with the numbers of its sources, in the tier's order.
            width: columns of a row.
            device: where the rows are wanted.
            pinned: stage in page-locked memory.
        """
        self._tiers = tiers
        self._width, self._device, self._pinned = width, device, pinned
        self._lanes = np.full(MAX_SOURCES, _NO_LANE, np.uint8)
        order = [number for _, numbers in tiers for number in numbers]
        self._lanes[order] = np.arange(len(order))
        staged = np.append(self._lanes != _NO_LANE, False)
        self.holds = torch.from_numpy(staged).to(device)
        """bool [257] by source number; the last for ids outside the graph (-1)."""

    @property
    def resident_bytes(self) -> int:
        """Bytes that the tiers hold."""
        return sum(tier.resident_bytes for tier, _ in self._tiers)

    def fill(self, numbers: Tensor, slots: Tensor, wanted: Tensor | None, out: Tensor) -> Counters:
        """Write the rows of these sources into the batch; every tier is read, also for nothing.

        Args:
            numbers: source number of each row, -1 for none; int64 [n] on the device.
            slots: int64 [n] there.
            wanted: bool [n]; rows that are not wanted are left alone. None: all are.
            out: [n, feature_dim] on the device; the rows of other sources stay as they are.

        Returns:
            What the tiers counted.
        """
        mine = self.holds[numbers] if wanted is None else self.holds[numbers] & wanted
        places = mine.nonzero().squeeze(1)
        number, slot = torch.stack([numbers[places], slots[places]]).cpu().numpy()
        lanes = self._lanes[number]
        order = np.argsort(lanes, kind="stable")
        counts = np.bincount(number, minlength=MAX_SOURCES).astype(np.int64)
        staging = torch.empty((slot.size, self._width), pin_memory=self._pinned)
        counters, first = Counters(), 0
        for tier, sources in self._tiers:
            part = order[first : first + int(counts[sources].sum())]
            tier.read(
                np.ascontiguousarray(slot[part]), part, counts[sources], staging.numpy(), counters
            )
            first += part.size
        if slot.size:
            rows = staging.to(self._device, non_blocking=self._pinned)
            out.index_copy_(0, places, rows.to(out.dtype))
        return counters

    def close(self) -> None:
        """Close the tiers."""
        for tier, _ in self._tiers:
            tier.close()
        self._tiers = []
