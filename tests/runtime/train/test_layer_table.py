"""Outputs of layers lie in memory as far as it has room, else in files that nobody sees."""

import shutil
from types import SimpleNamespace

import numpy as np

from gnnplan.runtime.train.layer_table import LayerTable


def test_a_table_that_has_no_room_is_a_file_which_nobody_sees(tmp_path):
    small, large = (LayerTable(100, 8, None, tmp_path, most) for most in (3200, 3199))
    assert not isinstance(small.rows, np.memmap)
    assert isinstance(large.rows, np.memmap)
    large.rows[99] = 1.0
    assert large.rows.sum() == 8.0
    assert list(tmp_path.iterdir()) == []
    large.close()


def test_a_table_stays_in_memory_where_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=6399))
    assert not isinstance(LayerTable(100, 8, None, tmp_path, 0).rows, np.memmap)
