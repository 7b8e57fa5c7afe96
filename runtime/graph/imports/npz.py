"""Import of .npz packs, in the layouts that graph data sets are published in.

    ours           indptr, indices (CSC); x, or x_indptr, x_indices, x_data, x_shape; y; train_mask,
                   val_mask, test_mask or train_idx ...; train_masks ... ([splits, n]);
                   edge_weight, edge_type, node_type; meta (JSON)
    GNN-benchmark  adj_data, adj_indices, adj_indptr, adj_shape (or adj_matrix.data ...), the same
                   of attr; labels. Others keep a pickled SciPy matrix as adj_matrix and
                   attr_matrix: its arrays are taken without running the pickle (`serialized.py`).
    heterophilous  edges [E, 2], node_features, node_labels, train_masks, val_masks, test_masks
    as PyG         edge_index [2, E], from its first row to its second; the rest as ours
    SciPy          what scipy.sparse.save_npz writes, csr, csc or coo

A matrix has an edge from its row to its column. Each member is unpacked and mapped when it is first
asked for (`NpzArchive`): an archive that lacks one is refused before a byte is written.
"""

import io
import json
import shutil
import zipfile
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import EdgeSource, array_edges, csc_edges, csr_edges
from gnnplan.runtime.graph.dataset import SparseFeatures
from gnnplan.runtime.graph.format import (
    check_csc_ends,
    check_monotone,
    check_range,
    refuse_unreadable,
)
from gnnplan.runtime.graph.imports.inventory import Inventory, Role
from gnnplan.runtime.graph.imports.labels import split_fields, split_ids
from gnnplan.runtime.graph.imports.serialized import PickledArray, unpickle
from gnnplan.runtime.graph.imports.source import (
    ImportOptions,
    RawFeatures,
    RawGraph,
    check_pairs,
    count_ends,
    make_features,
)
from gnnplan.runtime.graph.imports.tables import as_numbers
from gnnplan.runtime.npy import map_npy, read_header

LABELS = ("y", "labels", "node_labels", "label", "node_label")
FEATURES = ("x", "features", "node_features", "attr_matrix", "node_attr", "feat")
MATRICES = ("adj", "adj_matrix")
PAIRS = ("edges", "edge_index")
ATTRIBUTES = ("attr", "attr_matrix", "node_attr")
EDGE_VALUES = (("edge_weight", Role.WEIGHTS, np.float32), ("edge_type", Role.EDGE_TYPES, np.int32))
_PARTS = ("data", "indices", "indptr", "shape")
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


