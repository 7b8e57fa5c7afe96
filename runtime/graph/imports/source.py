"""What every format is read into before it becomes a dataset, and the options of an import."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gnnplan.runtime.device import usable_ram_bytes
from gnnplan.runtime.errors import DatasetError, did_you_mean
from gnnplan.runtime.graph.csc import (
    CHUNK_EDGES,
    Chunk,
    EdgeOptions,
    EdgeSource,
    SelfLoops,
    array_edges,
)
from gnnplan.runtime.graph.dataset import SparseFeatures
from gnnplan.runtime.graph.format import TASKS, check_range
from gnnplan.runtime.graph.imports.inventory import Inventory

SPLIT_KEYS = ("train", "val", "test")
BYTES_PER_NODE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """Choices of the user for converting a source into a dataset."""

    features: str = "auto"
    """auto | dense | sparse | project:D | none. auto: dense, or project:256 where dense would take
    more than a quarter of this machine's memory."""
    symmetrise: bool = False
    """Whether each edge is stored in both directions."""
    self_loops: str = "keep"
    """keep | add (each node without one gets one) | remove."""
    deduplicate: bool = False
    """Whether only the first of edges with equal ends is kept."""
    task: str = "auto"
    """auto | multiclass | multilabel | binary | link."""
    feature_dtype: str = "float32"
    """float32 | float16 (only for values that it holds exactly) | bfloat16 (rounded) | keep."""
    split_index: int = 0
    """Number of the split to take, where the source numbers several."""
    split_name: str = ""
    """Name of the split to take, where the source names several."""
    random_split: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """Shares of training, validation and test, where the source has no split."""
    seed: int = 0
    """Seed of the random split and of the random projection."""
    feature_dim: int = 0
    """Number of feature columns to draw at random, where the source has no features; with features
    none it is declared alone."""
    memory_limit_bytes: int = 1 << 30
    name: str = ""
    """Name of the dataset; empty takes the source's own."""

    def __post_init__(self) -> None:
        choices = {
            "self_loops": (self.self_loops, ("keep", "add", "remove")),
            "task": (self.task, ("auto", *TASKS)),
            "feature_dtype": (self.feature_dtype, ("float32", "float16", "bfloat16", "keep")),
        }
        for key, (value, allowed) in choices.items():
            if value not in allowed:
                raise DatasetError(
                    f"{key}: expected one of {', '.join(allowed)}, found {value!r}"
                    f"{did_you_mean(str(value), allowed)}"
                )
        parse_feature_choice(self.features)
        split = self.random_split
        if not all(0 <= share <= 1 for share in split) or sum(split) > 1 + 1e-9:
            raise DatasetError(
                f"random_split: expected shares that add up to at most 1, found {split}"
            )
        for key in ("seed", "feature_dim", "split_index"):
            if getattr(self, key) < 0:
                raise DatasetError(f"{key}: expected 0 or more, found {getattr(self, key)}")

    @property
    def draws(self) -> bool:
        """Whether features are drawn where the source has none."""
        return self.feature_dim > 0 and self.features != "none"

    @property
    def edges(self) -> EdgeOptions:
        """Options that concern edges."""
        return EdgeOptions(
            symmetrise=self.symmetrise,
            self_loops=cast(SelfLoops, self.self_loops),
            deduplicate=self.deduplicate,
        )


Storage = Literal["auto", "dense", "sparse", "project", "none"]


