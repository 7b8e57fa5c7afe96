"""A rank of a user's script: `python -m gnnplan.runtime.launch.script_rank SCRIPT [args]`.

Before the script's first line the rank gets the plan's cores and threads, a heartbeat for its
watcher, and a tie to torchrun's life.

Process groups are left last. torch 2.13 notes Python's context in every collective that a backward
pass starts, and gloo's thread keeps the last one until the group is gone. If a script leaves its
group before it drops its model, DistributedDataParallel's reducer is the group's last owner: freed
with the interpreter's lock held, it joins gloo's thread, which waits for that lock, for ever.
Groups that Python itself drops last release the lock first.
"""

import gc
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gnnplan.runtime.device import flush_denormals
from gnnplan.runtime.faults.heartbeat import Heartbeat
from gnnplan.runtime.launch.torchrun import die_with
from gnnplan.runtime.loader.loader import PLAN_VARIABLE
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.process import die_first, keep_freed_memory, use_threads


@contextmanager
def groups_left_last() -> Iterator[None]:
    """Keep groups alive inside that are left; leave all at the end, after what was made inside.

    A group that is still there at the end is left too: later its thread would ask for a lock that
    is no more.
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


def main(arguments: list[str]) -> None:
    """Run the script as `__main__`; its exit code is this process's."""
    die_with(os.getppid(), signal.SIGKILL)
    keep_freed_memory()
    flush_denormals()
    die_first()
    plan = load_plan(Path(os.environ[PLAN_VARIABLE]))
    use_threads(plan, int(os.environ["RANK"]), pin=True)
    heartbeat = Heartbeat.join()
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path[0] = str(Path(script).parent)  # as `python script.py` has it
    with groups_left_last():
        runpy.run_path(script, run_name="__main__")
    heartbeat.close()


if __name__ == "__main__":
    main(sys.argv[1:])
