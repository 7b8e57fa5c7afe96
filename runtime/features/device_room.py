"""How many rows a device has room for, and what becomes of those that find none."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.errors import BudgetExceeded
from runtime.features.location import LocationTable, encode
from runtime.memory_sum import planned_sum
from runtime.plan import Plan, Source

T = TypeVar("T")
_SMALLER = 0.75
"""What is left of the rows after each try that found no room."""
_HELD_ALREADY = ("own rows", "cache", "context", "reserve")
"""Parts of the plan's sum that are these rows, or that the device has given away already."""


def rows_of_room(plan: Plan, rank: int, device: torch.device, row_bytes: int) -> int | None:
    """Rows that the device has room for beside everything else that the plan has it hold.

    None where the device is no GPU: the host's memory is the plan's to bound.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    use = plan.prediction.memory_bytes.get(f"rank{rank}")
    parts = {} if use is None else dict(use.parts)
    others = sum(size for name, size in parts.items() if name not in _HELD_ALREADY)
    return max(0, free - others) // max(1, row_bytes)


def as_much_as_fits(planned: int, room: int | None, make: Callable[[int], T]) -> T:
    """make(count) with the largest count tried that the device has memory for.

    Raises:
        torch.OutOfMemoryError: not even make(0).
    """
    count = planned if room is None else min(planned, room)
    while True:
        try:
            return make(count)
        except torch.OutOfMemoryError:
            if count == 0:
                raise
            count = int(count * _SMALLER)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def without_rows(
    plan: Plan,
    rank: int,
    location: LocationTable,
    own_ids: Mapping[int, NDArray[np.int64]],
    kept: Mapping[int, int],
    *,
    device: torch.device,
    whole_dataset: bool,
) -> tuple[LocationTable, int] | None:
    """The location table with the rows that found no room on the host, or on disk.

    Args:
        plan: for its sum.
        rank: whose table it is.
        location: as planned.
        own_ids: ids of own rows by rank, as planned.
        kept: rows that found room, by rank.
        device: where they found none.
        whole_dataset: whether this host holds every row.

    Returns:
        The table and the number of the source that they are read from; None where all found room.

    Raises:
        BudgetExceeded: this host does not hold them.
    """
    if all(kept.get(holder, ids.size) >= ids.size for holder, ids in own_ids.items()):
        return None
    codes, sources = location.codes, list(location.sources)
    numbers, slots = location.decode(np.arange(codes.size))
    lost = np.zeros(codes.size, np.bool_)
    for number, source in enumerate(sources):
        holder = rank if source.kind == "own" else source.rank
        if source.kind in ("own", "peer") and holder in kept:
            lost |= (numbers == number) & (slots >= kept[holder])
    if not lost.any():
        return None
    kinds = [source.kind for source in sources]
    if whole_dataset and "host" not in kinds:
        sources.append(Source(kind="host"))
        kinds.append("host")
    instead = next((kinds.index(kind) for kind in ("host", "disk") if kind in kinds), -1)
    if instead < 0 or not whole_dataset:
        raise BudgetExceeded(
            f"rank {rank}: {int(lost.sum())} rows find no room on {device} and this host does not "
            f"hold them; {planned_sum(plan, rank)}; plan again with a smaller --device-memory"
        )
    numbers, slots = numbers.astype(np.int64), slots.copy()
    numbers[lost], slots[lost] = instead, np.flatnonzero(lost)
    return LocationTable(encode(numbers, slots), sources), instead
