"""gnnplan's REST service."""

import sys
from importlib import import_module

if __name__ == "api":
    # The folder was found before the installed name: one module, whichever name it is imported by.
    sys.modules[__name__] = import_module("gnnplan.api")
