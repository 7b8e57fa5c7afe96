"""`python -m tests.silicon.one NAME [--emulate]`: one experiment in this process.

Its JSON lines go to stdout; what it raises is its failure.
"""

import importlib
import os
import sys


def main(arguments: list[str]) -> None:
    """Run the experiment that is named."""
    emulated = "--emulate" in arguments
    if emulated:
        # Triton decides when a kernel is defined whether to interpret it: before its first import.
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from tests.silicon.experiments import EXPERIMENTS
    from tests.silicon.setting import Setting

    (name,) = [each for each in arguments if not each.startswith("--")]
    (experiment,) = [each for each in EXPERIMENTS if each.name == name]
    module, function = experiment.entry.split(":")
    entry = getattr(importlib.import_module(module), function)
    entry(Setting(emulated=emulated), **dict(experiment.arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
