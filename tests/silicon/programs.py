"""Tests and benchmarks of a GPU as experiments: each is a program that passes or fails."""

import os
import subprocess
import sys

from tests.silicon.setting import Setting

SANITIZER = ("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9", "--tool")
NOT_SANITIZED = "not (captured or one_graph or refused_locking)"
"""CUDA graphs want the caching allocator, which hides accesses beyond a tensor; what CUDA is asked
for to see it refused is an error to the sanitizer."""


def run_tests(setting: Setting, *, paths: tuple[str, ...], tool: str = "") -> None:
    """Run test files whose kernels take the GPU that is here.

    Args:
        setting: of the experiment; tests find the GPU by themselves.
        paths: files below the repository's root.
        tool: of compute-sanitizer (memcheck, racecheck); empty: without it.

    Raises:
        RuntimeError: a test failed.
    """
    del setting
    command = [sys.executable, "-m", "pytest", "-q", "-x", *paths, "-m"]
    if not tool:
        _run([*command, "not slow"])
        return
    command = [*SANITIZER, tool, *command, "not slow and not distributed", "-k", NOT_SANITIZED]
    _run(command, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def run_benchmark(setting: Setting, *, name: str, options: tuple[str, ...]) -> None:
    """Run a benchmark that prints JSON lines.

    Raises:
        RuntimeError: it ended with an error.
    """
    how = ("--interpret",) if setting.emulated else ()
    _run([sys.executable, "-m", f"tests.benchmarks.{name}", "--json", *options, *how])


def _run(command: list[str], **variables: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        said = (lines or done.stdout.strip().splitlines()[-1:] or ["nothing was said"])[0]
        raise RuntimeError(f"exit code {done.returncode}: {said}")
