"""Members of a NumPy .npz archive as mapped arrays, without holding one in memory."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.reading import reading
from runtime.npy import map_npy


def extract_npz(path: Path, scratch: Path) -> dict[str, NDArray[Any]]:
    """Unpack each member as a .npy file of the scratch folder and map it.

    Disk full while unpacking raises OSError, as any write does; everything wrong with the archive
    is a DatasetError.
    """
    out: dict[str, NDArray[Any]] = {}
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
                out[name] = map_npy(target)
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


def free_scratch(scratch: Path) -> None:
    """Remove the scratch folder (mapped files stay readable while they are mapped)."""
    shutil.rmtree(scratch)
