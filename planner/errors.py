"""Define the planner's errors.

GnnplanError (runtime.errors)
  InputError                the user's input is wrong (exit code 2)
    MachineError            a machine file is missing, damaged or unknown
    SettingsError           planning settings contradict each other or the graph
  PlanDoesNotFit            no feasible plan (exit code 3); carries the sum that failed
"""

from gnnplan.runtime.errors import GnnplanError, InputError


class MachineError(InputError):
    """A machine file is missing, damaged or unknown."""


class SettingsError(InputError):
    """Planning settings contradict each other or the graph."""


class PlanDoesNotFit(GnnplanError):
    """No feasible plan; the text is the equation that failed, with every term.

    Args:
        text: the equation.
        constraint: memory whose sum fails; empty where something else does.
        needed_bytes: bytes of the sum.
        available_bytes: bytes of the memory.
    """

    def __init__(
        self,
        text: str,
        *,
        constraint: str = "",
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        super().__init__(text)
        self.constraint = constraint
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
