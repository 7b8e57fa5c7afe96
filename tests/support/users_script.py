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
    if how == "show":
        loader = PlannedLoader()
        shown = [rank, len(loader), __name__, Path.cwd().name, os.environ["OMP_NUM_THREADS"]]
        # How ranks compute: huge pages asked for, numbers too small to compute with fast are 0.
        shown += [os.environ["GLIBC_TUNABLES"], float(torch.tensor(2e-38) * 0.5)]
        sys.stdout.write(repr([*shown, *words]) + "\n")
        loader.close()
    elif how == "exit" and rank == 1:
        sys.exit(int(words[0]))
    elif how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how != "show":
        sys.stdout.write("waiting\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
