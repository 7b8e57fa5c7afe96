"""Which models a request may name: importing one runs its code."""

from collections.abc import Sequence
from pathlib import Path

from api.errors import ForbiddenError
from planner.settings import MODELS
from runtime.errors import InputError


def check_model(name: str, allowed: Sequence[str]) -> None:
    """Let through the runtime's own models and those on the list.

    Args:
        name: sage, gcn ... or module:factory.
        allowed: modules, or module:factory, each by its whole name.

    Raises:
        ForbiddenError: it is neither.
    """
    module = name.partition(":")[0]
    if name in MODELS or (":" in name and (name in allowed or module in allowed)):
        return
    known = ", ".join([*MODELS, *allowed])
    raise ForbiddenError(
        f"expected a model among {known}, found {name!r}; who runs the service can allow it with "
        "--allow-model",
        kind="model-not-allowed",
    )


class OutsideRootsError(PermissionError, InputError):
    """A path that leaves the configured roots; its text never says what lies outside."""


def dataset_folder(roots: Sequence[Path], name: str) -> Path:
    """The folder of a dataset that a request names, every file of it inside the roots.

    Args:
        roots: folders that may be read.
        name: relative to a root, or absolute.

    Raises:
        OutsideRootsError: the path, or a file in the folder, leads out of the roots.
        InputError: there is no such folder.
    """
    folder = confined(roots, name)
    try:
        files = list(folder.iterdir())
    except OSError as error:
        # A folder that is not there, is a file, has too long a name, or may not be read.
        found = "none" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"{name}: expected a dataset folder, found {found}") from None
    real = [root.resolve() for root in roots]
    for path in files:
        if not _inside(path.resolve(), real):
            raise OutsideRootsError(f"{name}/{path.name}: expected a file inside the graph roots")
    return folder


def confined(roots: Sequence[Path], name: str) -> Path:
    """A path with every link followed, inside one of the roots.

    Raises:
        OutsideRootsError: it leads out of all of them, or is no path.
    """
    if "\0" in name or len(name) > 4096:
        raise OutsideRootsError(
            "expected a path, found one with a zero byte or over 4096 characters"
        )
    real = [root.resolve() for root in roots]
    found: Path | None = None
    for root in real:
        try:
            path = (root / name).resolve()
        except (OSError, RuntimeError, ValueError):
            continue  # a loop of links, or a name that no file can have
        if _inside(path, real):
            found = path if found is None or (_exists(path) and not _exists(found)) else found
    if found is None:
        raise OutsideRootsError(f"{name}: expected a path inside the graph roots of the service")
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
