"""What every timing process does: import, say so, then build and measure request after request.

A process is started by `planner.profiling.team` as `python -m MODULE`. It reads one JSON request a
line, answers "ready" when what it asks for is built, measures on the next line, and answers with
the result.
"""

import importlib
import json
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime import codec

Measure = Callable[[], Any]
"""Measures what was built; its answer is a dataclass that the codec knows."""


def serve(
    read: Callable[[], str],
    write: Callable[[str], None],
    *,
    libraries: Sequence[str],
    build: Callable[[Any], Measure],
    rehearse: Callable[[], bool] | None = None,
) -> None:
    """Answer requests until an empty line or the end of the input.

    Args:
        read: the next line, empty at the end.
        write: sends one line.
        libraries: modules that a rank has imported; their bytes are a process's own.
        build: from a request as plain data.
        rehearse: does what a rank does in small, so that what loads at its first use is counted;
            says whether something was compiled first.
    """
    from runtime.device import flush_denormals
    from runtime.models.memory import keep_freed_memory

    for library in libraries:
        importlib.import_module(library)
    keep_freed_memory()
    flush_denormals()
    compiled = rehearse is not None and rehearse()
    write(json.dumps({"resident_bytes": private_bytes(), "compiled": compiled}))
    while line := read().strip():
        measure = build(json.loads(line))
        write("ready")
        read()
        write(json.dumps(codec.to_plain(measure())))


def serve_standard_streams(
    libraries: Sequence[str],
    build: Callable[[Any], Measure],
    rehearse: Callable[[], bool] | None = None,
) -> None:
    """Serve the process's own input and output."""

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    serve(sys.stdin.readline, write, libraries=libraries, build=build, rehearse=rehearse)


def private_bytes() -> int:
    """Resident bytes of this process that no file backs; the peak where the system tells no more.

    Libraries' code is shared between ranks and not counted.
    """
    try:
        with open("/proc/self/smaps_rollup") as file:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        return int(fields["Anonymous"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def half_width(values: list[float]) -> float:
    """Relative half-width (90%) of the median of repeats, from their quartiles.

    >>> round(half_width([1.0, 1.0, 2.0, 3.0, 3.0]), 3)
    0.682
    """
    low, middle, high = np.percentile(values, (25, 50, 75))
    # The median of n repeats varies 1.25 times as much as their mean; IQR / 1.349 is sigma.
    sigma = (high - low) / 1.349
    return float(1.645 * 1.25 * sigma / np.sqrt(len(values)) / middle) if middle > 0 else 0.0
