"""Modules under the names that they had before: `import planner.solver.lp` finds its present place.

`moved.txt` lists old and new names, one pair a line. Nothing in gnnplan imports by an old name.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("api", "planner", "runtime")


class MovedModules(MetaPathFinder, Loader):
    """Finds a module that has moved, and gives the one at its new place, never a second copy."""

    def __init__(self, places: dict[str, str]) -> None:
        self.places = places

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A specification for names in the table; None leaves a name to Python."""
        del path, target
        return ModuleSpec(fullname, self) if fullname in self.places else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the empty one."""
        present = importlib.import_module(self.places[module.__name__])
        if not hasattr(present, "__path__") and self._was_package(module.__name__):
            present.__path__ = []  # Python asks for it before it looks for modules within.
        sys.modules[module.__name__] = present

    def _was_package(self, name: str) -> bool:
        return any(old.startswith(f"{name}.") for old in self.places)


def read_places() -> dict[str, str]:
    """Old name -> new name, for names that no package has today."""
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return dict(line.split() for line in lines)


def find_moved_modules() -> None:
    """Let imports by old names succeed in this process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules(read_places()))


def names_of(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a package with a former module's name: the names of that module."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(name)
        package = module.rpartition(".")[0]
        within = find_spec(f"{package}.{name}")
        if within is not None and within.loader is not None:
            # `from package import name` asks here first and imports the module after this.
            raise AttributeError(name)
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return __getattr__
