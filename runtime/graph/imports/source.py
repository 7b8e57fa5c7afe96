"""What every format is read into before it becomes a dataset, and the options of an import."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.device import usable_ram_bytes
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import EdgeOptions, EdgeSource, SelfLoops
from gnnplan.runtime.graph.dataset import SparseFeatures
from gnnplan.runtime.graph.format import TASKS
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
    """float32 | float16 (only for values that float16 holds exactly) | keep."""
    split_index: int = 0
    """Number of the split to take, where the source numbers several."""
    split_name: str = ""
    """Name of the split to take, where the source names several."""
    random_split: tuple[float, float, float] = (0.6, 0.2, 0.2)
    """Shares of training, validation and test, where the source has no split."""
    seed: int = 0
    """Seed of the random split and of the random projection."""
    feature_dim: int = 0
    """Declared number of feature columns, where the source has no features."""
    memory_limit_bytes: int = 1 << 30
    name: str = ""
    """Name of the dataset; empty takes the source's own."""

    def __post_init__(self) -> None:
        choices = {
            "self_loops": (self.self_loops, ("keep", "add", "remove")),
            "task": (self.task, ("auto", *TASKS)),
            "feature_dtype": (self.feature_dtype, ("float32", "float16", "keep")),
        }
        for key, (value, allowed) in choices.items():
            if value not in allowed:
                raise DatasetError(f"{key}: expected one of {', '.join(allowed)}, found {value!r}")
        parse_feature_choice(self.features)
        if min(self.random_split) < 0 or sum(self.random_split) > 1 + 1e-9:
            raise DatasetError(
                f"random_split: expected shares that add up to at most 1, found {self.random_split}"
            )

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


def check_pairs(path: Path, name: str, pairs: NDArray[Any], *, by_row: bool = False) -> None:
    """Check for two integers per edge: [2, edges], or [edges, 2] `by_row`."""
    form = "[edges, 2]" if by_row else "[2, edges]"
    if pairs.ndim != 2 or pairs.shape[int(by_row)] != 2 or pairs.dtype.kind not in "iu":
        raise DatasetError(
            f"{path}: expected {name} of integers {form}, found {pairs.dtype} of shape "
            f"{list(pairs.shape)}"
        )


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
