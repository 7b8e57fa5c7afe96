"""Members of a NumPy .npz archive as mapped arrays, each unpacked when it is first asked for.

An archive that lacks a member is thus refused before a byte is written.
"""

import io
import shutil
import zipfile
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.format import refuse_unreadable
from gnnplan.runtime.graph.imports.inventory import Inventory
from gnnplan.runtime.graph.imports.serialized import PickledArray
from gnnplan.runtime.npy import map_npy, read_header

PICKLED = "pickled objects are not read"
READ_BYTES = 1 << 22
HEAD_BYTES = 1 << 16
"""Bytes that hold the header of any member: NumPy reads no longer one."""


class NpzArchive(UserDict[str, Any]):
    """The arrays of an archive by name (without `.npy`), each unpacked and mapped on first use.

    Setting and deleting change this mapping, not the archive. A full disk raises OSError.
    """

    def __init__(self, path: Path, scratch: Path) -> None:
        super().__init__()
        self.path = path
        self.scratch = scratch
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._unpacked = 0
        with self._opened() as archive:
            members = archive.infolist()
        for info in members:
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                raise DatasetError(f"{path}: expected members named *.npy, found {name!r:.80}")
            if name in self._members:
                raise DatasetError(f"{path}: expected each member once, found {name!r:.80} twice")
            self._members[name] = self.data[name] = info

    def __getitem__(self, name: str) -> NDArray[Any] | PickledArray:
        value = self.data[name]
        if isinstance(value, zipfile.ZipInfo):
            value = self.data[name] = self._map(name, value)
        return value

    def pickled(self) -> list[str]:
        """List the members that hold pickled objects, by their headers alone."""
        members = [(name, info) for name, info in self._members.items() if name in self]
        with self._opened() as archive:
            return [name for name, info in members if self._is_pickled(archive, name, info)]

    def _opened(self) -> zipfile.ZipFile:
        with refuse_unreadable(self.path, "a NumPy .npz archive"):
            return zipfile.ZipFile(self.path)

    def _is_pickled(self, archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> bool:
        with refuse_unreadable(self.path, f"a .npy array as member {name!r:.80}"):
            with archive.open(info) as member:
                head = io.BytesIO(member.read(HEAD_BYTES))
            return read_header(head)[2].hasobject

    def _map(self, name: str, info: zipfile.ZipInfo) -> NDArray[Any] | PickledArray:
        check_room(self.path, self.scratch, name, info.file_size)
        self._unpacked += 1
        target = self.scratch / f"{self.path.stem}-{self._unpacked}.npy"
        with self._opened() as archive:
            _unpack(self.path, archive, info, target)
        with refuse_unreadable(self.path, f"a .npy array as member {name!r:.80}"):
            with target.open("rb") as file:
                if read_header(file)[2].hasobject:
                    return PickledArray(target, file.tell())
            return map_npy(target)


def check_room(path: Path, scratch: Path, name: str, num_bytes: int) -> None:
    """Refuse to unpack a member that the disk has no room for."""
    free = shutil.disk_usage(scratch).free
    if num_bytes > free:
        raise DatasetError(
            f"{path}: expected members that fit the disk, found {name!r:.80} of "
            f"{num_bytes / 1e9:,.3f} GB for {free / 1e9:,.3f} GB free at the output; free some "
            "space or choose an output on another disk"
        )


def _unpack(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    """Write one member; refuse bytes beyond the size that it claims."""
    left = info.file_size
    with target.open("wb") as file:
        with refuse_unreadable(path, "a NumPy .npz archive"):
            member = archive.open(info)
        with member:
            while left >= 0:
                with refuse_unreadable(path, "a NumPy .npz archive"):
                    block = member.read(READ_BYTES)  # one beyond the end checks the sum
                if not block:
                    return
                left -= len(block)
                if left < 0:
                    break
                file.write(block)
    raise DatasetError(
        f"{path}: expected {info.file_size} bytes in member {info.filename!r:.80}, found more; "
        "write or download it again"
    )


def open_plain_members(
    path: Path, scratch: Path, inventory: Inventory, place: str = ""
) -> Mapping[str, NDArray[Any]]:
    """Return the members of plain values, and tell the inventory all names."""
    archive = NpzArchive(path, scratch)
    for name in archive.pickled():
        inventory.leave(PICKLED, name, place=place)
        del archive[name]
    inventory.meet(archive, place)
    return cast(Mapping[str, NDArray[Any]], archive)
