"""Refusals are one line, whatever a file holds."""

from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError, InputError
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph


def test_names_with_line_ends_and_escapes_stay_in_one_line(tmp_path: Path) -> None:
    arrays = {"indptr": np.zeros(2, np.int64), "a\nb\x1b[31m": np.zeros(1)}
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(DatasetError) as found:
        import_graph(tmp_path / "odd.npz", tmp_path / "out", options=ImportOptions())
    assert r"found no 'indices' among a\nb\x1b[31m, indptr" in str(found.value)
    assert str(found.value).isprintable()


def test_words_of_other_scripts_are_left_alone() -> None:
    assert str(InputError("Größe 3 μs, 图")) == "Größe 3 μs, 图"
