"""Members of a NumPy .npz archive as mapped arrays, without holding one in memory."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.inventory import Inventory
from runtime.graph.pickled import PickledArray
from runtime.graph.reading import reading
from runtime.npy import map_npy, read_header

PICKLED = "pickled objects are not read"


def extract_npz(path: Path, scratch: Path) -> dict[str, NDArray[Any] | PickledArray]:
    """Unpack each member as a .npy file of the scratch folder and map it.

    Members of pickled objects are unpacked and not read.

    Disk full while unpacking raises OSError, as any write does; everything wrong with the archive
    is a DatasetError.
    """
    out: dict[str, NDArray[Any] | PickledArray] = {}
    with reading(path, "a NumPy .npz archive"):
        archive = zipfile.ZipFile(path)
    with archive:
        for number, info in enumerate(archive.infolist()):
            if not info.filename.endswith(".npy") or info.file_size > 1 << 50:
                raise DatasetError(
                    f"{path}: expected members named *.npy, found {info.filename!r:.80}"
                )
            target = scratch / f"{path.stem}-{number}.npy"
            _unpack(path, archive, info, target)
            name = info.filename.removesuffix(".npy")
            with reading(path, f"a .npy array as member {name!r:.80}"):
                out[name] = _pickled(target) or map_npy(target)
    return out


def _unpack(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    with target.open("wb") as file:
        with reading(path, "a NumPy .npz archive"):
            member = archive.open(info)
        with member:
            while True:
                with reading(path, "a NumPy .npz archive"):
                    block = member.read(1 << 22)
                if not block:
                    return
                file.write(block)


def plain_members(
    path: Path, scratch: Path, inventory: Inventory, place: str = ""
) -> dict[str, NDArray[Any]]:
    """Unpack and map the members of plain values; the inventory gets the names of all."""
    out: dict[str, NDArray[Any]] = {}
    for name, value in extract_npz(path, scratch).items():
        if isinstance(value, PickledArray):
            inventory.leave(PICKLED, name, place=place)
        else:
            out[name] = value
            inventory.meet([name], place)
    return out


def _pickled(path: Path) -> PickledArray | None:
    """A member of pickled objects; None where it holds plain values."""
    with path.open("rb") as file:
        _, _, dtype = read_header(file)
        return PickledArray(path, file.tell()) if dtype.hasobject else None


def free_scratch(scratch: Path) -> None:
    """Remove the scratch folder (mapped files stay readable while they are mapped)."""
    shutil.rmtree(scratch)
