"""`python -m tests.silicon.one NAME... [--emulate] [--seconds=N]`: experiments in one process.

JSON lines go to stdout; what an experiment raises is its failure, and the others run all the same.
After its lines comes one that says its error and its seconds. After an error of the GPU the process
ends, since its next calls would all fail. Whoever starts it ends it after N seconds; experiments
that do more in more time see what is left of them.
"""

import importlib
import math
import os
import sys
import time
import traceback

from tests.silicon.queue import ENDED, SPOILED, Experiment


def main(arguments: list[str]) -> int:
    """Run the experiments that are named; returns the exit code."""
    start, emulated = time.monotonic(), "--emulate" in arguments
    seconds = [float(each.partition("=")[2]) for each in arguments if each.startswith("--seconds=")]
    if emulated:
        # Triton decides when a kernel is defined whether to interpret it: before its first import.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from tests.benchmarks.common import record
    from tests.silicon.experiments import EXPERIMENTS
    from tests.silicon.setting import Setting

    setting = Setting(emulated=emulated, until=start + min(seconds, default=math.inf))
    known = {each.name: each for each in EXPERIMENTS}

    def run(experiment: Experiment) -> str:
        module, function = experiment.entry.split(":")
        try:
            entry = getattr(importlib.import_module(module), function)
            entry(setting, **dict(experiment.arguments))
        except Exception as error:
            traceback.print_exc()
            return " ".join("".join(traceback.format_exception_only(error)).split())[:500]
        return ""

    errors = list[str]()
    for name in (each for each in arguments if not each.startswith("--")):
        start = time.monotonic()
        errors.append(run(known[name]))
        record(ENDED, time.monotonic() - start, "s", error=errors[-1])
        try:
            setting.release()
        except RuntimeError:
            traceback.print_exc()
            return SPOILED
    return 1 if any(errors) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
