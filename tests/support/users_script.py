"""What a user's script does under `gnnplan launch`: `users_script.py HOW ...`, for tests."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from gnnplan.runtime.loader.loader import PlannedLoader


def main(how: str, *words: str) -> None:
    rank = int(os.environ["RANK"])
    if how == "exit":
        loader = PlannedLoader()
        shown = [rank, len(loader), __name__, Path.cwd().name, os.environ["OMP_NUM_THREADS"]]
        # How ranks compute: huge pages asked for, numbers too small to compute with fast are 0.
        shown += [os.environ["GLIBC_TUNABLES"], float(torch.tensor(2e-38) * 0.5)]
        sys.stdout.write(repr([*shown, *words[1:]]) + "\n")
        sys.stdout.flush()
        loader.close()
        exit_after_the_other(rank, int(words[0]))
    elif how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    time.sleep(600)


def exit_after_the_other(rank: int, code: int) -> None:
    """End rank 1 with a code once rank 0 has come as far, which goes on."""
    shown = Path("shown")
    if rank == 0:
        shown.touch()
        return
    while not shown.exists():
        time.sleep(0.02)
    shown.unlink()
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
