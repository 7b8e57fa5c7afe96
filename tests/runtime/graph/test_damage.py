"""Damaged sources: whatever the bytes, only DatasetError comes out and nothing is left behind."""

import gzip
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import GraphWarning, open_graph
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from tests.runtime.graph.test_import_inventory import karate_club, snap
from tests.runtime.graph.typed_sources import (
    known_typed,
    write_graphbolt_typed,
    write_hetero,
    write_ogb_typed,
)

ROUNDS = 40


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Truncate, flip bits, or overwrite a stretch with random bytes."""
    if not data:
        return bytes(rng.integers(0, 256, 8, dtype=np.uint8))
    kind = rng.integers(0, 3)
    if kind == 0:
        return data[: int(rng.integers(0, len(data)))]
    out = bytearray(data)
    if kind == 1:
        for place in rng.integers(0, len(out), int(rng.integers(1, 9))):
            out[place] ^= 1 << int(rng.integers(0, 8))
    else:
        start = int(rng.integers(0, len(out)))
        stretch = rng.integers(0, 256, int(rng.integers(1, 40)), dtype=np.uint8)
        out[start : start + len(stretch)] = bytes(stretch)
    return bytes(out)


def try_import(source: Path, folder: Path) -> bool:
    """Whether the import failed; anything but DatasetError escapes and fails the test."""
    text = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphWarning)  # damaged features may become NaN
            graph = import_graph(source, folder, options=ImportOptions())
    except DatasetError as error:
        text = str(error)
    else:
        # The damage left a graph that is well formed: it must hold together.
        assert graph.indices.max() < graph.num_nodes
        assert graph.train_idx.max() < graph.num_nodes
        shutil.rmtree(folder)
    assert "\n" not in text
    assert not folder.exists()
    return bool(text)


def failures(source: Path, folder: Path, rng: np.random.Generator, rounds: int) -> int:
    """Damage a file of copies of a source, one at a time; how many imports fail."""
    copy, failed = folder / source.name, 0
    for _ in range(rounds):
        if source.is_dir():
            shutil.copytree(source, copy)
            files = sorted(p for p in copy.rglob("*") if p.is_file())
            victim = files[int(rng.integers(0, len(files)))]
        else:
            shutil.copy(source, copy)
            victim = copy
        victim.write_bytes(damage_packed(victim, rng))
        failed += try_import(copy, folder / "out")
        shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
        assert list(folder.iterdir()) == []
    return failed


def damage_packed(victim: Path, rng: np.random.Generator) -> bytes:
    """Damage a file's bytes; in a typed folder, what is packed in them."""
    data = victim.read_bytes()
    if victim.suffix == ".gz" and "typed" in victim.parts:
        return gzip.compress(damage(gzip.decompress(data), rng))
    return damage(data, rng)


def test_damaged_sources_raise_only_dataset_errors(source: Path, format_name: str, tmp_path: Path):
    rng = np.random.default_rng([17, *format_name.encode()])
    failed = failures(source, tmp_path, rng, ROUNDS)
    assert failed > ROUNDS // 5  # the damage is real


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "HeteroData": lambda folder: write_hetero(known_typed(), folder),
    "OGB typed": lambda folder: write_ogb_typed(known_typed(), folder, splits=("time",)),
    "GraphBolt typed": lambda folder: write_graphbolt_typed(known_typed(), folder),
    "SNAP": lambda folder: snap(folder, ""),
    "Karate Club": lambda folder: karate_club(folder, ""),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_damaged_folders_of_other_layouts_raise_only_dataset_errors(name: str, tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "work").mkdir()
    source = LAYOUTS[name](tmp_path / "source")
    rng = np.random.default_rng([19, *name.encode()])
    assert failures(source, tmp_path / "work", rng, ROUNDS) > ROUNDS // 10  # the damage is real


def test_missing_files_raise_only_dataset_errors(source: Path, tmp_path: Path):
    if not source.is_dir():
        pytest.skip("a single file")
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        copy = tmp_path / source.name
        shutil.copytree(source, copy)
        (copy / path.relative_to(source)).unlink()
        try_import(copy, tmp_path / "out")
        shutil.rmtree(copy)


@pytest.mark.parametrize("format", ["npz", "pyg", "ogb", "graphbolt", "edgelist"])
@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\x03\x04", b"\x80\x04.", b"a\n"])
def test_rubbish_raises_only_dataset_errors(tmp_path: Path, format: str, content: bytes):
    source = tmp_path / "source"
    source.write_bytes(content)
    with pytest.raises(DatasetError):
        import_graph(source, tmp_path / "g", format=format)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DatasetError):
        import_graph(tmp_path / "folder", tmp_path / "g", format=format)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "source"]


@pytest.mark.parametrize("features", ["dense", "sparse"])
def test_damaged_datasets_raise_only_dataset_errors(
    npz_source: Path, features: str, tmp_path: Path
):
    source = npz_source
    whole = import_graph(source, tmp_path / "g", options=ImportOptions(features=features)).path
    rng = np.random.default_rng(23)
    texts: list[str] = []
    for _ in range(ROUNDS):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        files = sorted(copy.iterdir())
        victim = files[int(rng.integers(0, len(files)))]
        victim.write_bytes(damage(victim.read_bytes(), rng))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GraphWarning)
                open_graph(copy)
        except DatasetError as error:
            texts.append(str(error))
        shutil.rmtree(copy)
    assert len(texts) > ROUNDS // 5
    assert not any("\n" in text for text in texts)


def test_a_saved_object_of_another_class_is_refused_without_running_it(tmp_path: Path):
    import torch

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"edge_index": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(DatasetError, match=r"trap\.pt"):
        import_graph(tmp_path / "trap.pt", tmp_path / "g")
    assert not (tmp_path / "sprung").exists()
