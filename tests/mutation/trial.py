"""Plant one fault in a copy of the tree and run the tests nearest to it until one fails.

A failing test counts only where it fails once more, and passes on the tree without the fault.
Tests that do not are set aside, with their names in the record.
"""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import pytest

from tests.mutation.draw import PRODUCT, Mutant, plant
from tests.mutation.nearest import Imports, name_of, nearest_tests, read_imports, users_of

Outcome = Literal["killed", "survived", "inconclusive"]
QUICK = "not slow and not distributed"
SEVERAL = "distributed and not slow"
GROUPS = (4, 8, 16, 32, 64, 10_000)
"""Test files that are run together, nearest first."""
TEST_SECONDS = 90
"""A test that takes longer hangs: twice with the fault, and not without it."""
FAILED = re.compile(r"(FAILED|ERROR) (?:collecting )?(tests/\S+?\.py(?:::\S.*?)?)(?: - .*)?$")
DONE = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a fault."""

    outcome: Outcome
    how: str
    """A failed test, a test that hung, an import that failed; for others the reason."""
    test: str = ""
    files_run: int = 0
    """Test files that passed, ..."""
    files_near: int = 0
    """... of so many that reach the module."""
    set_aside: list[str] = field(default_factory=list)


class Tree:
    """A copy of what git tracks, with Python's and numba's caches; faults go into copies of it."""

    def __init__(self, root: Path, place: Path, names: Sequence[str] | None = None) -> None:
        load_libraries()
        self.base, self.planted = place / "base", place / "planted"
        for name in _tracked(root) if names is None else names:
            _copy(root / name, self.base / name)
        folders = {path.parent for path in self.base.rglob("*.py")}
        for folder in folders:
            for path in (root / folder.relative_to(self.base) / "__pycache__").glob("*.*"):
                _copy(path, folder / "__pycache__" / path.name)
        self.imports: Imports = read_imports(self.base)
        self.users = users_of(self.imports)

    def plant(self, mutant: Mutant) -> None:
        """Make the planted copy; kernels that may have inlined the file are compiled anew."""
        shutil.rmtree(self.planted, ignore_errors=True)
        shutil.copytree(self.base, self.planted, copy_function=os.link)
        path = self.planted / mutant.file
        text = plant(path.read_text(), mutant)
        path.unlink()
        path.write_text(text)
        for stale in self.kernels_above(mutant.file):
            for cached in (self.planted / stale).parent.glob(
                f"__pycache__/{Path(stale).stem}.*.nb*"
            ):
                cached.unlink()

    def keep_kernels(self, mutant: Mutant) -> None:
        """Take over kernels that were compiled without the fault."""
        stale = {(self.planted / name).with_suffix("") for name in self.kernels_above(mutant.file)}
        for cached in self.planted.rglob("__pycache__/*.nb*"):
            known = self.base / cached.relative_to(self.planted)
            if cached.parent.parent / cached.name.split(".")[0] in stale:
                continue
            if not known.exists() or not known.samefile(cached):
                _copy(cached, known)

    def kernels_above(self, file: str) -> list[str]:
        """The file and those with kernels that reach it by imports among such files."""
        module = name_of(self.base, self.base / file)
        reached, layer = [module], [module]
        while layer:
            users = {user for name in layer for user in self.users[name]} - set(reached)
            layer = sorted(user for user in users if self._has_kernels(user))
            reached += layer
        return [file, *(self._file(name) for name in reached[1:])]

    def _file(self, module: str) -> str:
        path = module.removeprefix("gnnplan.").replace(".", "/")
        return f"{path}.py" if (self.base / f"{path}.py").exists() else f"{path}/__init__.py"

    def _has_kernels(self, module: str) -> bool:
        pattern = r"^@\w*(kernel|jit|intrinsic|overload)|^@numba\."
        return bool(re.search(pattern, (self.base / self._file(module)).read_text(), re.M))

    def nearest_files(self, file: str) -> list[str]:
        """Paths of test files that reach a file of the product, nearest first."""
        module = name_of(self.base, self.base / file)
        return [self._file(test) for test in nearest_tests(self.imports, module)]


def load_libraries() -> None:
    """Load what most tests load; forks of this process then start in a third of the time."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    for name in ("torch", "numba", "scipy.sparse", "sqlalchemy"):
        importlib.import_module(name)
    if not sys.modules["torch"].cuda.is_available():  # as tests/conftest.py has it
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    importlib.import_module("torch_geometric")


def _tracked(root: Path) -> list[str]:
    """Files that git tracks, and new ones that it does not ignore."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=root, capture_output=True, check=True, text=True).stdout
    return [name for name in names.split("\0") if (root / name).is_file()]


def _copy(source: Path, target: Path) -> None:
    """With its time, by which Python and numba know that their caches are good."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy2(source, target)


@dataclass(frozen=True)
class Ran:
    """A run of tests: passed, or what failed first and how; stopped for want of time."""

    passed: bool
    test: str = ""
    how: str = ""
    late: bool = False


