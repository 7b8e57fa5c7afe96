"""`gnnplan graph`: generate, import and inspect graph datasets."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from gnnplan.planner.cli import remote
from gnnplan.planner.cli.common import (
    JsonFlag,
    bytes_text,
    console,
    print_answer,
    progress_bar,
    table_of,
)
from gnnplan.planner.cli.remote import ServerOption
from gnnplan.planner.errors import SettingsError
from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError, did_you_mean
from gnnplan.runtime.npy import map_npy

if TYPE_CHECKING:
    from gnnplan.runtime.graph.dataset import Graph
    from gnnplan.runtime.graph.findings import Finding

EDGE_DATA = ("edge_weight", "edge_type", "edge_id")
SPLIT_NAMES = ("train", "val", "test")
APART = ("findings", "degrees", "splits", "arrays")
"""Facts that have a table of their own."""
BAR_WIDTH = 40
"""Columns of the longest bar of the picture of degrees."""


def graph_facts(graph: "Graph") -> dict[str, object]:
    """Return what is known of a dataset without reading its arrays."""
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


def all_facts(graph: "Graph", findings: "list[Finding]") -> dict[str, object]:
    """Return `graph_facts` and facts of the arrays, as `graph info --json` prints them."""
    from gnnplan.runtime.graph.findings import count_classes

    leaks = {f.array: f.count for f in findings if f.kind == "held_out_links"}
    return {
        **graph_facts(graph),
        "degrees": _degrees(graph),
        "splits": {name: _split_facts(graph, name) for name in SPLIT_NAMES},
        "arrays": _arrays(graph.path),
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
        "held_out_links_stored": {"val": leaks.get("val_idx", 0), "test": leaks.get("test_idx", 0)}
        if graph.task == "link"
        else None,
        "findings": findings,
    }


def facts_table(values: dict[str, Any]) -> Table:
    """Make a table of one row per fact; notes that repeat a finding are left out."""
    found = {finding.note for finding in values.get("findings", [])}
    texts = {
        key: _text(key, [v for v in value if v not in found] if key == "notes" else value)
        for key, value in values.items()
        if key not in APART
    }
    rows = [(key.replace("_", " "), text) for key, text in texts.items() if text]
    return table_of(("", ""), rows, show_header=False)


def _degrees(graph: "Graph") -> dict[str, Any]:
    """Return how many edges end at a node and leave it, and the histogram of the former."""
    from gnnplan.runtime.graph.format import chunks

    inward = np.diff(graph.indptr)
    outward = np.zeros(graph.num_nodes, np.int64)
    for part in chunks(graph.indices):
        np.add.at(outward, part, 1)
    levels = np.bincount(np.frexp(inward.astype(np.float64))[1])  # 0, 1, 2-3, 4-7, ...
    return {
        "in": _spread(inward),
        "out": _spread(outward),
        "isolated": int(((inward == 0) & (outward == 0)).sum()),
        "histogram": [
            {"least": 1 << level >> 1, "most": (1 << level) - 1, "nodes": count}
            for level, count in enumerate(levels.tolist())
        ],
    }


def _spread(degrees: NDArray[np.int64]) -> dict[str, float]:
    median, p90, p99 = (float(value) for value in np.percentile(degrees, [50, 90, 99]))
    return {
        "zero": int((degrees == 0).sum()),
        "least": int(degrees.min()),
        "median": median,
        "mean": float(degrees.mean()),
        "p90": p90,
        "p99": p99,
        "most": int(degrees.max()),
    }


def _split_facts(graph: "Graph", name: str) -> dict[str, float]:
    """Return the size of a part of the split, its share, and what is known of its nodes."""
    from gnnplan.runtime.graph.findings import count_classes

    ids: NDArray[np.int64] = getattr(graph, f"{name}_idx")
    if ids.ndim == 2:
        total = sum(len(getattr(graph, f"{each}_idx")) for each in SPLIT_NAMES)
        return {"links": len(ids), "share_of_links": len(ids) / max(total, 1)}
    degrees = graph.indptr[ids + 1] - graph.indptr[ids]
    out: dict[str, float] = {
        "nodes": len(ids),
        "share_of_nodes": len(ids) / graph.num_nodes,
        "mean_in_degree": float(degrees.mean()) if len(ids) else 0.0,
        "without_in_edge": int((degrees == 0).sum()),
    }
    if graph.y is not None:
        own = np.asarray(graph.y[ids])
        out["labelled"] = _num_labelled(own)
        out["classes"] = count_classes(own) if own.ndim == 1 else int((own > 0).any(axis=0).sum())
    return out


def _arrays(folder: Path) -> dict[str, dict[str, Any]]:
    """Return type, shape and bytes of every array file of a dataset, and of others there."""
    return {path.name: _array_facts(path) for path in sorted(folder.glob("*.npy"))}


def _array_facts(path: Path) -> dict[str, Any]:
    try:
        array = map_npy(path)
    except (OSError, ValueError):  # a user's own file: those of the dataset were read
        return {"dtype": "unreadable", "shape": [], "bytes": path.stat().st_size}
    return {"dtype": str(array.dtype), "shape": list(array.shape), "bytes": array.nbytes}


def _show_all(values: dict[str, Any]) -> None:
    """Print facts, the tables of what is stored, of degrees and splits, and a picture."""
    screen = console()
    screen.print(facts_table(values))
    arrays = [
        (name, each["dtype"], " x ".join(map(str, each["shape"])), bytes_text(each["bytes"]))
        for name, each in values["arrays"].items()
    ]
    screen.print("", table_of(("array", "type", "shape", "bytes"), arrays))
    splits = values["splits"]
    columns = [key.replace("_", " ") for key in splits["train"]]
    rows = [
        (name, *(_text(key, value) for key, value in row.items())) for name, row in splits.items()
    ]
    screen.print("", table_of(("split", *columns), rows))
    degrees = values["degrees"]
    ends = [
        (end, *(_text("degree", each) for each in degrees[end].values())) for end in ("in", "out")
    ]
    screen.print("", table_of(("edges of a node", *degrees["in"]), ends))
    screen.print("", _picture(degrees["histogram"], unicode=screen.encoding.startswith("utf")))


def _picture(histogram: list[dict[str, int]], *, unicode: bool) -> Table:
    """Draw the number of nodes by in-degree as bars of text."""
    most = max(each["nodes"] for each in histogram)
    bar = "\N{FULL BLOCK}" if unicode else "#"
    rows: list[tuple[str, str, str]] = []
    for each in histogram:
        low, high, count = each["least"], each["most"], each["nodes"]
        size = -(-BAR_WIDTH * count // most)
        rows.append((f"{low:,}" if low >= high else f"{low:,}-{high:,}", f"{count:,}", bar * size))
    return table_of(("in-degree", "nodes", ""), rows)


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


def _feature_storage(graph: "Graph") -> str:
    if graph.topology_only or graph.x_by_type:
        return "none" if graph.topology_only else "dense by node type"
    return "sparse" if graph.x is None else "dense"


def _feature_tables(graph: "Graph") -> dict[str, str]:
    from gnnplan.runtime.graph.format import row_type_name

    tables = {f"x_{name}": table for name, table in graph.x_by_type.items()}
    if graph.x is not None:
        tables["x"] = graph.x
    if graph.x_csr is not None:
        tables["x_data"] = graph.x_csr.data
    return {
        name: f"{row_type_name(table.dtype)} {list(table.shape)}" for name, table in tables.items()
    }


def _num_labelled(y: NDArray[np.int64] | None) -> int:
    from gnnplan.runtime.graph.format import chunks

    if y is None:
        return 0
    return sum(int((p >= 0).reshape(len(p), -1).any(axis=1).sum()) for p in chunks(y))


def _range_of(weights: NDArray[np.float32] | None) -> dict[str, float] | None:
    """Return least, most and mean of the usable weights, and the number of zeros."""
    from gnnplan.runtime.graph.format import chunks

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
    from gnnplan.runtime.graph.format import chunks

    if types is None:
        return None
    counts = np.zeros(max(len(names), int(types.max()) + 1), np.int64)
    for part in chunks(types):
        counts += np.bincount(part, minlength=len(counts))
    known = [*names, *map(str, range(len(names), len(counts)))]
    return dict(zip(known, counts.tolist(), strict=True))


KINDS = ("rmat", "sbm", "links", "typed")
PAPER_SHARE = 0.6
"""Share of papers among a typed graph's nodes; the others are authors."""

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Let an earlier dataset step aside, to DIR.previous.")
]

