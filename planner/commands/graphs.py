"""`gnnplan graph`: generate, import and look at graph datasets."""

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from planner.commands import remote
from planner.commands.common import JsonFlag, bytes_text, console, emit_json, progress_bar
from planner.commands.remote import ServerOption
from planner.errors import SettingsError
from planner.graph_presets import generate_like
from runtime import codec
from runtime.graph.dataset import Graph, open_graph
from runtime.graph.generate import generate_rmat, generate_sbm
from runtime.graph.generate_links import generate_links
from runtime.graph.generate_typed import generate_typed

EDGE_DATA = ("edge_weight", "edge_type", "edge_id")
"""Arrays of one value per edge that a dataset may have."""
PAPER_SHARE = 0.6
"""Of a typed graph's nodes; the others are authors."""

app = typer.Typer(help="Generate, import and look at graph datasets.", no_args_is_help=True)


class Kind(StrEnum):
    """Generators."""

    RMAT = "rmat"
    SBM = "sbm"
    LINKS = "links"
    TYPED = "typed"


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
    seed: Annotated[int, typer.Option(help="Seed; equal seeds give equal graphs.")] = 0,
    scale: Annotated[
        float, typer.Option(help="like:NAME: share of the data set's nodes, degree kept.")
    ] = 0.01,
    as_json: JsonFlag = False,
) -> None:
    """Generate a seeded synthetic graph."""
    like, _, name = kind.partition(":")
    with progress_bar("generate"):
        if like == "like":
            graph = generate_like(folder, name, scale=scale, seed=seed)
        else:
            graph = _generate(_kind(kind), folder, nodes, degree, features, classes, seed)
    _show(facts(graph), as_json)


def _kind(text: str) -> Kind:
    if text not in [kind.value for kind in Kind]:
        names = ", ".join(Kind)
        raise SettingsError(f"expected a kind among {names} or like:NAME, found {text!r}")
    return Kind(text)


def _generate(
    kind: Kind, folder: Path, nodes: int, degree: float, features: int, classes: int, seed: int
) -> Graph:
    """The kind's own reading of the sizes that all kinds are asked by."""
    if kind is Kind.LINKS:
        return generate_links(
            folder,
            num_nodes=nodes,
            degree=degree,
            feature_dim=features,
            num_communities=classes,
            seed=seed,
        )
    if kind is Kind.TYPED:
        papers = max(1, round(nodes * PAPER_SHARE))
        return generate_typed(
            folder,
            num_papers=papers,
            num_authors=nodes - papers,
            cites=degree,
            paper_dim=features,
            author_dim=max(1, features // 2),
            num_classes=classes,
            seed=seed,
        )
    make = generate_rmat if kind is Kind.RMAT else generate_sbm
    return make(
        folder,
        num_nodes=nodes,
        degree=degree,
        feature_dim=features,
        num_classes=classes,
        seed=seed,
    )


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
    split: Annotated[
        str, typer.Option(help="Which of several published splits: its number from 0, or its name.")
    ] = "",
    task: Annotated[
        str, typer.Option(help="auto | multiclass | multilabel | binary | link.")
    ] = "auto",
    feature_dim: Annotated[
        int, typer.Option(min=0, help="Width to plan with where the source has no features.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Import a graph from another format; what of it is not used is said."""
    from runtime.graph.importing import ImportOptions, import_graph

    options = ImportOptions(
        split_index=int(split) if split.isdecimal() else 0,
        split_name="" if split.isdecimal() else split,
        task=task,
        feature_dim=feature_dim,
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
        report=lambda text: screen.print(text, markup=False, highlight=False, soft_wrap=True),
    )
    values = facts(graph)
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
    """Check a dataset and show what is in it."""
    if server is not None:
        _show(codec.to_plain(remote.graph(server, folder)), as_json)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = open_graph(folder)
    for warning in caught:
        console(True).print(f"warning: {warning.message}", markup=False)
    _show(facts(graph), as_json)


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
        "feature_storage": _feature_storage(graph),
        "num_classes": graph.num_classes,
        "task": str(graph.task),
        "num_train": len(graph.train_idx),
        "num_val": len(graph.val_idx),
        "num_test": len(graph.test_idx),
        "topology_bytes": graph.indptr.nbytes + graph.indices.nbytes,
        "feature_bytes": graph.num_nodes * graph.row_bytes,
        "edge_data": [n for n in EDGE_DATA if getattr(graph, n) is not None],
        "node_types": list(graph.meta.node_types),
        "edge_types": list(graph.meta.edge_types),
        "fingerprint": graph.fingerprint,
        "notes": list(graph.meta.notes),
    }


def _feature_storage(graph: Graph) -> str:
    if graph.topology_only:
        return "none"
    if graph.x_by_type:
        return "dense by node type"
    return "sparse" if graph.x is None else "dense"


def _show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(values)
        return
    table = Table(show_header=False, box=None)
    for key, value in values.items():
        if isinstance(value, list):
            text = ("\n" if key == "notes" else ", ").join(cast(list[str], value))
            if not text:
                continue
        elif key.endswith("_bytes"):
            text = bytes_text(float(str(value)))
        elif isinstance(value, int):
            text = f"{value:,}"
        else:
            text = f"{value:.2f}" if isinstance(value, float) else str(value)
        table.add_row(key.replace("_", " "), text)
    console().print(table)
