"""Nothing that an import meets is lost without a word: the table of IMPORTS.md, row by row."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import RandomLinkSplit

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.imports import importing
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.graph.imports.inventory import DST, SRC, Inventory, Role, plain_name
from tests.runtime.graph.conftest import write_graphbolt, write_gz, write_ogb
from tests.runtime.graph.typed_sources import known_typed, write_graphbolt_typed, write_ogb_typed

PAGE = Path(importing.__file__).parents[1] / "IMPORTS.md"
N = 6
EDGES = np.array([[0, 1, 2, 3, 4, 5, 1], [1, 2, 3, 4, 5, 0, 4]])
E = EDGES.shape[1]
FLAGS = np.arange(N) < 3
OUTCOMES = {*Role, "not used"}


def rows() -> list[tuple[str, str, str]]:
    """Where, name and outcome, of every name of every row of the table."""
    out: list[tuple[str, str, str]] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4 and cells[2] in OUTCOMES:
            out += [(cells[0], name, cells[2]) for name in re.findall(r"`([^`-][^`]*)`", cells[1])]
    return out


def column(name: str) -> Any:
    """Values of a column of nodes that fit its name."""
    words = {
        "split": ["train", "train", "val", "val", "test", ""],
        "set": ["train", "train", "val", "val", "test", ""],
        "name": list("abcdef"),
        "created": pa.array(range(N), pa.timestamp("s")),
        "embedding": [[float(i), 1.0] for i in range(N)],
    }
    if name in words:
        return words[name]
    if name in ("age", "f0"):
        return np.linspace(0.5, 3, N)
    ids = ("id", "node", "nodeid", "unnamed0", "paperid")
    return np.arange(N) if plain_name(name) in ids else 1 * FLAGS


def edge_table(folder: Path, name: str) -> Path:
    ends = {"src": EDGES[0], "dst": EDGES[1]}
    for key, words in (("src", SRC), ("dst", DST)):
        if plain_name(name) in words:
            ends = {name if end == key else end: values for end, values in ends.items()}
    extra = {} if name in ends else {name: ["x"] * E if name == "note" else np.arange(E)}
    pq.write_table(pa.table({**ends, **extra}), folder / "edges.parquet")
    return folder / "edges.parquet"


def node_table(folder: Path, name: str) -> Path:
    edge_table(folder, "src")
    table = {"train_mask": FLAGS} if name.endswith("_mask") else {}
    pq.write_table(pa.table({**table, name: column(name)}), folder / "nodes.parquet")
    return folder


def other_file(folder: Path, name: str) -> Path:
    edge_table(folder, "src")
    (folder / name).write_text("a,b\n")
    return folder


def pack(folder: Path, name: str) -> Path:
    order = np.lexsort(EDGES)
    values = {
        "indptr": np.concatenate([[0], np.cumsum(np.bincount(EDGES[1], minlength=N))]),
        "indices": EDGES[0][order],
    }
    extra = {
        "x": np.ones((N, 2), np.float32),
        "y": np.arange(N) % 2,
        "train_idx": np.array([1, 4]),
        "train_masks": np.stack([FLAGS, ~FLAGS]),
        "edge_weight": np.linspace(1, 2, E),
        "edge_type": np.arange(E) % 2,
        "node_type": np.arange(N) % 2,
        "pos": np.ones((N, 2)),
        "class_names": np.array(["a", "b"]),
        "objects": np.array([{"a": 1}, None], dtype=object),
    }
    if name.endswith("_mask"):
        values |= {"train_mask": FLAGS, name: FLAGS.astype(np.int32)}
    elif name not in values:
        values[name] = extra[name]
    np.savez(folder / "pack.npz", **values)
    return folder / "pack.npz"


def benchmark(folder: Path, name: str) -> Path:
    del name  # all of them are in it
    order = np.lexsort(EDGES[::-1])
    pointers = np.concatenate([[0], np.cumsum(np.bincount(EDGES[0], minlength=N))])
    np.savez(
        folder / "pack.npz",
        adj_data=np.linspace(1, 2, E)[order],
        adj_indices=EDGES[1][order],
        adj_indptr=pointers,
        adj_shape=np.array([N, N]),
        attr_data=np.ones(N),
        attr_indices=np.arange(N) % 3,
        attr_indptr=np.arange(N + 1),
        attr_shape=np.array([N, 3]),
        labels=np.arange(N) % 2,
        node_names=np.array(list("abcdef")),
        metadata=np.array({"a": 1}, dtype=object),
    )
    return folder / "pack.npz"


def heterophilous(folder: Path, name: str) -> Path:
    del name
    masks = np.stack([FLAGS] * 3)
    np.savez(
        folder / "pack.npz",
        edges=EDGES.T,
        node_features=np.ones((N, 2), np.float32),
        node_labels=np.arange(N) % 2,
        train_masks=masks,
        val_masks=masks,
        test_masks=masks,
    )
    return folder / "pack.npz"


def hetero(folder: Path, name: str) -> Path:
    data = HeteroData()
    data["paper"].x, data["paper"].y = torch.ones(N, 2), torch.arange(N) % 2
    data["paper"].pos, data["paper"].time = torch.ones(N, 3), torch.arange(N)
    for split in ("train_mask", "val_mask", "test_mask"):
        data["paper"][split] = torch.from_numpy(FLAGS)
    data["author"].num_nodes = N
    cites = data["paper", "cites", "paper"]
    cites.edge_index, cites.edge_weight = torch.from_numpy(EDGES), torch.rand(E)
    writes = data["author", "writes", "paper"]
    writes.edge_index, writes.edge_attr = torch.from_numpy(EDGES), torch.rand(E, 3)
    torch.save(data, folder / "data.pt")
    return folder / "data.pt"


def pyg(folder: Path, name: str) -> Path:
    edges: dict[str, Any] = {"edge_index": torch.from_numpy(EDGES)}
    values: dict[str, Any] = {
        "x": torch.ones(N, 2),
        "y": torch.arange(N) % 2,
        "edge_attr": torch.rand(E, 1),
        "edge_weight": torch.rand(E),
        "edge_type": torch.arange(E) % 2,
        "node_type": torch.arange(N) % 2,
        "train_idx": torch.tensor([1, 4]),
        "edge_features": torch.ones(E, 3),
        "edge_label": torch.ones(2),
        "edge_label_index": torch.tensor([[0, 1], [2, 3]]),
    }
    if name == "adj_t":
        edges = {
            "adj_t": torch.sparse_coo_tensor(
                edges["edge_index"].flip(0), torch.ones(E), (N, N), check_invariants=True
            )
        }
    elif name.endswith("_mask"):
        edges |= {"train_mask": torch.from_numpy(FLAGS), name: torch.from_numpy(1 * FLAGS)}
    elif name not in edges:
        edges[name] = values.get(name, torch.zeros(N))
    torch.save(Data(**edges), folder / "data.pt")
    return folder / "data.pt"


def ogb(known: Any) -> Callable[[Path, str], Path]:
    def make(folder: Path, name: str) -> Path:
        root = write_ogb(known, folder)
        for extra in ("raw/edge-feat", "raw/node_year", "mapping/ids"):
            write_gz(root / f"{extra}.csv.gz", np.arange(3))
        (root / "processed").mkdir()
        (root / "processed" / "data.pt").write_text("as OGB's own loader leaves it")
        return root

    return make


def ogb_typed(folder: Path, name: str) -> Path:
    del name
    return write_ogb_typed(known_typed(), folder, splits=("time",))


def graphbolt_typed(folder: Path, name: str) -> Path:
    del name
    return write_graphbolt_typed(known_typed(), folder)


def snap(folder: Path, name: str) -> Path:
    """A folder as SNAP publishes networks with communities."""
    del name
    lines = [f"{10 * u}\t{10 * v}" for u, v in EDGES.T]
    head = ["# Undirected graph", "# FromNodeId\tToNodeId"]
    text = "\n".join([*head, *lines]) + "\n"
    (folder / "com-known.ungraph.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "com-known.all.cmty.txt").write_text("0\t10\t20\n20\t30\t70\n40\n")
    (folder / "com-known.top5000.cmty.txt").write_text("0\t10\t20\n")
    return folder


def karate_club(folder: Path, name: str) -> Path:
    """A folder as the data sets of MUSAE are published."""
    del name
    pairs = "".join(f"{u},{v}\n" for u, v in EDGES.T)
    (folder / "known_edges.csv").write_text(f"id_1,id_2\n{pairs}")
    features = {str(node): [node, 7][node % 2 :] for node in range(N)} | {"3": []}
    (folder / "known_features.json").write_text(json.dumps(features))
    rows = "".join(f"{n},{100 + n},page {n},{'ab'[n % 2]}\n" for n in range(N))
    (folder / "known_target.csv").write_text(f"id,facebook_id,page_name,page_type\n{rows}")
    (folder / "README.txt").write_text("words\n")
    return folder


def link_split(folder: Path, name: str) -> Path:
    parted = name in ("pos_edge_label_index", "neg_edge_label_index")
    ring = torch.arange(40)
    data = Data(edge_index=torch.stack([ring, ring.roll(1)]), x=torch.eye(40))
    data.train_mask = ring < 20
    parts = RandomLinkSplit(0.1, 0.2, split_labels=parted, add_negative_train_samples=True)(data)
    torch.save(parts, folder / "parts.pt")
    return folder / "parts.pt"


def graphbolt(known: Any) -> Callable[[Path, str], Path]:
    def make(folder: Path, name: str) -> Path:
        root = write_graphbolt(known, folder)
        (root / "notes.txt").write_text(name)
        path = root / "metadata.yaml"
        more = "feature_data:\n  - {domain: edge, name: weight, format: numpy, path: none.npy}\n"
        text = path.read_text().replace("feature_data:\n", more)
        second = "  - {domain: node, name: second, format: numpy, path: none.npy}\ntasks:\n"
        path.write_text(text.replace("tasks:\n", second) + "  - {name: another}\n")
        return root

    return make


@pytest.fixture
def makers(known) -> dict[str, Callable[[Path, str], Path]]:
    return {
        "edge table": edge_table,
        "node table": node_table,
        "folder": other_file,
        "npz": pack,
        "GNN-benchmark": benchmark,
        "heterophilous": heterophilous,
        "PyG": pyg,
        "HeteroData": hetero,
        "OGB": ogb(known),
        "GraphBolt": graphbolt(known),
        "OGB typed": ogb_typed,
        "GraphBolt typed": graphbolt_typed,
        "SNAP": snap,
        "Karate Club": karate_club,
        "RandomLinkSplit": link_split,
    }


WHOLE = (
    "HeteroData", "GNN-benchmark", "heterophilous", "OGB", "GraphBolt", "OGB typed",
    "GraphBolt typed", "SNAP", "Karate Club",
)  # fmt: skip
"""Formats whose one source holds all that the table names."""


@pytest.mark.filterwarnings("ignore::runtime.graph.findings.GraphWarning")
@pytest.mark.parametrize("where", list(dict.fromkeys(where for where, _, _ in rows())))
def test_each_row_of_the_pages_table_is_what_happens(where: str, makers, tmp_path: Path):
    said: list[str] = []
    for number, (_, name, outcome) in enumerate(row for row in rows() if row[0] == where):
        if number == 0 or where not in WHOLE:
            folder = tmp_path / f"source{number}"
            folder.mkdir()
            said = []
            source = makers[where](folder, "" if where in WHOLE else name)
            graph = import_graph(source, folder / "g", report=said.append)
            assert graph.meta.notes == said[1:]
        word = rf"(?<![\w.]){re.escape(name)}(?![\w.])"
        assert any(re.match(f"{outcome}: .*{word}", line) for line in said), (name, said)
        lost = any(re.match(f"not used: [^(]*{word}", line) for line in said)
        assert lost == (outcome == "not used"), (name, said)


def test_the_table_has_all_formats_and_outcomes(makers):
    assert {where for where, _, _ in rows()} == set(makers)
    assert {outcome for _, _, outcome in rows()} == OUTCOMES - {Role.DESCRIPTION}


def test_every_row_of_the_page_names_a_test():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown = [row[3] for row in cells if row[3] != "shown by"]
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    known = set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    assert len(shown) > 60
    assert [name for name in shown if name not in known] == []


def test_a_folder_of_snap_has_its_communities_as_classes(tmp_path: Path):
    said: list[str] = []
    graph = import_graph(snap(tmp_path, ""), tmp_path / "g", report=said.append)
    assert graph.y is not None
    assert graph.y.tolist() == [0, 0, 0, 1, 2, -1]
    assert np.load(graph.path / "source_id.npy").tolist() == [0, 10, 20, 30, 40, 50]
    text = " ".join(said)
    assert "1 of 5 nodes are in several communities: the first is their class" in text
    assert "1 of 7 members name no node" in text
    assert "2 comment lines" in text
    options = ImportOptions(task="multilabel")
    both = import_graph(tmp_path, tmp_path / "h", options=options)
    assert both.y is not None
    assert both.y[[2, 4, 5]].tolist() == [[1, 1, 0], [0, 0, 1], [-1, -1, -1]]


@pytest.mark.parametrize("text", ["a b\n", "", "1.5 2\n", "\n\n"])
def test_communities_that_are_none_are_refused(text: str, tmp_path: Path):
    folder = snap(tmp_path, "")
    (folder / "com-known.all.cmty.txt").write_text(text)
    with pytest.raises(DatasetError, match=r"a line of .*node .* each community"):
        import_graph(folder, tmp_path / "g")
    assert not (tmp_path / "g").exists()


def test_labels_named_after_the_table_of_edges_belong_to_it(tmp_path: Path):
    lines = [f"{u} {v}" for u, v in EDGES.T]
    (tmp_path / "email-Eu-core.txt").write_text("\n".join(lines) + "\n")
    labels = "".join(f"{node} {node % 3}\n" for node in range(N))
    (tmp_path / "email-Eu-core-department-labels.txt").write_text(labels)
    graph = import_graph(tmp_path, tmp_path / "g")
    assert graph.y is not None
    assert graph.y.tolist() == [node % 3 for node in range(N)]
    assert graph.num_edges == E


@pytest.mark.parametrize(
    "name", ["edge_features.csv", "x_edge_labels.tsv", "links-feats.txt", "edge_features.json"]
)
def test_features_and_labels_of_edges_are_none_of_nodes(name: str, tmp_path: Path):
    (tmp_path / "edges.csv").write_text("".join(f"{u},{v}\n" for u, v in EDGES.T))
    values = '{"0": [1]}' if name.endswith("json") else "".join(f"{k % 2}.5\n" for k in range(E))
    (tmp_path / name).write_text(values)
    graph = import_graph(tmp_path, tmp_path / "g")
    assert (graph.num_nodes, graph.feature_dim, graph.y) == (N, 0, None)
    assert any(note.startswith(f"not used: {name} (of edges: ") for note in graph.meta.notes)


def test_a_folder_of_karate_club_is_read_whole(tmp_path: Path):
    graph = import_graph(karate_club(tmp_path, ""), tmp_path / "g")
    expected = np.zeros((N, 8))
    for node, features in {0: [0, 7], 1: [7], 2: [2, 7], 4: [4, 7], 5: [7]}.items():
        expected[node, features] = 1
    np.testing.assert_array_equal(graph.x, expected)
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1] * 3
    (tmp_path / "known_features.json").write_text('{"0": 3}')
    with pytest.raises(DatasetError, match="JSON with a list of feature numbers"):
        import_graph(tmp_path, tmp_path / "h")


def test_what_a_reader_says_nothing_of_is_left_all_the_same():
    inventory = Inventory()
    inventory.meet(["a", "b", "c", "line\nbreak"], "t.csv")
    inventory.use(Role.FEATURES, "a", place="t.csv")
    inventory.leave("words", "b", place="t.csv")
    assert inventory.lines() == [
        "not used: b of t.csv (words)",
        "not used: c, 'line\\nbreak' of t.csv (not known to this format)",
    ]


def test_many_used_columns_are_shortened_and_left_ones_never():
    inventory = Inventory()
    names = [f"n{i}" for i in range(30)]
    inventory.use(Role.FEATURES, *names)
    assert inventory.origin(Role.FEATURES) == "n0, n1, n2, n3, n4, n5, ..., n29"
    inventory.leave("words", *names)
    assert inventory.lines() == [f"not used: {', '.join(names)} (words)"]


def test_names_that_are_no_numbers_are_all_shown():
    inventory = Inventory()
    names = ["a", "b", "c", "d", "e", "f", "result", "g", "h", *(f"n{i}" for i in range(9)), "i"]
    inventory.use(Role.FEATURES, *names)
    assert inventory.origin(Role.FEATURES) == (
        "a, b, c, d, e, f, result, g, h, n0, n1, n2, n3, n4, n5, ..., n8, i"
    )
