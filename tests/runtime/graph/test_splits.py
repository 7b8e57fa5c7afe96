"""Masks of any type are masks, lists of ids are ids, and what could be either is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.graph.imports.labels import split_ids

N = 12
FLAGS = np.arange(N) % 3 == 0
KINDS = [np.bool_, np.uint8, np.int8, np.int32, np.int64, np.float16, np.float32, np.float64]


def write_npz(folder: Path, **arrays: np.ndarray) -> Path:
    ring = np.arange(N)
    pack: dict[str, Any] = {"indptr": np.arange(N + 1), "indices": np.roll(ring, 1), **arrays}
    np.savez(folder / "p.npz", **pack)
    return folder / "p.npz"


def write_pyg(folder: Path, **arrays: np.ndarray) -> Path:
    ring = torch.arange(N)
    fields = {name: torch.from_numpy(array) for name, array in arrays.items()}
    edges = torch.stack([ring, ring.roll(1)])
    torch.save(Data(edge_index=edges, num_nodes=N, **fields), folder / "p.pt")
    return folder / "p.pt"


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_a_mask_in_any_type(kind: type):
    expected = np.flatnonzero(FLAGS)
    mask = FLAGS.astype(kind)
    for array, index in ((mask, 0), (np.stack([~FLAGS, FLAGS]).astype(kind), 1)):
        for turned in (array, array.T):
            ids, count = split_ids("train_mask", turned, N, index=index)
            np.testing.assert_array_equal(ids, expected)
            assert count == array.size // N
    np.testing.assert_array_equal(split_ids("train_idx", mask, N)[0], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 5])
def test_flags_of_several_splits_are_no_ids_whatever_their_name(kind: type, width: int):
    masks = np.stack([np.roll(FLAGS, k) for k in range(width)])
    for turned in (masks.astype(kind), masks.T.astype(kind)):
        ids, count = split_ids("train_idx", turned, N, index=width - 1)
        np.testing.assert_array_equal(ids, np.flatnonzero(masks[-1]))
        assert count == width


def test_links_between_two_nodes_stay_links():
    for pairs in ([[0, 1], [1, 0]], [[0, 1]] * 4, [[0, 1]]):
        assert split_ids("train_idx", np.array(pairs), 4 if len(pairs) == 4 else N)[0].ndim == 2


@pytest.mark.parametrize("write", [write_npz, write_pyg])
@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32])
def test_integer_masks_of_files_name_their_nodes(write, kind: type, tmp_path: Path):
    flags = {"train": np.arange(N) < 4, "val": np.arange(N) == 5, "test": np.arange(N) > 8}
    source = write(tmp_path, **{f"{key}_mask": mask.astype(kind) for key, mask in flags.items()})
    graph = import_graph(source, tmp_path / "g")
    for key, mask in flags.items():
        np.testing.assert_array_equal(getattr(graph, f"{key}_idx"), np.flatnonzero(mask))


@pytest.mark.parametrize("write", [write_npz, write_pyg])
@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"train_mask": np.array([1, 4, 7])}, "one flag per node.*train_idx"),
        ({"train_mask": np.arange(N)}, "one flag of 0 or 1.*name it train_idx"),
        ({"train_mask": np.full(N, np.nan)}, "one flag of 0 or 1"),
        ({"train_idx": np.array([0.0, 1.5])}, "integer node ids"),
        ({"test_mask": FLAGS.astype(np.uint8)}, "expected training nodes beside test"),
        ({"val_mask": FLAGS, "test_mask": ~FLAGS}, "expected training nodes beside val, test"),
    ],
)
def test_what_is_neither_or_both_is_refused(write, arrays, words: str, tmp_path: Path):
    with pytest.raises(DatasetError, match=words):
        import_graph(write(tmp_path, **arrays), tmp_path / "g")
    assert not (tmp_path / "g").exists()


def test_ids_that_are_0_and_1_stay_ids():
    assert split_ids("train_idx", np.array([1, 0]), N)[0].tolist() == [1, 0]
    assert split_ids("train_idx", np.array([1, 0]), 2)[0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("write", "name", "by_row"),
    [
        (write_npz, "train_masks", True),
        (write_npz, "train_masks", False),
        (write_npz, "train_mask", True),
        (write_npz, "train_mask", False),
        (write_pyg, "train_mask", False),
    ],
)
def test_several_splits_are_said_and_chosen(write, name: str, by_row: bool, tmp_path: Path):
    masks = np.stack([np.roll(FLAGS, k) for k in range(3)])
    shown = (masks if by_row else masks.T).astype(np.uint8)
    source = write(tmp_path, **{name: shown, name.replace("train", "test"): 1 - shown})
    graph = import_graph(source, tmp_path / "g", options=ImportOptions(split_index=2))
    np.testing.assert_array_equal(graph.train_idx, np.flatnonzero(masks[2]))
    np.testing.assert_array_equal(graph.test_idx, np.flatnonzero(~masks[2]))
    assert any("one of 3 splits: --split N" in note for note in graph.meta.notes)
    first = import_graph(source, tmp_path / "h")
    np.testing.assert_array_equal(first.train_idx, np.flatnonzero(masks[0]))
    assert any("one of 3 splits: --split N" in note for note in first.meta.notes)


def test_a_single_split_is_taken_before_several_of_which_all_are_said(tmp_path: Path):
    masks = np.stack([np.roll(FLAGS, k) for k in range(3)])
    source = write_npz(tmp_path, train_mask=~FLAGS, train_masks=masks.T)
    graph = import_graph(source, tmp_path / "g")
    np.testing.assert_array_equal(graph.train_idx, np.flatnonzero(~FLAGS))
    assert any("one of 3 splits: --split N" in note for note in graph.meta.notes)
    other = import_graph(source, tmp_path / "h", options=ImportOptions(split_index=1))
    np.testing.assert_array_equal(other.train_idx, np.flatnonzero(masks[1]))


def test_a_choice_among_nothing_is_refused(tmp_path: Path):
    source = write_npz(tmp_path, train_idx=np.array([1, 2]), x=np.ones((N, 3), np.float32))
    for options, words in (
        (ImportOptions(split_index=1), "expected several splits for split 1, found one"),
        (ImportOptions(split_name="time"), "splits with names for split 'time', found none"),
        (ImportOptions(feature_dim=8), "without features for a declared width of 8, found 3"),
    ):
        with pytest.raises(DatasetError, match=words):
            import_graph(source, tmp_path / "g", options=options)
