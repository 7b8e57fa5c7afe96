"""The format of a graph dataset, and reading its description with errors of one line.

indptr.npy   int64 [num_nodes + 1]         in-neighbours of v: indices[indptr[v]:indptr[v + 1]]
indices.npy  int32 or int64 [num_edges]
x.npy        float16 or float32 [num_nodes, feature_dim]           (dense features)
x_indptr.npy int64, x_indices.npy int32, x_data.npy float          (CSR features)
x_<type>.npy one dense table per node type, in order of node id    (typed features)
y.npy        int64 [num_nodes], or [num_nodes, num_classes] of 0/1 (multilabel); -1 is unknown
train_idx.npy, val_idx.npy, test_idx.npy   int64 node ids; for task link [k, 2] node pairs
                                           (source, destination) of the positive edges
edge_weight.npy float32, edge_type.npy int32 [num_edges]; node_type.npy int32 [num_nodes]
edge_id.npy  int64 [num_edges]   position in the source's own edge order of the edge at indices[k];
                                 -1: a self-loop added on import. No file: the order is the source's
graph.json   all else (`GraphMeta`)
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.npy import map_npy

FORMAT_VERSION = 1
META_FILE = "graph.json"

Task = Literal["multiclass", "multilabel", "binary", "link"]
TASKS: tuple[Task, ...] = ("multiclass", "multilabel", "binary", "link")
FeatureStorage = Literal["none", "dense", "sparse", "typed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """Making of projected features from the source's, so that others can be made alike."""

    source_dim: int
    target_dim: int
    seed: int
    density: float
    """Share of non-zero entries of the projection matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphMeta:
    """The content of `graph.json`."""

    format_version: int = FORMAT_VERSION
    name: str
    num_nodes: int
    num_edges: int
    feature_dim: int
    """Columns of a feature row; may be declared where there are no features."""
    feature_dtype: Literal["float16", "float32"] = "float32"
    feature_storage: FeatureStorage = "none"
    num_classes: int = 0
    task: Task = "multiclass"
    fingerprint: str = ""
    """Hash of the content when it was written; a reader computes its own."""
    node_types: list[str] = field(default_factory=list)
    edge_types: list[str] = field(default_factory=list)
    projection: Projection | None = None
    notes: list[str] = field(default_factory=list)
    """One line per decision taken on import."""

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"expected format_version {FORMAT_VERSION}, found {self.format_version}"
            )
        if self.num_nodes < 1 or self.num_edges < 1:
            raise ValueError(
                "expected at least one node and one edge, found an empty graph of "
                f"{self.num_nodes} nodes and {self.num_edges} edges"
            )
        if self.feature_dim < 0 or self.num_classes < 0:
            raise ValueError("expected feature_dim and num_classes of 0 or more")
        for name in self.node_types:
            if not re.fullmatch(r"[\w.\-]+", name):
                raise ValueError(f"expected node types of letters, digits, _ . -, found {name!r}")


def read_meta(folder: Path) -> GraphMeta:
    """Read and check `graph.json` of a dataset folder."""
    path = folder / META_FILE
    if not path.is_file():
        found = "no such folder" if not folder.exists() else f"no {META_FILE} in it"
        raise DatasetError(
            f"{folder}: expected a graph dataset folder, found {found}; "
            "make one with `gnnplan graph import` or `gnnplan graph generate`"
        )
    try:
        return codec.decode(GraphMeta, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        text = str(error).splitlines()[0]
        raise DatasetError(f"{path}: not a valid dataset description ({text})") from None


@contextmanager
def refuse_unreadable(path: Path, what: str) -> Iterator[None]:
    """Turn any failure of the wrapped code, which reads `what` at `path`, into a DatasetError.

    A damaged file makes parsers raise nearly anything (zlib, struct, pickle, yaml, arrow).
    """
    try:
        yield
    except (DatasetError, ModuleNotFoundError):
        raise
    except FileNotFoundError:
        raise DatasetError(f"{path}: expected {what}, found no such file") from None
    except Exception as error:
        raise DatasetError(
            f"{path}: expected {what}, found a file that cannot be read ({one_line(error)}); "
            "write or download it again"
        ) from error


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, shortened; its type where it has no text."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def map_array(path: Path) -> NDArray[Any]:
    """Map a .npy file into memory, read-only."""
    with refuse_unreadable(path, "a .npy array"):
        return map_npy(path)
