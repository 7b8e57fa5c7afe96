"""Ranks of a host hold one copy of what they share: three processes, of two hosts."""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnnplan.runtime import folders
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import SlowerPathWarning, forget_warnings
from gnnplan.runtime.features.device_rows import HostShare
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan, Source
from tests.support.inprocess import run_in_process
from tests.support.ranks import free_port, run_on_ranks

pytest.importorskip("triton")

HOSTS = [0, 0, 1]
FULL = OSError(28, "No space left on device")


def _file_of(tensor: torch.Tensor) -> str:
    """Device, inode and name of what a tensor's memory is mapped from."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, _, _, device, inode, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= at < last:
            return f"{device} {inode} {' '.join(name)}"
    raise AssertionError("the tensor's memory is not mapped")


def _open(rank: int, graph: Graph, plan: Plan, folder: Path) -> tuple[list[str], Any, Any]:
    """Open the store and the sampler; the files of the host's rows and of its lists."""
    from gnnplan.runtime.features.device_open import open_device_store
    from gnnplan.runtime.loader.device_place import open_device_sampler

    device, comm = torch.device("cpu"), Communicator()
    store = open_device_store(graph, plan, folder, rank, device, comm=comm)
    sampler = open_device_sampler(
        plan, folder, graph, rank, device, edge_ids=False, num_steps=1, comm=comm
    )
    (rows,) = [each.table for each in store._table.sources.values() if each.kind == "host"]
    np.testing.assert_array_equal(rows.numpy(), graph.x)
    lists = sampler.topology.indices
    np.testing.assert_array_equal(lists.numpy(), graph.indices)
    return [_file_of(rows), _file_of(lists)], store, sampler


def _gathered(files: list[str]) -> list[list[str]]:
    return Communicator().all_gather_objects(files)


def _full(handle: int, offset: int, size: int) -> None:
    raise FULL


def _full_file(handle: int, offset: int, size: int) -> None:
    if "memfd:" not in str(Path(f"/proc/self/fd/{handle}").readlink()):
        raise FULL
    os.truncate(handle, size)


def _on_rank(rank: int, port: int, graph_folder: Path, folder: Path, memory: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    folders.SHARED_MEMORY = memory
    size = len(HOSTS)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    graph, plan = open_graph(graph_folder, validate=False), load_plan(folder)
    first = _open(rank, graph, plan, folder)
    _hold_shared(_gathered(first[0]), "gnnplan-", "(deleted)")
    folders.os.posix_fallocate = _full_file
    second = _open(rank, graph, plan, folder)
    _hold_shared(_gathered(second[0]), "/memfd:gnnplan-")
    folders.os.posix_fallocate = _full
    forget_warnings()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        third = _open(rank, graph, plan, folder)
    for private in zip(*_gathered(third[0]), strict=True):
        assert len(set(private)) == len(HOSTS)
        assert all("/dev/zero" in each for each in private), private
    (warning,) = [str(each.message) for each in said if each.category is SlowerPathWarning]
    assert f"each of a host's {HOSTS.count(HOSTS[rank])} ranks" in warning
    assert "No space left" in warning
    dist.barrier()
    assert not list(memory.iterdir())
    dist.destroy_process_group()
    (folder / f"done-{rank}").touch()


def _hold_shared(files: list[list[str]], *words: str) -> None:
    for rows_or_lists in zip(*files, strict=True):
        first, second, other = rows_or_lists
        assert first == second != other
        for each in rows_or_lists:
            assert all(word in each for word in words), each


@pytest.mark.distributed
def test_ranks_of_a_host_hold_its_rows_and_lists_once(
    make_graph: Callable[..., Graph], make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    graph = make_graph(num_nodes=4000, dim=3)
    make_plan(graph, [Source(kind="host")], num_ranks=3, hosts=HOSTS)
    memory = tmp_path / "shm"
    memory.mkdir()
    run_on_ranks(_on_rank, (free_port(), graph.path, tmp_path / "plan", memory), 3)
    assert all((tmp_path / "plan" / f"done-{rank}").exists() for rank in range(3))


def test_a_rank_that_finds_no_room_for_offsets_has_met_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It draws on the host from then on, and the next message of each is the same."""
    from gnnplan.runtime.sampling.gpu import topology

    here, copy = threading.local(), topology.copy_list

    def copy_where_room_is(values: Any, device: torch.device) -> torch.Tensor:
        if here.rank == 1:
            raise torch.OutOfMemoryError("no room")
        return copy(values, device)

    def load(comm: Communicator) -> bool:
        here.rank, found = comm.rank, False
        indptr, indices = np.array([0, 1, 2], np.int64), np.array([1, 0], np.int32)
        with contextlib.suppress(torch.OutOfMemoryError):
            topology.DeviceTopology.load(
                indptr, indices, torch.device("cpu"), pinned=True, share=HostShare(comm, [0, 1])
            )
            found = True
        assert comm.all_gather_objects(comm.rank) == [0, 1]
        return found

    monkeypatch.setattr(topology, "copy_list", copy_where_room_is)
    assert run_in_process(2, load) == [True, False]
