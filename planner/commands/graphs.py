"""`gnnplan graph`: generate, import and look at graph datasets."""

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from planner.commands.common import JsonFlag, bytes_text, console, emit_json, progress_bar
from runtime.graph.dataset import Graph, open_graph
from runtime.graph.generate import generate_rmat, generate_sbm
from runtime.graph.importing import ImportOptions, import_graph

app = typer.Typer(help="Generate, import and look at graph datasets.", no_args_is_help=True)


class Kind(StrEnum):
    """Generators."""

    RMAT = "rmat"
    SBM = "sbm"


class Format(StrEnum):
    """Formats that can be imported."""

    AUTO = "auto"
    NPZ = "npz"
    PYG = "pyg"
    OGB = "ogb"
    GRAPHBOLT = "graphbolt"
    EDGELIST = "edgelist"


@app.command()
def generate(
    kind: Annotated[Kind, typer.Argument(help="rmat (skewed degrees) or sbm (learnable).")],
    folder: Annotated[Path, typer.Argument(help="Dataset folder to write.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 10_000,
    degree: Annotated[float, typer.Option(help="Mean stored in-degree.")] = 15.0,
    features: Annotated[int, typer.Option(help="Feature columns (float32).")] = 64,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed; equal seeds give equal graphs.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Generate a seeded synthetic graph."""
    make = generate_rmat if kind is Kind.RMAT else generate_sbm
    with progress_bar("generate"):
        graph = make(
            folder,
            num_nodes=nodes,
            degree=degree,
            feature_dim=features,
            num_classes=classes,
            seed=seed,
        )
    _show(graph, as_json)


@app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="File or folder to read.")],
    folder: Annotated[Path, typer.Argument(help="Dataset folder to write.")],
    format: Annotated[Format, typer.Option(help="auto recognises the format.")] = Format.AUTO,
    features: Annotated[
        str, typer.Option(help="dense | sparse | project:D (seeded random projection) | auto.")
    ] = "auto",
    symmetrise: Annotated[bool, typer.Option(help="Store both directions of each edge.")] = False,
    self_loops: Annotated[str, typer.Option(help="keep | add | remove.")] = "keep",
    deduplicate: Annotated[bool, typer.Option(help="Keep each edge once.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Import a graph from another format."""
    options = ImportOptions(
        features=features,
        symmetrise=symmetrise,
        self_loops=self_loops,
        deduplicate=deduplicate,
    )
    screen = console(True)
    graph = import_graph(
        source,
        folder,
        format=format.value,
        options=options,
        report=lambda text: screen.print(text, markup=False),
    )
    _show(graph, as_json)


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(help="Dataset folder.")], as_json: JsonFlag = False
) -> None:
    """Check a dataset and show what is in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = open_graph(folder)
    for warning in caught:
        console(True).print(f"warning: {warning.message}", markup=False)
    _show(graph, as_json)


def facts(graph: Graph) -> dict[str, object]:
    """What `graph info --json` prints."""
    return {
        "name": graph.name,
        "path": str(graph.path),
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "mean_degree": graph.num_edges / max(graph.num_nodes, 1),
        "feature_dim": graph.feature_dim,
        "feature_dtype": graph.feature_dtype,
        "feature_storage": "none"
        if graph.topology_only
        else ("sparse" if graph.x is None else "dense"),
        "num_classes": graph.num_classes,
        "task": str(graph.task),
        "num_train": len(graph.train_idx),
        "num_val": len(graph.val_idx),
        "num_test": len(graph.test_idx),
        "topology_bytes": graph.indptr.nbytes + graph.indices.nbytes,
        "feature_bytes": graph.num_nodes * graph.row_bytes,
        "fingerprint": graph.fingerprint,
    }


def _show(graph: Graph, as_json: bool) -> None:
    values = facts(graph)
    if as_json:
        emit_json(values)
        return
    table = Table(show_header=False, box=None)
    for key, value in values.items():
        if key.endswith("_bytes"):
            text = bytes_text(float(str(value)))
        elif isinstance(value, int):
            text = f"{value:,}"
        else:
            text = f"{value:.2f}" if isinstance(value, float) else str(value)
        table.add_row(key.replace("_", " "), text)
    console().print(table)
