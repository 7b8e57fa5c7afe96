"""`gnnplan graph`: generate, import and look at graph datasets."""

import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from planner.commands import remote
from planner.commands.common import JsonFlag, console, emit_json, progress_bar
from planner.commands.graph_facts import all_facts, facts_table, graph_facts
from planner.commands.remote import ServerOption
from planner.errors import SettingsError
from planner.graph_presets import generate_like
from runtime import codec
from runtime.errors import DatasetError
from runtime.graph.dataset import Graph, GraphWarning, inspect_graph
from runtime.graph.generate import generate_rmat, generate_sbm
from runtime.graph.generate_links import generate_links
from runtime.graph.generate_typed import generate_typed

PAPER_SHARE = 0.6
"""Of a typed graph's nodes; the others are authors."""

Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Let an earlier dataset step aside, to DIR.previous."),
]

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
    overwrite: Overwrite = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate a seeded synthetic graph."""
    like, _, name = kind.partition(":")
    with progress_bar("generate"):
        if like == "like":
            graph = generate_like(folder, name, scale=scale, seed=seed, overwrite=overwrite)
        else:
            sizes = Sizes(nodes, degree, features, classes)
            graph = _generate(_kind(kind), folder, sizes, seed=seed, overwrite=overwrite)
    _show(graph_facts(graph), as_json)


def _kind(text: str) -> Kind:
    if text not in [kind.value for kind in Kind]:
        names = ", ".join(Kind)
        raise SettingsError(f"expected a kind among {names} or like:NAME, found {text!r}")
    return Kind(text)


class Sizes(NamedTuple):
    """What all kinds are asked by; each reads it in its own way."""

    nodes: int
    degree: float
    features: int
    classes: int


def _generate(kind: Kind, folder: Path, sizes: Sizes, *, seed: int, overwrite: bool) -> Graph:
    if kind is Kind.LINKS:
        return generate_links(
            folder,
            num_nodes=sizes.nodes,
            degree=sizes.degree,
            feature_dim=sizes.features,
            num_communities=sizes.classes,
            seed=seed,
            overwrite=overwrite,
        )
    if kind is Kind.TYPED:
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
    make = generate_rmat if kind is Kind.RMAT else generate_sbm
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
    overwrite: Overwrite = False,
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)  # the report has them
        graph = import_graph(
            source,
            folder,
            format=format.value,
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
    """Check a dataset and show what is in it; exit code 2 where no training can use it."""
    if server is not None:
        _show(codec.to_plain(remote.graph(server, folder)), as_json)
        return
    graph, findings = inspect_graph(folder)
    _show(all_facts(graph, findings), as_json)
    for finding in findings:
        text = f"{folder / finding.array}.npy: {finding.text}"
        if finding.fault:
            raise DatasetError(text)
        console(True).print(f"warning: {text}", markup=False, soft_wrap=True)


def _show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(values)
    else:
        console().print(facts_table(values))
