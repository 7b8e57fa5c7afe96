"""What can go wrong in the runtime, as one tree.

GnnplanError              anything this package raises on purpose
  InputError                the user's input is wrong (exit code 2)
    DatasetError            a graph dataset is missing, damaged or inconsistent
    PlanError               a plan is missing, damaged or does not match
    SamplerError            sampler settings cannot be used
  BudgetExceeded            a memory budget would be passed; carries the sum
  WorkerFailed              a rank of a job failed; carries its error
"""


class GnnplanError(Exception):
    """Anything the runtime raises on purpose; its text is fit to be shown to a user."""


class InputError(GnnplanError):
    r"""The input is wrong: one line says what was expected, what was found and what to do.

    What is quoted from a file may hold anything: what is not printable, line ends first of all, is
    shown as Python writes it.

    >>> print(InputError("found no 'indices' among a\nb"))
    found no 'indices' among a\nb
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


class DatasetError(InputError):
    """A graph dataset is missing, damaged or inconsistent."""


class PlanError(InputError):
    """A plan is missing, damaged, or names another graph or machine."""


class SamplerError(InputError):
    """Sampler settings cannot be used with this graph."""


class BudgetExceeded(GnnplanError):
    """A memory budget would be passed; the text is the sum that does not fit."""


class WorkerFailed(GnnplanError):
    """A rank of a job failed; the text is that rank's own error."""
