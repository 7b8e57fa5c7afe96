"""A dataset folder appears whole or not at all."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import DatasetError
from runtime.graph.generate import generate_sbm
from runtime.graph.staging import ArrayWriter, Staging

SIZES = {"num_nodes": 2000, "degree": 10.0, "feature_dim": 64, "num_classes": 3}


def test_appended_chunks_read_back_as_one_array(tmp_path: Path):
    rng = np.random.default_rng(0)
    for dtype, row_shape in (("int64", ()), ("float16", (3,)), ("int32", (2, 2))):
        writer = ArrayWriter(tmp_path / "a.npy", dtype, row_shape)
        chunks = [rng.integers(0, 99, (n, *row_shape)) for n in (5, 0, 1000, 1)]
        for chunk in chunks:
            writer.append(chunk)
        writer.close()
        whole = np.load(tmp_path / "a.npy", mmap_mode="r")
        np.testing.assert_array_equal(whole, np.concatenate(chunks))
        assert whole.dtype == dtype


def test_rows_of_another_shape_are_a_programming_error(tmp_path: Path):
    writer = ArrayWriter(tmp_path / "a.npy", "int64", (3,))
    with pytest.raises(ValueError, match="rows of shape"):
        writer.append(np.zeros((2, 4)))
    writer.abandon()


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DatasetError, match="found other files"):
        generate_sbm(tmp_path, **SIZES)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(DatasetError, match="found a file"):
        generate_sbm(tmp_path / "thesis.txt", **SIZES)


def test_an_empty_folder_and_an_earlier_dataset_are_replaced(tmp_path: Path):
    target = tmp_path / "deep" / "g"
    target.mkdir(parents=True)
    first = generate_sbm(target, **SIZES)
    second = generate_sbm(target, **SIZES, seed=1)
    assert first.fingerprint != second.fingerprint
    assert [p.name for p in target.parent.iterdir()] == ["g"]
    assert first.x is not None
    assert np.isfinite(first.x).all()  # what was mapped before stays readable


def test_an_error_halfway_leaves_an_earlier_dataset_untouched(tmp_path: Path):
    before = generate_sbm(tmp_path / "g", **SIZES)

    def interrupted():
        with Staging(tmp_path / "g") as staging:
            staging.save("indptr", np.arange(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["g"]
    assert (tmp_path / "g" / "graph.json").is_file()
    assert before.num_nodes == SIZES["num_nodes"]


@pytest.mark.parametrize("limit_bytes", [0, 100, 5_000, 100_000, 400_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, limit_bytes: int):
    # A file size limit makes writes fail as a full disk does (Python ignores SIGXFSZ).
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(DatasetError, match="disk is full") as caught:
            generate_sbm(tmp_path / "g", **SIZES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="cannot be written"):
        generate_sbm(tmp_path / "file" / "g", **SIZES)


def test_everything_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: list[str] = []
    real, target = os.fsync, tmp_path / "out"

    def fsync(descriptor: int) -> None:
        found = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append(found.name if found.is_file() or found == tmp_path else "folder")
        # Only the folder that gets the name is flushed after it is there.
        assert target.exists() == (found == tmp_path)
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    with Staging(target) as staging:
        staging.save("a", np.arange(3))
        staging.save("b", np.arange(5))
        staging.commit()
    assert sorted(flushed[:2]) == ["a.npy", "b.npy"]
    assert flushed[2:] == ["folder", tmp_path.name]
    assert np.array_equal(np.load(target / "b.npy"), np.arange(5))
