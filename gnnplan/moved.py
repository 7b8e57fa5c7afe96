"""Former names of modules: `import planner.solver.lp` gives the module that is at its place today.

`moved.txt` lists former and present names without the leading `gnnplan.`, one pair a line; either
is imported with it too. All others are named as before: `runtime.loader` is
`gnnplan.runtime.loader`, the very same module. Nothing in gnnplan imports by a former name.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PRODUCT = "gnnplan"
PACKAGES = ("api", "planner", "runtime")
"""gnnplan's parts, which were installed under these names."""


class FormerNames(MetaPathFinder, InspectLoader):
    """Finds modules by former names and gives the present ones, never second copies.

    A package of the user's own with one of these names is left alone, with all that is in it.
    """

    def __init__(self, places: dict[str, str]) -> None:
        self.places = places

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Give a specification for modules within gnnplan's parts, and for former names."""
        del path, target
        package, dot, name = fullname.partition(".")
        if package == PRODUCT:
            if name not in self.places:
                return None
        else:
            whole = sys.modules.get(f"{PRODUCT}.{package}")
            if not dot or package not in PACKAGES or sys.modules.get(package) is not whole:
                return None
        present = self._find_present(fullname)
        return None if present is None else ModuleSpec(fullname, self, origin=present.origin)

    def exec_module(self, module: ModuleType) -> None:
        """Put the present module in the place of the empty one."""
        name = module.__name__
        present = importlib.import_module(self.present_name(name))
        if not hasattr(present, "__path__") and self._was_package(name):
            present.__path__ = []  # Python asks for it before it looks for modules within.
        sys.modules[name] = present

    def get_code(self, fullname: str) -> CodeType | None:
        """Give the present module's code, for `python -m`."""
        spec = self._find_present(fullname)
        loader = None if spec is None else spec.loader
        return loader.get_code(spec.name) if spec and isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        """Give no source: tracebacks show the present module's."""
        del fullname

    def is_package(self, fullname: str) -> bool:
        """Say no: a package is found under its present name."""
        del fullname
        return False

    def present_name(self, former: str) -> str:
        """Return the name that a module has today."""
        name = former.removeprefix(f"{PRODUCT}.")
        return f"{PRODUCT}.{self.places.get(name, name)}"

    def _find_present(self, former: str) -> ModuleSpec | None:
        try:
            return find_spec(self.present_name(former))
        except ModuleNotFoundError:
            return None

    def _was_package(self, former: str) -> bool:
        name = former.removeprefix(f"{PRODUCT}.")
        return any(each.startswith(f"{name}.") for each in self.places)


class FormerPackages(MetaPathFinder):
    """Finds gnnplan's parts by their own names, where nothing else has these names."""

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Give a specification for a part of gnnplan."""
        del path, target
        return ModuleSpec(fullname, FormerNames({})) if fullname in PACKAGES else None


def read_places() -> dict[str, str]:
    """Read the present name of each module that has moved, by its former name."""
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return dict(line.split() for line in lines)


def find_former_names() -> None:
    """Let imports by former names succeed in this process."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames(read_places()))
        sys.meta_path.append(FormerPackages())


def names_of(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package that was a module: it gives the names of `module`."""

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
