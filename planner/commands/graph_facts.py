"""What `gnnplan graph info` shows of a dataset: all that is stored, and what was found in it."""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from planner.commands.common import bytes_text
from runtime import codec
from runtime.graph.dataset import Graph
from runtime.graph.findings import Finding, count_classes
from runtime.graph.validate import chunks

EDGE_DATA = ("edge_weight", "edge_type", "edge_id")
"""Arrays of one value per edge that a dataset may have."""


def graph_facts(graph: Graph) -> dict[str, object]:
    """What is known of a dataset without reading its arrays; printed after import and generate."""
    return {
        "name": graph.name,
        "path": str(graph.path),
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "mean_degree": graph.num_edges / max(graph.num_nodes, 1),
        "feature_dim": graph.feature_dim,
        "feature_dtype": graph.feature_dtype,
        "feature_storage": _feature_storage(graph),
        "num_classes": graph.num_classes,
        "task": str(graph.task),
        "num_train": len(graph.train_idx),
        "num_val": len(graph.val_idx),
        "num_test": len(graph.test_idx),
        "topology_bytes": graph.indptr.nbytes + graph.indices.nbytes,
        "feature_bytes": graph.num_nodes * graph.row_bytes,
        "node_types": list(graph.meta.node_types),
        "edge_types": list(graph.meta.edge_types),
        "edge_data": [name for name in EDGE_DATA if getattr(graph, name) is not None],
        "fingerprint": graph.fingerprint,
        "notes": list(graph.meta.notes),
    }


def all_facts(graph: Graph, findings: list[Finding]) -> dict[str, object]:
    """`graph_facts` and what the arrays hold; what `graph info --json` prints."""
    leaks = {f.array: f.count for f in findings if f.kind == "held_out_links"}
    return {
        **graph_facts(graph),
        "feature_tables": _feature_tables(graph),
        "projection": codec.to_plain(graph.meta.projection),
        "num_labelled": _num_labelled(graph.y),
        "num_classes_used": 0 if graph.y is None or graph.y.ndim > 1 else count_classes(graph.y),
        "source_numbers": [
            f"{name}.npy"
            for name in ("source_id", "edge_id", "class_id")
            if (graph.path / f"{name}.npy").is_file()
        ],
        "edge_weight": _range_of(graph.edge_weight),
        "edges_by_type": _by_type(graph.edge_type, graph.meta.edge_types),
        "nodes_by_type": _by_type(graph.node_type, graph.meta.node_types),
        "held_out_links_stored": {
            "val": leaks.get("val_idx", 0),
            "test": leaks.get("test_idx", 0),
        }
        if graph.task == "link"
        else None,
        "findings": findings,
    }


def facts_table(values: dict[str, Any]) -> Table:
    """One row per fact that there is; of the notes those that no finding repeats."""
    table = Table(show_header=False, box=None)
    found = {finding.note for finding in values.get("findings", [])}
    for key, value in values.items():
        if key == "findings":
            continue
        text = _text(key, [v for v in value if v not in found] if key == "notes" else value)
        if text:
            table.add_row(key.replace("_", " "), text)
    return table


def _text(key: str, value: Any) -> str:
    if isinstance(value, list):
        between = "\n" if key == "notes" else ", "
        return between.join(str(each) for each in cast(list[object], value))
    if isinstance(value, dict):
        parts = cast(dict[str, Any], value)
        return ", ".join(f"{name} {_text('', each)}" for name, each in parts.items())
    if value is None:
        return ""
    if key.endswith("_bytes"):
        return bytes_text(float(str(value)))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}" if key else f"{value:.4g}"
    return str(value)


def _feature_storage(graph: Graph) -> str:
    if graph.topology_only:
        return "none"
    if graph.x_by_type:
        return "dense by node type"
    return "sparse" if graph.x is None else "dense"


def _feature_tables(graph: Graph) -> dict[str, str]:
    """Type and shape of each feature array."""
    tables = {f"x_{name}": table for name, table in graph.x_by_type.items()}
    if graph.x is not None:
        tables["x"] = graph.x
    if graph.x_csr is not None:
        tables["x_data"] = graph.x_csr.data
    return {name: f"{table.dtype} {list(table.shape)}" for name, table in tables.items()}


def _num_labelled(y: NDArray[np.int64] | None) -> int:
    if y is None:
        return 0
    return sum(int((p >= 0).reshape(len(p), -1).any(axis=1).sum()) for p in chunks(y))


def _range_of(weights: NDArray[np.float32] | None) -> dict[str, float] | None:
    """Least, most and mean of the usable weights, and how many are 0."""
    if weights is None:
        return None
    low, high, total, zeros, count = np.inf, 0.0, 0.0, 0, 0
    for part in chunks(weights):
        usable = part[np.isfinite(part)]
        if len(usable):
            low, high = min(low, float(usable.min())), max(high, float(usable.max()))
        total += float(usable.sum(dtype=np.float64))
        zeros += int((usable == 0).sum())
        count += len(usable)
    if not count:
        return None
    return {"least": low, "most": high, "mean": total / count, "zeros": zeros}


def _by_type(types: NDArray[np.int32] | None, names: list[str]) -> dict[str, int] | None:
    if types is None:
        return None
    counts = np.zeros(max(len(names), int(types.max()) + 1), np.int64)
    for part in chunks(types):
        counts += np.bincount(part, minlength=len(counts))
    known = [*names, *map(str, range(len(names), len(counts)))]
    return dict(zip(known, counts.tolist(), strict=True))