app = typer.Typer(help="Generate, import and look at graph datasets.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add `graph` to the top level."""
    parent.add_typer(app, name="graph")


@app.command()
def generate(
    kind: Annotated[
        str,
        typer.Argument(
            help="rmat (skewed degrees), sbm (learnable), links (link prediction), typed (papers "
            "and authors, for model rgcn), or like:NAME (a published data set's sizes, such as "
            "like:products, which the other sizes then do not change)."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Dataset folder to write.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 10_000,
    degree: Annotated[
        float, typer.Option(help="Mean stored in-degree (typed: papers cited by a paper).")
    ] = 15.0,
    features: Annotated[
        int, typer.Option(help="Feature columns, float32 (typed: of a paper; an author has half).")
    ] = 64,
    classes: Annotated[int, typer.Option(help="Number of classes (links: communities).")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed; equal seeds give equal graphs.")] = 0,
    scale: Annotated[
        float, typer.Option(help="like:NAME: share of the data set's nodes, degree kept.")
    ] = 0.01,
    overwrite: Overwrite = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate a seeded synthetic graph."""
    from gnnplan.planner.graph_presets import generate_like

    like, _, name = kind.partition(":")
    with progress_bar("generate"):
        if like == "like":
            graph = generate_like(folder, name, scale=scale, seed=seed, overwrite=overwrite)
        else:
            sizes = Sizes(nodes, degree, features, classes)
            graph = _generate(kind, folder, sizes, seed=seed, overwrite=overwrite)
    _show(graph_facts(graph), as_json)


class Sizes(NamedTuple):
    """Sizes of a generated graph; each kind reads them in its own way."""

    nodes: int
    degree: float
    features: int
    classes: int


def _generate(kind: str, folder: Path, sizes: Sizes, *, seed: int, overwrite: bool) -> "Graph":
    from gnnplan.runtime.graph.generate import (
        generate_links,
        generate_rmat,
        generate_sbm,
        generate_typed,
    )

    if kind not in KINDS:
        names = ", ".join(KINDS)
        raise SettingsError(
            f"expected a kind among {names} or like:NAME, found {kind!r}{did_you_mean(kind, KINDS)}"
        )
    if kind == "links":
        return generate_links(
            folder,
            num_nodes=sizes.nodes,
            degree=sizes.degree,
            feature_dim=sizes.features,
            num_communities=sizes.classes,
            seed=seed,
            overwrite=overwrite,
        )
    if kind == "typed":
        papers = max(1, round(sizes.nodes * PAPER_SHARE))
        return generate_typed(
            folder,
            num_papers=papers,
            num_authors=sizes.nodes - papers,
            cites=sizes.degree,
            paper_dim=sizes.features,
            author_dim=max(1, sizes.features // 2),
            num_classes=sizes.classes,
            seed=seed,
            overwrite=overwrite,
        )
    make = generate_rmat if kind == "rmat" else generate_sbm
    return make(
        folder,
        num_nodes=sizes.nodes,
        degree=sizes.degree,
        feature_dim=sizes.features,
        num_classes=sizes.classes,
        seed=seed,
        overwrite=overwrite,
    )


@app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="File or folder to read.")],
    folder: Annotated[Path, typer.Argument(help="Dataset folder to write.")],
    format: Annotated[
        Literal["auto", "npz", "pyg", "ogb", "graphbolt", "edgelist"],
        typer.Option(help="auto recognises the format."),
    ] = "auto",
    features: Annotated[
        str,
        typer.Option(help="auto | dense | sparse | project:D (seeded random projection) | none."),
    ] = "auto",
    feature_dtype: Annotated[
        str,
        typer.Option(
            help="float32 | float16 (only for values that it holds exactly) | bfloat16 (rounded; "
            "--precision bfloat16 reads such rows as they are) | keep (the source's)."
        ),
    ] = "float32",
    symmetrise: Annotated[bool, typer.Option(help="Store both directions of each edge.")] = False,
    self_loops: Annotated[str, typer.Option(help="keep | add | remove.")] = "keep",
    deduplicate: Annotated[bool, typer.Option(help="Keep each edge once.")] = False,
    split: Annotated[
        str, typer.Option(help="Which of several published splits: its number from 0, or its name.")
    ] = "",
    task: Annotated[
        str,
        typer.Option(
            help="auto | multiclass | multilabel | binary | link (of some edges, where the source "
            "has no links)."
        ),
    ] = "auto",
    feature_dim: Annotated[
        int,
        typer.Option(
            min=0,
            help="Columns of noise to draw where the source has no features, with --features none "
            "to declare alone, which is enough to plan; labels are drawn too where it has none.",
        ),
    ] = 0,
    overwrite: Overwrite = False,
    as_json: JsonFlag = False,
) -> None:
    """Import a graph from another format; what of it is not used is said."""
    from gnnplan.runtime.graph.findings import GraphWarning
    from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph

    options = ImportOptions(
        split_index=int(split) if split.isdecimal() else 0,
        split_name="" if split.isdecimal() else split,
        task=task,
        feature_dim=feature_dim,
        features=features,
        feature_dtype=feature_dtype,
        symmetrise=symmetrise,
        self_loops=self_loops,
        deduplicate=deduplicate,
    )
    screen = console(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)  # the report has them
        graph = import_graph(
            source,
            folder,
            format=format,
            options=options,
            report=lambda text: screen.print(text, markup=False, highlight=False, soft_wrap=True),
            overwrite=overwrite,
        )
    values = graph_facts(graph)
    if not as_json:
        del values["notes"]  # printed as they came
    _show(values, as_json)


@app.command()
def info(
    folder: Annotated[
        Path, typer.Argument(help="Dataset folder (with --server: below its graph roots).")
    ],
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a dataset and show what is in it; exit code 2 where no plan can use it."""
    if server is not None:
        with remote.service(server) as client:
            _show(codec.to_plain(client.graphs.get(str(folder))), as_json)
        return
    from gnnplan.planner.request import check_training_data
    from gnnplan.runtime.graph.dataset import inspect_graph

    graph, findings = inspect_graph(folder)
    print_answer(all_facts(graph, findings), _show_all, as_json=as_json)
    for finding in findings:
        text = f"{folder / finding.array}.npy: {finding.text}"
        if finding.fault:
            raise DatasetError(text)
        console(True).print(f"warning: {text}", markup=False, soft_wrap=True)
    check_training_data(graph)


def _show(values: dict[str, Any], as_json: bool) -> None:
    print_answer(values, lambda it: console().print(facts_table(it)), as_json=as_json)
