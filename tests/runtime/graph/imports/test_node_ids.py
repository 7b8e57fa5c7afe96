"""Rows of a table of nodes belong to the nodes that its ids name, whatever the column is called."""

from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import import_graph


def load(tmp_path: Path, **tables: str) -> Graph:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for stem, text in tables.items():
        (source / f"{stem}.csv").write_text(text)
    return import_graph(source, tmp_path / "g")


def joined(graph: Graph) -> list[tuple[int, int]]:
    """The edges, each end named by its row's first feature or, without any, by its label."""
    assert graph.x is not None or graph.y is not None
    names = np.asarray(graph.y if graph.x is None else graph.x[:, 0]).astype(int)
    dst = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return sorted(zip(names[graph.indices].tolist(), names[dst].tolist(), strict=True))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("nodes", "name,f0\nc,3\na,1\nb,2\n"),
        ("labels", "name,label\nc,3\na,1\nb,2\n"),
        ("features", "f0\n3\n1\n2\n"),
    ],
)
def test_ends_in_words_are_never_joined_by_place(table: str, text: str, tmp_path: Path):
    edges = "src,dst\nc,a\na,b\n"
    words = rf"row numbers of {table}.csv as ends, .* found 'c'; name its column of ids id"
    with pytest.raises(DatasetError, match=words):
        load(tmp_path, edges=edges, **{table: text})
    if "name" in text:
        graph = load(tmp_path, edges=edges, **{table: text.replace("name", "id")})
        assert joined(graph) == [(1, 2), (3, 1)]
