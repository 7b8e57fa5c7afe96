"""A dataset folder appears whole or not at all."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError, PlanError
from gnnplan.runtime.graph import staging as staging_module
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.graph.staging import ArrayWriter, Staging
from gnnplan.runtime.plan.io import refuse_unplaced

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


def test_an_empty_folder_is_taken_and_an_earlier_dataset_is_not(tmp_path: Path):
    target = tmp_path / "deep" / "g"
    target.mkdir(parents=True)
    first = generate_sbm(target, **SIZES)
    with pytest.raises(
        DatasetError, match=r"found sbm-2000 \(2,000 nodes, 20,\d+ edges\)"
    ) as caught:
        generate_sbm(target, **SIZES, seed=1)
    assert "overwrite (--overwrite), which keeps that one as g.previous" in str(caught.value)
    assert [p.name for p in target.parent.iterdir()] == ["g"]
    assert open_graph(target).fingerprint == first.fingerprint


def test_an_overwritten_dataset_steps_aside_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    target = tmp_path / "g"
    made = [generate_sbm(target, **SIZES, seed=s, overwrite=True) for s in range(3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "g.previous", "g.previous-2"]
    for graph, name in zip(made, ("g.previous", "g.previous-2", "g"), strict=True):
        assert open_graph(tmp_path / name).fingerprint == graph.fingerprint
        assert graph.x is not None
        assert np.isfinite(graph.x).all()  # what was mapped before stays readable
    assert f"kept in {tmp_path / 'g.previous-2'}" in caplog.text


def test_a_dataset_that_came_meanwhile_is_not_replaced(tmp_path: Path):
    def write_late() -> None:
        with Staging(tmp_path / "g") as staging:
            first = generate_sbm(tmp_path / "g", **SIZES)
            staging.save("indptr", np.arange(3))
            with pytest.raises(DatasetError, match="expected no dataset there yet"):
                staging.commit()
            assert open_graph(tmp_path / "g").fingerprint == first.fingerprint

    write_late()
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_an_earlier_dataset_survives_an_end_just_after_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = generate_sbm(tmp_path / "g", **SIZES)
    take = staging_module.take_name

    def take_and_end(made: Path, target: Path) -> None:
        take(made, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(staging_module, "take_name", take_and_end)
    with pytest.raises(KeyboardInterrupt):
        generate_sbm(tmp_path / "g", **SIZES, seed=1, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "g.previous"]
    assert open_graph(tmp_path / "g.previous").fingerprint == before.fingerprint


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from gnnplan.runtime.graph.staging import Staging
with Staging(Path(sys.argv[1])) as staging:
    staging.save("indptr", np.arange(1000))
    print("ready", flush=True)
    time.sleep(60)
"""


def started(target: Path) -> subprocess.Popen[str]:
    """A process that has begun to write a dataset, and waits."""
    words = [sys.executable, "-c", WRITER, str(target)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path: Path):
    living, dead = started(tmp_path / "one"), started(tmp_path / "two")
    try:
        assert len(list(tmp_path.iterdir())) == 2
        dead.kill()
        dead.wait()
        (tmp_path / ".mine.12345678").mkdir()  # nobody's mark: not ours to remove
        generate_sbm(tmp_path / "g", **SIZES)
        names = sorted(p.name for p in tmp_path.iterdir())
        assert [name.split(".")[1] for name in names[:2]] == ["mine", "one"]
        assert names[2:] == ["g"]
    finally:
        living.terminate()
    assert living.wait() == 128 + 15
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.12345678", "g"]
    for process in (living, dead):
        assert process.stdout is not None
        process.stdout.close()


def test_a_handler_of_the_user_is_left_alone(tmp_path: Path):
    def own(*_: object) -> None:
        return

    before = signal.signal(signal.SIGTERM, own)
    try:
        with Staging(tmp_path / "g"):
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    with Staging(tmp_path / "g"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_halfway_leaves_an_earlier_dataset_untouched(tmp_path: Path):
    before = generate_sbm(tmp_path / "g", **SIZES)

    def interrupted():
        with Staging(tmp_path / "g", overwrite=True) as staging:
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


def test_a_link_to_a_folder_stays_and_leads_to_the_dataset(tmp_path: Path):
    (tmp_path / "large").mkdir()
    (tmp_path / "g").symlink_to("large/g")
    for seed in (0, 1):  # where nothing is, where an earlier one is
        graph = generate_sbm(tmp_path / "g", **SIZES, seed=seed, overwrite=True)
        assert graph.path == tmp_path / "large" / "g"
    assert (tmp_path / "g").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "large"]
    assert sorted(p.name for p in (tmp_path / "large").iterdir()) == ["g", "g.previous"]


@pytest.mark.parametrize("name", [".", "..", "g/.."])
def test_the_folder_one_is_in_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "g").mkdir()
    monkeypatch.chdir(tmp_path / "g")
    with pytest.raises(DatasetError, match="the name of a folder, found one that you are in"):
        generate_sbm(Path(name), **SIZES)
    with pytest.raises(PlanError, match="the name of a folder, found one that you are in"):
        refuse_unplaced(Path(name))


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


def test_whoever_reads_a_replaced_dataset_goes_on_or_is_told(tmp_path: Path):
    before = generate_sbm(tmp_path / "g", **SIZES)
    rows = np.array(before.x)
    assert before.array_path("x") == before.path / "x.npy"
    generate_sbm(tmp_path / "g", **SIZES, seed=1, overwrite=True)
    np.testing.assert_array_equal(before.x, rows)  # mapped: the old rows
    with pytest.raises(DatasetError, match="it was replaced meanwhile; begin again") as caught:
        before.array_path("x")  # opened anew: they would be another graph's
    assert "\n" not in str(caught.value)
    with pytest.raises(DatasetError, match=before.fingerprint[:12]):
        open_graph(tmp_path / "g", fingerprint=before.fingerprint)
