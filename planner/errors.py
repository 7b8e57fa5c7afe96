"""What can go wrong in the planner.

GnnplanError (runtime.errors)
  InputError                the user's input is wrong (exit code 2)
    MachineError            a machine file is missing, damaged or unknown
    SettingsError           planning settings contradict each other or the graph
  PlanDoesNotFit            no feasible plan (exit code 3); carries the sum that failed
"""

from runtime.errors import GnnplanError, InputError


class MachineError(InputError):
    """A machine file is missing, damaged or unknown."""


class SettingsError(InputError):
    """Planning settings contradict each other or the graph."""


class PlanDoesNotFit(GnnplanError):
    """No feasible plan; the text is the equation that failed, with every term."""
