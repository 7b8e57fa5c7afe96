"""Outputs of layers lie in memory as far as it has room, else in files that nobody sees."""

import itertools
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.train import layer_table
from gnnplan.runtime.train.layer_table import LayerTable, written_bytes
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


@pytest.mark.parametrize(
    ("hosts", "disk", "memory", "most", "places"),
    [
        ("a", 200, 0, 99, ["file"]),
        ("a", 199, 200, 99, ["memory"]),
        ("a", 0, 0, 100, ["memory"]),  # its plan counts it
        ("a", 200, 199, None, ["file"]),
        ("a", 199, 199, 99, [""]),
        ("aa", 200, 0, 99, ["shared file"] * 2),
        ("aa", 199, 400, 99, ["memory"] * 2),
        ("aa", 199, 399, 99, [""] * 2),
        ("ab", 200, 0, 99, ["file"] * 2),
        ("aab", 200, 0, 99, ["", "", "file"]),  # two copies on one disk
        ("aab", 400, 0, 99, ["file"] * 3),
    ],
)
def test_a_table_lies_where_all_copies_on_its_host_have_room(hosts, disk, memory, most, places):
    """A table of 100 bytes, of which two are to have room."""
    ranks = [
        layer_table._Found(
            host=(name, ""), folder="", disk_bytes=disk, memory_bytes=memory, most_bytes=most
        )
        for name in hosts
    ]
    found = [layer_table._choose_place(each, ranks, 100, 200).value for each in ranks]
    assert found == places


def test_rows_that_are_never_written_need_no_room():
    assert written_bytes(0, 1000, 8) == 0
    assert written_bytes(1, 1000, 8) == 32 + 4096
    assert written_bytes(1000, 1000, 8) == written_bytes(900, 1000, 8) == 32_000


def test_every_rank_ends_before_a_layer_for_which_one_host_has_no_room(monkeypatch, tmp_path):
    hosts, free = itertools.count(), iter([10**9, 5 << 20])
    monkeypatch.setattr(layer_table.socket, "gethostname", lambda: f"host{next(hosts)}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    monkeypatch.setattr(layer_table, "available_ram_bytes", lambda: 4 << 20)

    def make(comm):
        with pytest.raises(GnnplanError) as error:
            LayerTable(100, 8, comm, tmp_path, 0, 6 << 20)
        return str(error.value)

    first, second = run_in_process(2, make)
    assert first == second
    assert re.match(r"validation and test: expected 6\.0 MiB on host\d for outputs of .*", first)
    assert f"found 5.0 MiB free in {tmp_path} and 4.0 MiB of memory; set TMPDIR" in first
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_host_whose_disk_is_full_hand_their_rows_over(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    parts = [np.arange(0, 60), np.arange(60, 100)]

    def exchange(comm):
        table = LayerTable(100, 8, comm, tmp_path, 0)
        own = parts[comm.rank]
        table.put(own, torch.from_numpy(np.repeat(own, 8).reshape(-1, 8)))
        table.exchange(parts)
        return table.rows

    for rows in run_in_process(2, exchange):
        assert not isinstance(rows, np.memmap)
        np.testing.assert_array_equal(rows, np.repeat(np.arange(100), 8).reshape(-1, 8))


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
