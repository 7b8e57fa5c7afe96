"""What makes two planning requests the same: content of graph and machine, settings, version."""

import functools
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import open_graph


def request_key(
    graph: str, machine: MachineModel, settings: PlanSettings, factors: Mapping[str, float]
) -> str:
    """Hash of everything that decides a plan but the profile, which is cached by the same.

    Args:
        graph: fingerprint of the dataset.
        machine: whom the plan is for.
        settings: the request.
        factors: calibration by stage; empty: the raw model.
    """
    return codec.content_hash(
        [
            version("gnnplan"),
            graph,
            [machine.fingerprint, machine.calibration, machine.name],
            settings,
            dict(factors),
        ]
    )


def graph_fingerprint(folder: Path) -> str:
    """Fingerprint of a dataset; hashed again only where a file of it has changed.

    Raises:
        DatasetError: the folder holds no dataset, or one that cannot be read.
    """
    try:
        return _fingerprint(folder, state_of(folder))
    except OSError as error:
        raise DatasetError(
            f"{folder.name}: expected files that can be read, found {error.strerror}"
        ) from None


def state_of(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Names, sizes, times and inodes of a dataset's files."""
    found: list[tuple[str, int, int, int]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        stat = path.stat()
        found.append((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _fingerprint(folder: Path, state: tuple[tuple[str, int, int, int], ...]) -> str:
    del state
    return open_graph(folder, validate=False).fingerprint