def read_npz(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read a pack of any of these layouts."""
    return _Pack(source, NpzArchive(source, scratch), options).read()


class _Pack:
    def __init__(self, source: Path, members: NpzArchive, options: ImportOptions) -> None:
        self.source = source
        self.members = members
        self.options = options
        self.inventory = Inventory()
        self.inventory.meet(members)
        self.notes: list[str] = []

    def read(self) -> RawGraph:
        edges, num_nodes = self._edges()
        meta = self._meta()
        features, y = self._features(), self._labels()
        split, num_splits = self._split(num_nodes)
        self.inventory.leave_unused(PICKLED, *self.members.pickled())
        return RawGraph(
            name=str(meta.get("name") or self.source.stem),
            num_nodes=num_nodes,
            edges=edges,
            features=features,
            y=y,
            task=_task(meta, y),
            num_classes=_count(meta.get("num_classes")),
            split=split,
            num_splits=num_splits,
            node_type=self._node_type(),
            notes=self.notes,
            inventory=self.inventory,
        )

    def _edges(self) -> tuple[EdgeSource, int]:
        if "indptr" in self.members and "indices" in self.members:
            if "format" not in self.members:
                return self._csc()
            return self._matrix("", self._text("format"))
        if {"row", "col", "shape"} <= set(self.members):
            return self._coo()
        for stem in MATRICES:
            if self._has_parts(stem):
                return self._matrix(stem, "csr")
        for name in PAIRS:
            if name in self.members:
                return self._pairs(name)
        missing = "indices" if "indptr" in self.members else "indptr"
        raise DatasetError(
            f"{self.source}: expected an .npz pack with indptr and indices (or adj_indptr ..., "
            f"adj_matrix, row and col, edges, or edge_index), found no {missing!r} among "
            f"{', '.join(sorted(self.members)) or 'its members'!s:.200}"
        )

    def _csc(self) -> tuple[EdgeSource, int]:
        indptr, indices = self._pointers("indptr", "indices")
        self.inventory.use(Role.EDGES, "indptr", "indices")
        return csc_edges(indptr, indices, **self._values("", len(indices))), len(indptr) - 1

    def _matrix(self, stem: str, kind: str) -> tuple[EdgeSource, int]:
        """Read the edges of a square CSR or CSC matrix, which go from row to column."""
        names = self._part_names(stem)
        if kind not in ("csr", "csc"):
            raise DatasetError(
                f"{self.source}: expected a matrix in csr, csc or coo, found {kind!r:.20}"
            )
        indptr, indices = self._pointers(names["indptr"], names["indices"])
        rows, columns = self._shape(names["shape"])
        if not rows == columns == len(indptr) - 1:
            raise DatasetError(
                f"{self.source}: expected a square matrix of edges, found {rows} by {columns} and "
                f"{len(indptr) - 1} pointers"
            )
        self._use_edges(names["indptr"], names["indices"], names["shape"])
        values = self._values(names["data"], len(indices))
        make = csr_edges if kind == "csr" else csc_edges
        return make(indptr, indices, **values), rows

    def _coo(self) -> tuple[EdgeSource, int]:
        src, dst = self._array("row"), self._array("col")
        both = np.result_type(src, dst)
        if both.kind not in "iu" or src.ndim != 1 or src.shape != dst.shape:
            raise DatasetError(
                f"{self.source}: expected row and col as equally long rows of integers, found "
                f"shapes {list(src.shape)} and {list(dst.shape)}"
            )
        rows, columns = self._shape("shape")
        if rows != columns:
            raise DatasetError(
                f"{self.source}: expected a square matrix, found {rows} by {columns}"
            )
        self._use_edges("row", "col", "shape")
        return array_edges(src, dst, **self._values("data", len(src))), rows

    def _use_edges(self, *names: str) -> None:
        present = [name for name in ("format",) if name in self.members]
        self.inventory.use(Role.EDGES, *names, *present)

    def _pairs(self, name: str) -> tuple[EdgeSource, int]:
        """Read edges as pairs of node numbers, by row or column; count nodes by other arrays."""
        pairs, by_row = self._array(name), name == "edges"
        if pairs.ndim == 2 and pairs.shape[by_row] != 2 and pairs.shape[1 - by_row] == 2:
            pairs = pairs.T
        check_pairs(self.source, name, pairs, by_row=by_row)
        pairs = pairs if by_row else pairs.T
        self.inventory.use(Role.EDGES, name)
        tables = [self.members[n] for n in (*FEATURES, *LABELS) if n in self.members]
        sizes = [len(t) for t in tables if isinstance(t, np.ndarray) and t.ndim]
        count = sizes[0] if sizes else count_ends(pairs)
        if by_row and not self.options.symmetrise:
            self.notes.append(
                "edges taken as stored; published packs of this layout name each undirected edge "
                "once (--symmetrise stores both directions)"
            )
        return array_edges(pairs[:, 0], pairs[:, 1], **self._values("", len(pairs))), count

    def _values(self, data: str, count: int) -> dict[str, NDArray[Any]]:
        """Read weights and types of the edges; weights may be the values of their matrix."""
        out: dict[str, NDArray[Any]] = {}
        for name, role, dtype in EDGE_VALUES:
            if name in self.members:
                values, weights = self._per_edge(name, count), role is Role.WEIGHTS
                out[name] = as_numbers(self.source / name, values, dtype, weights=weights)
                self.inventory.use(role, name)
        if data in self.members:
            weights = self._per_edge(data, count)
            if "edge_weight" in out:
                self.inventory.leave("the weights are edge_weight", data)
            elif bool((weights == 1).all()):
                self.inventory.leave("every edge weighs 1", data)
            else:
                out["edge_weight"] = as_numbers(
                    self.source / data, weights, np.float32, weights=True
                )
                self.inventory.use(Role.WEIGHTS, data)
        return out

    def _per_edge(self, name: str, count: int) -> NDArray[Any]:
        values = self._array(name)
        if values.shape != (count,) or values.dtype.kind not in "fiub":
            raise DatasetError(
                f"{self.source}: expected {name} with one number per edge ({count}), found "
                f"{values.dtype} of shape {list(values.shape)}"
            )
        return values

    def _node_type(self) -> NDArray[Any] | None:
        if "node_type" not in self.members:
            return None
        self.inventory.use(Role.NODE_TYPES, "node_type")
        return self._array("node_type")

    def _features(self) -> RawFeatures | None:
        for stem in ("x", *ATTRIBUTES):
            if self._has_parts(stem):
                return self._sparse(self._part_names(stem))
        name = next((n for n in FEATURES if n in self.members), None)
        if name is None:
            return None
        self.inventory.use(Role.FEATURES, name)
        return make_features(self.source, name, self._array(name))

    def _sparse(self, names: dict[str, str]) -> RawFeatures:
        with refuse_unreadable(self.source, f"{', '.join(names.values())} of one matrix"):
            data = self._array(names["data"])
            rows, dim = self._shape(names["shape"])
        indptr, indices = self._pointers(names["indptr"], names["indices"])
        if data.shape != indices.shape:
            raise DatasetError(
                f"{self.source}: expected {names['indices']} and {names['data']} of one length"
            )
        if rows != len(indptr) - 1:
            raise DatasetError(
                f"{self.source}: expected {len(indptr) - 1} rows in {names['shape']}, found {rows}"
            )
        check_range(self.source / names["indices"], indices, 0, dim, "feature columns")
        self.inventory.use(Role.FEATURES, *names.values())
        return RawFeatures(dim=dim, csr=SparseFeatures(indptr=indptr, indices=indices, data=data))

    def _labels(self) -> NDArray[Any] | None:
        name = next((n for n in LABELS if n in self.members), None)
        if name is None:
            return None
        self.inventory.use(Role.LABELS, name)
        return self._array(name)

    def _split(self, num_nodes: int) -> tuple[dict[str, NDArray[Any]] | None, int]:
        """Read the chosen split: of the single masks or ids, or one of several masks.

        A single mask may have several splits too, as columns. Returned with it is how many there
        are to choose from.
        """
        single = split_fields(self.members, "mask", "idx", "index")
        many = split_fields(self.members, "masks")
        index = self.options.split_index
        chosen, left = (many, single) if many and (index or not single) else (single, many)
        out: dict[str, NDArray[Any]] = {}
        counts = [1]
        for key, names in chosen.items():
            out[key], count = self._ids(names[0], num_nodes)
            counts.append(count)
            self.inventory.use(Role.SPLIT, names[0])
            self.inventory.leave(f"the split is taken from {names[0]}", *names[1:])
        for names in left.values():
            self.inventory.leave("one of several splits is taken: --split N takes another", *names)
        if left is many:
            counts += [self._ids(names[0], num_nodes)[1] for names in many.values()]
        return out or None, max(counts)

    def _ids(self, name: str, num_nodes: int) -> tuple[NDArray[np.int64], int]:
        """Return the node ids of the chosen split, and how many splits the array has."""
        return split_ids(
            name,
            self._array(name),
            num_nodes,
            index=self.options.split_index,
            splits_first=name.endswith("masks"),
        )

    def _meta(self) -> dict[str, Any]:
        if "meta" not in self.members:
            return {}
        self.inventory.use(Role.DESCRIPTION, "meta")
        with refuse_unreadable(self.source, "JSON text as member 'meta'"):
            meta = json.loads(str(self._array("meta")).removeprefix("\ufeff"))
        if not isinstance(meta, dict):
            raise DatasetError(f"{self.source}: expected member 'meta' to be a JSON object")
        return meta

    def _part_names(self, stem: str) -> dict[str, str]:
        """Name a compressed matrix's members: adj_data or adj.data, or data without a stem."""
        for joint in ("_", ".") if stem else ("",):
            if f"{stem}{joint}indptr" in self.members:
                return {part: f"{stem}{joint}{part}" for part in _PARTS}
        return {part: f"{stem}_{part}" for part in _PARTS}

    def _has_parts(self, stem: str) -> bool:
        self._open_pickled(stem)
        return self._part_names(stem)["indptr"] in self.members

    def _open_pickled(self, stem: str) -> None:
        """Put the parts of a pickled matrix beside it, as if they were members."""
        value = self.members.get(stem)
        if not isinstance(value, PickledArray):
            return
        found = unpickle(self.source, stem, value)
        if isinstance(found, np.ndarray):
            self.members[stem] = found
            return
        del self.members[stem]
        self.inventory.use(Role.EDGES if stem in MATRICES else Role.FEATURES, stem)
        for part, array in found.items():
            self.members[f"{stem}.{part}"] = array

    def _array(self, name: str) -> NDArray[Any]:
        value = self.members.get(name)
        if value is None:
            raise DatasetError(f"{self.source}: expected a member {name!r:.60}, found none")
        if isinstance(value, PickledArray):
            found = unpickle(self.source, name, value)
            if not isinstance(found, np.ndarray):
                raise DatasetError(
                    f"{self.source}: expected {name} as an array, found a pickled matrix"
                )
            return found
        return value

    def _text(self, name: str) -> str:
        value = self._array(name)
        text = value.reshape(-1)[0] if value.size == 1 else ""
        return text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)

    def _shape(self, name: str) -> tuple[int, int]:
        shape = self._array(name)
        if shape.size != 2 or shape.dtype.kind not in "iu":
            raise DatasetError(f"{self.source}: expected {name} as two integers")
        rows, columns = (int(n) for n in shape.reshape(-1))
        return rows, columns

    def _pointers(self, indptr: str, indices: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Read pointers and indices in this machine's integers, checked against each other."""
        pointers, entries = self._array(indptr), self._array(indices)
        for name, array in ((indices, entries), (indptr, pointers)):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise DatasetError(
                    f"{self.source}: expected {name} as a row of integers, found {array.dtype} of "
                    f"shape {list(array.shape)}"
                )
        path = self.source / indptr
        if len(pointers) < 1:
            raise DatasetError(f"{path}: expected at least one pointer, found none")
        pointers = pointers.astype(np.int64, copy=False)
        check_csc_ends(path, pointers, len(entries))
        check_monotone(path, pointers)
        return pointers, entries


def _task(meta: dict[str, Any], y: NDArray[Any] | None) -> str:
    if meta.get("multilabel") is True and y is not None and y.ndim == 2:
        return "multilabel"
    two = _count(meta.get("num_classes")) == 2
    return "binary" if two and meta.get("metric") == "ROC-AUC" else "auto"


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else 0
