"""Leaving process groups while everything that uses them is still whole.

torch 2.13 notes Python's context in every collective that a backward pass starts, and gloo's thread
keeps the last of them until the group is gone. DistributedDataParallel's reducer is freed with the
interpreter's lock held. Where it is the group's last owner, since a script left the group first and
dropped its model after, it joins gloo's thread, which waits for that lock: both wait for ever.
Groups that Python itself drops last give the lock away first.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def groups_left_last() -> Iterator[None]:
    """Inside, groups that are left live on; at the end all are left, after what was made inside.

    A group that is still there at the end is left too: at the interpreter's own end its thread
    would ask for a lock that is no more.
    """
    kept: list[Any] = []
    leave: Callable[..., None] = dist.destroy_process_group

    def leave_later(group: Any = None) -> None:
        if dist.is_initialized():
            kept.append(dist.group.WORLD if group is None else group)
        leave(group)

    dist.destroy_process_group = leave_later
    try:
        yield
    finally:
        dist.destroy_process_group = leave
    gc.collect()
    if dist.is_initialized():
        leave()
    kept.clear()