def parse_feature_choice(text: str) -> tuple[Storage, int]:
    """Parse `dense`, `sparse`, `project:D`, `none` or `auto` into the kind and D (0 without)."""
    if text in ("auto", "dense", "sparse", "none"):
        return cast(Storage, text), 0
    kind, _, number = text.partition(":")
    if kind == "project" and number.isdecimal() and 0 < int(number) <= 1 << 20:
        return "project", int(number)
    raise DatasetError(
        f"features: expected dense, sparse, project:D (D above 0), none or auto, found {text!r}"
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RawFeatures:
    """Features as the source has them: dense, or CSR with `dim` columns."""

    dim: int
    dense: NDArray[Any] | None = None
    csr: SparseFeatures | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        if self.dense is not None:
            return len(self.dense)
        return len(self.csr.indptr) - 1 if self.csr is not None else 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of values."""
        table = self.dense if self.dense is not None else self.csr.data if self.csr else None
        return np.dtype(np.float32) if table is None else table.dtype


@dataclass(kw_only=True, slots=True, eq=False)
class RawGraph:
    """A graph as a reader of a format hands it over; arrays may be mapped scratch files."""

    name: str
    num_nodes: int
    edges: EdgeSource
    features: RawFeatures | None = None
    y: NDArray[Any] | None = None
    """Labels of any numeric type: [N], [N, 1] or [N, C]; NaN and -1 are unknown."""
    task: str = "auto"
    num_classes: int = 0
    """Number of classes that the source declares; 0 counts them in the labels."""
    split: dict[str, NDArray[Any]] | None = None
    """Node ids by `train`, `val`, `test`; [k, 2] pairs for task link."""
    num_splits: int = 1
    """Number of splits among which `ImportOptions.split_index` chooses."""
    split_names: list[str] = field(default_factory=list)
    """Names of the splits among which `ImportOptions.split_name` chooses."""
    inventory: Inventory = field(default_factory=Inventory)
    """All parts of the source, and what became of each."""
    node_type: NDArray[Any] | None = None
    tables: dict[str, RawFeatures] = field(default_factory=dict[str, RawFeatures])
    """Features of each node type, by the type's number, instead of `features`."""
    edge_types: list[str] = field(default_factory=list)
    """Names of edge types, by the type's number."""
    source_id: NDArray[Any] | None = None
    """The source's own node ids, where nodes were renumbered."""
    class_id: NDArray[Any] | None = None
    """The source's own class numbers, where classes were renumbered."""
    notes: list[str] = field(default_factory=list)


EdgeKey = tuple[str, str, str]
"""Source node type, relation and target node type of an edge type."""


def edge_type_name(key: EdgeKey) -> str:
    """Return the name of an edge type in a dataset."""
    return "__".join(key)


@dataclass(kw_only=True, slots=True, eq=False)
class TypedParts:
    """A graph of several types as a reader finds it, the nodes of each type numbered from 0."""

    source: Path
    counts: dict[str, int]
    """Number of nodes of each type, in the order in which all are numbered."""
    pairs: dict[EdgeKey, NDArray[Any]] = field(default_factory=dict[EdgeKey, Any])
    """Ends of each type's edges, [2, edges]."""
    weights: dict[EdgeKey, NDArray[np.float32]] = field(default_factory=dict[EdgeKey, Any])
    tables: dict[str, RawFeatures] = field(default_factory=dict[str, RawFeatures])
    y: dict[str, NDArray[Any]] = field(default_factory=dict[str, Any])
    """Labels of the nodes of each type that has them."""
    split: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict[str, Any])
    """Node ids within their type by `train`, `val`, `test`, for each type that has a split."""

    def join(self, options: ImportOptions, **rest: Any) -> RawGraph:
        """Return one graph of all types; `rest` are further fields of it."""
        self._check(options)
        check_num_nodes(sum(self.counts.values()))
        raw = RawGraph(num_nodes=sum(self.counts.values()), edges=array_edges(*_NO_EDGES), **rest)
        starts = np.cumsum([0, *self.counts.values()])[:-1].tolist()
        first = dict(zip(self.counts, starts, strict=True))
        raw.edges = self._edges(first, raw.notes, symmetrise=options.symmetrise)
        raw.edge_types = [edge_type_name(key) for key in self.pairs]
        raw.tables = {name: self._table(name, raw.notes) for name in self.counts}
        numbers = np.arange(len(self.counts), dtype=np.int32)
        raw.node_type = np.repeat(numbers, list(self.counts.values()))
        target = self._target(raw.inventory)
        if target:
            raw.y = self._labels(target, first[target], raw.num_nodes)
            own = self.split.get(target, {})
            raw.split = {key: ids + first[target] for key, ids in own.items()} or None
        return raw

    def _check(self, options: ImportOptions) -> None:
        if options.deduplicate or options.self_loops != "keep":
            raise DatasetError(
                f"{self.source}: expected no change of edges but --symmetrise: a typed graph keeps "
                "them as they are; change them before saving, as T.RemoveDuplicatedEdges() does"
            )
        if not self.pairs:
            raise DatasetError(f"{self.source}: expected at least one edge type, found none")
        for name in (*self.counts, *(part for key in self.pairs for part in key)):
            if "__" in name or "/" in name:
                raise DatasetError(
                    f"{self.source}: expected type names without __ and /, found {name!r:.80}; "
                    "rename it before saving"
                )

    def _edges(self, first: dict[str, int], notes: list[str], *, symmetrise: bool) -> EdgeSource:
        """Number all edges' ends over all types, each edge by its place within its type.

        The types' own arrays are read a chunk at a time: they may be files larger than memory.
        """
        for key, found in self.pairs.items():
            for row, name in enumerate((key[0], key[2])):
                path = self.source / edge_type_name(key)
                check_range(path, found[row], 0, self.counts.get(name, 0), f"nodes of type {name}")
        if symmetrise:
            self._mirror(notes)
        attributes: dict[str, DTypeLike] = {"edge_type": np.int32, "edge_id": np.int64}
        if self.weights:
            attributes["edge_weight"] = np.float32
            without = [edge_type_name(key) for key in self.pairs if key not in self.weights]
            if without:
                notes.append(f"edge weights: 1 for edges of {', '.join(without)}, which have none")
        # Within a node type, the reverses follow the edges of which they are.
        ways = {key: (False, True)[: 1 + (symmetrise and key[0] == key[2])] for key in self.pairs}

        def chunks() -> Iterator[Chunk]:
            for number, (key, found) in enumerate(self.pairs.items()):
                for back in ways[key]:
                    for start in range(0, found.shape[1], CHUNK_EDGES):
                        yield self._read(number, key, start, (first[key[0]], first[key[2]]), back)

        count = sum(found.shape[1] * len(ways[key]) for key, found in self.pairs.items())
        return EdgeSource(num_edges=count, chunks=chunks, attributes=attributes)

    def _read(
        self, number: int, key: EdgeKey, start: int, first: tuple[int, int], back: bool
    ) -> Chunk:
        """Return one chunk of the edges of a type, from number `start` on.

        With `back` each edge is turned around, and self-loops, which stay what they are, are left
        out.
        """
        part = slice(start, start + CHUNK_EDGES)
        src, dst = (row.astype(np.int64) for row in self.pairs[key][:, part])
        length = len(src)
        out: Chunk = {
            "src": (dst if back else src) + first[0],
            "dst": (src if back else dst) + first[1],
            "edge_type": np.full(length, number, np.int32),
            "edge_id": np.arange(start, start + length),
        }
        if self.weights:
            own = self.weights.get(key)
            out["edge_weight"] = np.ones(length, np.float32) if own is None else own[part]
        kept = src != dst if back else slice(None)
        return {name: array[kept] for name, array in out.items()}

    def _mirror(self, notes: list[str]) -> None:
        """Add a type rev_... of the reverses of each type of edges between two node types."""
        for key, found in list(self.pairs.items()):
            source, relation, target = key
            if source == target:
                continue
            reverse = (target, f"rev_{relation}", source)
            if reverse in self.pairs:
                raise DatasetError(
                    f"{self.source}: expected no edge type {edge_type_name(reverse)} for "
                    "--symmetrise, which would make it, found one: leave --symmetrise out"
                )
            self.pairs[reverse] = found[::-1]
            if key in self.weights:
                self.weights[reverse] = self.weights[key]
            notes.append(f"edge types: {edge_type_name(reverse)} added, the edges of {relation}")

    def _table(self, name: str, notes: list[str]) -> RawFeatures:
        """Return a type's features; one column of ones where it has none, which is said."""
        table, count = self.tables.get(name), self.counts[name]
        if table is None:
            notes.append(f"features: {name} has none, so one column of ones stands for them")
            return RawFeatures(dim=1, dense=np.ones((count, 1), np.float32))
        if table.num_rows != count:
            raise DatasetError(
                f"{self.source}: expected features x of {name} with one row per node ({count}), "
                f"found {table.num_rows}"
            )
        return table

    def _target(self, inventory: Inventory) -> str:
        """Return the one node type whose labels are learnt; empty where none has labels."""
        named = [n for n in self.y if self.split.get(n)] if len(self.y) > 1 else list(self.y)
        if self.y and len(named) != 1:
            raise DatasetError(
                f"{self.source}: expected labels of one node type, found those of "
                f"{', '.join(self.y)}; leave the split to the one to learn, or drop y of others"
            )
        for other in self.y:
            if other != named[0]:
                inventory.leave(f"labels are those of {named[0]}", "y", place=other)
        return named[0] if named else ""

    def _labels(self, name: str, first: int, total: int) -> NDArray[Any]:
        own = self.y[name]
        own = own[:, 0] if own.ndim == 2 and own.shape[1] == 1 else own
        if own.ndim not in (1, 2) or len(own) != self.counts[name]:
            raise DatasetError(
                f"{self.source}: expected y of {name} with one row per node "
                f"({self.counts[name]}), found shape {list(own.shape)}"
            )
        if own.dtype.kind not in "fiub":
            raise DatasetError(
                f"{self.source}: expected y of {name} as numbers, found values of {own.dtype}"
            )
        y = np.full((total, *own.shape[1:]), -1, own.dtype if own.dtype.kind in "if" else np.int64)
        y[first : first + len(own)] = own
        return y


