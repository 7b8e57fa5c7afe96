"""Labels of seeds are those numpy would take."""

import numpy as np
import pytest

from gnnplan.runtime.features.gather import take_labels


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000])
def test_labels_are_those_of_plain_indexing(count: int) -> None:
    random = np.random.default_rng(count)
    labels = random.integers(-1, 50, 700)
    ids = random.integers(0, 700, count)
    np.testing.assert_array_equal(take_labels(labels, ids), labels[ids])


def test_rows_of_several_labels_are_taken_whole() -> None:
    labels = np.arange(12).reshape(6, 2)
    taken = take_labels(labels, np.array([5, 0, 5]))
    np.testing.assert_array_equal(taken, [[10, 11], [0, 1], [10, 11]])
    assert taken.flags.c_contiguous


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_an_id_of_no_node_is_named(bad: int) -> None:
    with pytest.raises(IndexError, match=rf"expected node ids in \[0, 4\), found {bad}"):
        take_labels(np.arange(4), np.array([0, bad]))


def test_a_read_only_memory_map_serves(tmp_path) -> None:
    np.save(tmp_path / "y.npy", np.arange(9))
    labels = np.load(tmp_path / "y.npy", mmap_mode="r")
    np.testing.assert_array_equal(take_labels(np.asarray(labels), np.array([8, 2])), [8, 2])
