"""`python -m runtime.script_rank SCRIPT [args]`: one rank of a user's own script under a plan.

Before the script's first line the rank gets the plan's cores and threads, a heartbeat that its
watcher sees, and the promise that it does not outlive torchrun.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from runtime.comm.leaving import groups_left_last
from runtime.device import flush_denormals
from runtime.heartbeat import Heartbeat
from runtime.loader_arguments import PLAN_VARIABLE
from runtime.models.memory import keep_freed_memory
from runtime.plan import load_plan
from runtime.process import die_first, use_threads
from runtime.torchrun import die_with


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