_NO_EDGES = (np.empty(0, np.int64), np.empty(0, np.int64))


def check_pairs(path: Path, name: str, pairs: NDArray[Any], *, by_row: bool = False) -> None:
    """Check for two integers per edge: [2, edges], or [edges, 2] `by_row`."""
    form = "[edges, 2]" if by_row else "[2, edges]"
    if pairs.ndim != 2 or pairs.shape[int(by_row)] != 2 or pairs.dtype.kind not in "iu":
        raise DatasetError(
            f"{path}: expected {name} of integers {form}, found {pairs.dtype} of shape "
            f"{list(pairs.shape)}"
        )


def count_ends(ends: NDArray[Any]) -> int:
    """Return how many nodes numbered from 0 the ends of edges imply."""
    return int(ends.max()) + 1 if ends.size else 0


def make_features(path: Path, name: str, table: NDArray[Any]) -> RawFeatures:
    """Return a dense table [nodes, columns] as features."""
    if table.ndim != 2:
        raise DatasetError(f"{path}: expected {name} of two axes, found shape {list(table.shape)}")
    return RawFeatures(dim=table.shape[1], dense=table)


def sparse_features(table: Any) -> RawFeatures:
    """Return a SciPy CSR matrix [nodes, columns] as features."""
    csr = SparseFeatures(
        indptr=table.indptr.astype(np.int64), indices=table.indices, data=table.data
    )
    return RawFeatures(dim=int(table.shape[1]), csr=csr)