def judge_mutant(tree: Tree, mutant: Mutant, seconds: float) -> Verdict:
    """Run tests, nearest first, until one fails or the time is over."""
    try:
        tree.plant(mutant)
    except LookupError as error:
        return Verdict(outcome="inconclusive", how=str(error))
    trial = Trial(tree, tree.nearest_files(mutant.file), time.monotonic() + seconds)
    try:
        return trial.judge()
    finally:
        tree.keep_kernels(mutant)


@dataclass
class Trial:
    """A planted fault, its test files and what was found so far."""

    tree: Tree
    near: list[str]
    end: float
    begun: int = 0
    passed: int = 0
    aside: list[str] = field(default_factory=list)

    def judge(self) -> Verdict:
        """Run the files in groups, those of one process before those of several."""
        for size in GROUPS:
            group = self.near[self.begun : self.begun + size]
            for marks in (QUICK, SEVERAL):
                files = [file for file in group if file not in self.aside]
                found = self.first_failure(files, marks) if files else Ran(True)
                if found.late:
                    return self.verdict("survived", "out of time")
                if not found.passed:
                    return self.verdict("killed", found.how, found.test)
            self.begun += len(group)
            self.passed += sum(file not in self.aside for file in group)
        return self.verdict("survived", "no test failed")

    def first_failure(self, files: list[str], marks: str) -> Ran:
        """The first test that fails by the fault; passed where none does."""
        while True:
            found = run_tests(self.tree.planted, files, marks, self.end, self.aside)
            if found.passed or found.late or self.is_the_faults(found.test, marks):
                return found
            self.aside.append(found.test)
            files = [file for file in files if file != found.test]  # one that cannot be imported
            if not files:
                return Ran(True)

    def is_the_faults(self, test: str, marks: str) -> bool:
        """Whether a test fails again with the fault, and passes without it."""
        end = time.monotonic() + 3 * TEST_SECONDS
        again = run_tests(self.tree.planted, [test], marks, end, [])
        return not again.passed and run_tests(self.tree.base, [test], marks, end, []).passed

    def verdict(self, outcome: Outcome, how: str, test: str = "") -> Verdict:
        """What is recorded; where tests fail without the fault too, little is known of it."""
        if outcome == "survived" and self.passed <= self.begun / 2:
            outcome = "inconclusive"
        return Verdict(
            outcome=outcome,
            how=how,
            test=test,
            files_run=self.passed,
            files_near=len(self.near),
            set_aside=self.aside,
        )


def run_tests(
    tree: Path, tests: Sequence[str], marks: str, end: float, aside: Sequence[str]
) -> Ran:
    """Run tests of a tree until one fails; a test that hangs is ended with all it started."""
    words = ["-v", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", marks]
    words += [*(f"--deselect={test}" for test in aside), *tests]
    log = tree.parent / "log"
    ended = _run_until(words, tree, log, end)
    lines = log.read_text(errors="replace").splitlines()
    if ended == "hung":
        return Ran(False, _under_way(lines) or tests[0], "a test hung")
    if ended == "late":
        return Ran(False, late=True)
    if ended in (0, 5):
        return Ran(True)
    for line in lines:
        found = FAILED.match(line)
        if found and "::" in found[2]:
            return Ran(False, found[2], "a test failed")
        if found:
            return Ran(False, found[2], "an import failed")
    how = "an import failed" if ended in (2, 4) else f"pytest ended with {ended}"
    return Ran(False, tests[0], how)


def _run_until(
    words: list[str], tree: Path, log: Path, end: float
) -> int | Literal["hung", "late"]:
    """Exit code of pytest, which is ended where it says nothing for too long, or at the end.

    It runs in a fork of this process, which has loaded the libraries and none of the product.
    """
    log.write_bytes(b"")
    process = os.fork()
    if process == 0:
        _become_pytest(words, tree, log)
    size, since, ended = -1, time.monotonic(), False
    try:
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
            if log.stat().st_size != size:
                size, since = log.stat().st_size, time.monotonic()
            if time.monotonic() - since > TEST_SECONDS:
                return "hung"
            if time.monotonic() > end:
                return "late"
    finally:
        if not ended:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _become_pytest(words: list[str], tree: Path, log: Path) -> NoReturn:
    """Run pytest in a tree, as a new command there would."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path.insert(0, str(tree))
        ours = (*PRODUCT, "gnnplan", "tests")
        for name in [name for name in sys.modules if name.split(".")[0] in ours]:
            del sys.modules[name]
        importlib.invalidate_caches()
        code = int(pytest.main(words))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)


def _under_way(lines: Sequence[str]) -> str:
    """The test that was named and has no result."""
    named = [line for line in lines if line.startswith("tests/") and "::" in line]
    return named[-1].split(" ")[0] if named and not any(w in named[-1] for w in DONE) else ""
