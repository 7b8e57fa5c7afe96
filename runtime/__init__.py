"""gnnplan's runtime: executes a plan. Verbs are imported from their modules."""

import sys
from importlib import import_module

if __name__ == "runtime":
    # The folder was found before the installed package: both names stand for one module.
    sys.modules[__name__] = import_module("gnnplan.runtime")