def note_negatives(notes: list[str], count: int) -> None:
    """Add a note on links labelled 0, which a link task does not take from the source."""
    if count:
        notes.append(f"{count} pairs labelled 0 left out: a link task draws its own negatives")


def check_lengths(raw: RawGraph) -> None:
    """Check that features, labels and node types have one row per node; name all that differ."""
    if raw.node_type is not None and raw.node_type.ndim != 1:
        raise DatasetError(
            f"node types: expected one per node ({raw.num_nodes}), found shape "
            f"{list(raw.node_type.shape)}"
        )
    rows = {
        name: len(array)
        for name, array in (("labels", raw.y), ("node types", raw.node_type))
        if array is not None and array.ndim
    }
    if raw.features is not None:
        rows["features"] = raw.features.num_rows
    if any(count != raw.num_nodes for count in rows.values()):
        found = ", ".join(f"{count} rows of {name}" for name, count in rows.items())
        raise DatasetError(f"expected one row per node ({raw.num_nodes}), found {found}")


def memory_bytes() -> int:
    """Return the bytes of memory that this process may use."""
    return usable_ram_bytes()


def check_num_nodes(num_nodes: int) -> None:
    """Refuse a node count, often a damaged one, whose per-node arrays exceed half of the memory."""
    usable = memory_bytes() // 2
    if num_nodes * BYTES_PER_NODE > usable:
        raise DatasetError(
            f"expected a number of nodes whose arrays fit in memory, found {num_nodes} nodes * "
            f"{BYTES_PER_NODE} bytes = {num_nodes * BYTES_PER_NODE / 1e9:.1f} GB > "
            f"{usable / 1e9:.1f} GB usable"
        )
