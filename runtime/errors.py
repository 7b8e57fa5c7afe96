"""Errors of the runtime as one tree, and the warning of a slower path.

GnnplanError              anything this package raises on purpose
  InputError                the user's input is wrong (exit code 2)
    DatasetError            a graph dataset is missing, damaged or inconsistent
    PlanError               a plan is missing, damaged or does not match
    SamplerError            sampler settings cannot be used
  CollectiveError           a collective would break a rule of the GPUs' library
  BudgetExceeded            a memory budget would be passed; carries the sum
  WorkerFailed              a rank of a job failed; carries its error

Where a GPU lacks what its fast path needs (Triton, page-locked memory), the same plan runs by the
host's gather and samplers, with the same batches and losses and one `SlowerPathWarning`.
"""

import difflib
import threading
import warnings
from collections.abc import Iterable

_warned: set[str] = set()
_lock = threading.Lock()


class GnnplanError(Exception):
    """Anything the runtime raises on purpose; its text may be shown to a user."""


class InputError(GnnplanError):
    r"""The input is wrong: one line says what was expected, what was found and what to do.

    Text that is quoted from a file may hold anything: line ends and other unprintable characters
    are shown as Python writes them.

    >>> print(InputError("found no 'indices' among a\nb"))
    found no 'indices' among a\nb
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """Return a question that names what a wrong name is like; empty where it is like nothing.

    >>> did_you_mean("Nieghbor", ["neighbor", "labor", "ladies"])
    ' (did you mean neighbor?)'
    >>> did_you_mean("zoo", ["neighbor", "labor"])
    ''
    """
    names = {name.lower(): name for name in known}
    alike = difflib.get_close_matches(found.lower(), names, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(names[name] for name in alike)}?)" if alike else ""


class DatasetError(InputError):
    """A graph dataset is missing, damaged or inconsistent."""


class PlanError(InputError):
    """A plan is missing, damaged, or names another graph or machine."""


class SamplerError(InputError):
    """Sampler settings cannot be used with this graph."""


class BudgetExceeded(GnnplanError):
    """A memory budget would be passed; the text is the sum that does not fit."""


class CollectiveError(GnnplanError):
    """A collective breaks a rule of the GPUs' library; the text says which."""


class WorkerFailed(GnnplanError):
    """A rank of a job failed; the text is that rank's own error."""


class SlowerPathWarning(RuntimeWarning):
    """The plan runs on a slower path than it was made for; the text says why and what to do."""


def warn_once(key: str, text: str, kind: type[Warning] = SlowerPathWarning) -> None:
    """Warn the first time that `key` comes in this process.

    The text says what happens instead, why, and what to do.
    """
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(text, kind, stacklevel=3)


def forget_warnings() -> None:
    """Let every warning come again, for tests."""
    with _lock:
        _warned.clear()
