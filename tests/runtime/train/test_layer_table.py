"""Outputs of layers lie in memory as far as it has room, else in files that nobody sees."""

import itertools
import shutil
from types import SimpleNamespace

import numpy as np
import torch

from gnnplan.runtime.train import layer_table
from gnnplan.runtime.train.layer_table import LayerTable
from tests.support.inprocess import run_in_process


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


def test_rows_cross_between_hosts_in_pieces(monkeypatch):
    """Rank 0 wrote 60 rows and rank 1 the others; seven rows of 32 bytes cross at once."""
    hosts = itertools.count()
    monkeypatch.setattr(layer_table.socket, "gethostname", lambda: f"host{next(hosts)}")
    monkeypatch.setattr(layer_table, "SENT_BYTES", 7 * 32 + 31)
    parts = [np.arange(0, 60), np.arange(60, 100)]

    def exchange(comm):
        sent, broadcast = [], comm.broadcast
        comm.broadcast = lambda rows, source: sent.append(len(rows)) or broadcast(rows, source)
        table = LayerTable(100, 8, comm, None)
        own = parts[comm.rank]
        table.put(own, torch.from_numpy(np.repeat(own, 8).reshape(-1, 8)))
        table.exchange(parts)
        return sent, table.rows

    for sent, rows in run_in_process(2, exchange):
        assert sent == [7] * 8 + [4] + [7] * 5 + [5]
        np.testing.assert_array_equal(rows, np.repeat(np.arange(100), 8).reshape(-1, 8))


def test_hosts_of_one_name_share_no_file(monkeypatch):
    boots = itertools.count()
    monkeypatch.setattr(layer_table.socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(layer_table, "boot_id", lambda: f"boot {next(boots)}")
    tables = run_in_process(2, lambda comm: LayerTable(100, 8, comm, None))
    assert not any(isinstance(each.rows, np.memmap) for each in tables)
