"""Rows of another process's GPU memory, opened with the reader's own device current.

torch's rebuild of a shared tensor opens it in the owner's device context; with the reader's own
index in its place the reader's kernels may address it, and no context is made on the owner's GPU.
On one GPU both must return the same rows; on more this is what reading peers rests on.
"""

import importlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.device_rows import open_on_reader
from tests.benchmarks.common import record
from tests.silicon.setting import COLLECTIVE_SECONDS, Setting, run_sharing

ROWS, WIDTH = 50_000, 100
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF"


def open_on_readers_device(setting: Setting) -> None:
    """Two processes read each other's rows by the runtime's kernel."""
    run_sharing(setting, _peers, 2, join=False)


def share_expandable_segments(setting: Setting) -> None:
    """The runtime's own way, with torch's allocator growing segments in place."""
    run_sharing(setting, _expandable, 2, join=False)


def share_host_lists(setting: Setting) -> None:
    """Two processes lock one copy of a graph's lists, and the sampler's kernels read them there."""
    run_sharing(setting, _lists, 2, join=False)


def share_peer_lists(setting: Setting) -> None:
    """Two processes keep a third of a graph's lists each, and read each other's in place."""
    run_sharing(setting, _peer_lists, 2, join=False)


def _join(rank: int) -> Communicator:
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    return Communicator()


def _rows(setting: Setting, rank: int) -> torch.Tensor:
    count = 60 if setting.emulated else ROWS
    rows = torch.arange(count, dtype=torch.float32, device=setting.device)[:, None]
    return (rows + 1e6 * rank).expand(-1, WIDTH).contiguous()


def _peers(setting: Setting, rank: int) -> None:
    comm = _join(rank)
    rows = _rows(setting, rank)
    if not setting.emulated:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize()
        offers: list[Any] = comm.all_gather_objects(reduce_tensor(rows))
        free_before = torch.cuda.mem_get_info()[0]
        peer = open_on_reader(offers[1 - rank], rows.device)
        assert peer.device == rows.device
        _gather(peer, setting.device, 1 - rank)
        taken = free_before - torch.cuda.mem_get_info()[0]
        if rank == 0:
            record("memory_taken_by_opening", taken / 2**20, "MiB")
            _record_contexts()
        comm.barrier()
        del peer
    _product_way(comm, rows, rank)
    comm.barrier()
    dist.destroy_process_group()


def _record_contexts() -> None:
    """Count the processes on all GPUs: two ranks make two contexts, wherever rows are opened."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:  # an image without it says nothing of this
        return
    nvml.nvmlInit()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    found = [len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) for gpu in gpus]
    record("contexts", float(sum(found)), "contexts", baseline=2.0, by_gpu=found)


def _expandable(setting: Setting, rank: int) -> None:
    os.environ[EXPANDABLE] = "expandable_segments:True"  # read at the first allocation
    comm = _join(rank)
    _product_way(comm, _rows(setting, rank), rank)
    comm.barrier()
    dist.destroy_process_group()


def _lists(setting: Setting, rank: int) -> None:
    from gnnplan.runtime.features.device_rows import HostShare
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
    from gnnplan.runtime.sampling.neighbor import NeighborSampler

    comm = _join(rank)
    indptr, indices = _graph(setting)
    nodes = len(indptr) - 1
    topology = DeviceTopology.load(
        indptr, indices, setting.device, pinned=True, share=HostShare(comm, [0, 1])
    )
    sampler = DeviceNeighborSampler(topology, [3, 2], device=setting.device)
    seeds = np.arange(rank, nodes, max(1, nodes // 20))
    found = sampler.sample(seeds, epoch=0, step=rank).to_host()
    expected = NeighborSampler(indptr, indices, [3, 2]).sample(seeds, epoch=0, step=rank)
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    mapped = Path("/proc/self/maps").read_text().count("gnnplan-")
    assert comm.all_gather_objects(mapped) == [1, 1], "each rank maps the one copy"
    comm.barrier()
    dist.destroy_process_group()


def _graph(setting: Setting) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Lists of one length, with neighbours by chance."""
    nodes, degree = (60, 4) if setting.emulated else (ROWS * 20, 16)
    indptr = np.arange(nodes + 1, dtype=np.int64) * degree
    return indptr, np.random.default_rng(0).integers(0, nodes, nodes * degree, dtype=np.int32)


def _peer_lists(setting: Setting, rank: int) -> None:
    from gnnplan.runtime.features.device_rows import HostShare
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology, PeerLists, Source
    from gnnplan.runtime.sampling.neighbor import NeighborSampler

    comm = _join(rank)
    indptr, indices = _graph(setting)
    holder = (np.arange(len(indptr) - 1) % 3).astype(np.int16)  # of every third node: the host
    held = [np.flatnonzero(holder == each) for each in range(2)]
    other = 1 - rank
    peers = PeerLists({other: held[other]}, np.where(holder == other, holder, np.int16(-1)), comm)
    topology = DeviceTopology.load(
        indptr, indices, setting.device, pinned=True, hot=held[rank],
        share=HostShare(comm, [0, 1]), peers=peers,
    )  # fmt: skip
    sampler = DeviceNeighborSampler(topology, [3, 2], device=setting.device)
    seeds = np.arange(rank, len(holder), max(1, len(holder) // 20))
    found = sampler.sample(seeds, epoch=0, step=rank).to_host()
    expected = NeighborSampler(indptr, indices, [3, 2]).sample(seeds, epoch=0, step=rank)
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    reads = topology.reads()
    # The nodes of the last hop are not expanded.
    expanded = holder[expected.n_id[: sum(expected.num_sampled_nodes[:-1])]]
    counted = {rank: Source.DEVICE, other: Source.PEER, 2: Source.HOST}
    for number, source in counted.items():
        assert reads[source].rows == np.count_nonzero(expanded == number) > 0
    comm.barrier()
    dist.destroy_process_group()


def _product_way(comm: Communicator, rows: torch.Tensor, rank: int) -> None:
    """What the feature store does: offer, map, gather."""
    from gnnplan.runtime.features.device_rows import share_rows

    shared = share_rows(rows, [1 - rank], comm)
    _gather(shared.peers[1 - rank], rows.device, 1 - rank)
    comm.barrier()


def _gather(peer: torch.Tensor, device: torch.device, owner: int) -> None:
    """Gather rows of the peer by the runtime's kernel and compare every value."""
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.gather_triton import DeviceTable
    from gnnplan.runtime.features.location import encode

    held = peer.shape[0]
    table = DeviceTable(
        encode(np.zeros(held, np.uint8), np.arange(held)), {0: DeviceRows("peer", peer)}, device
    )
    ids = torch.randint(0, held, (min(held, 4096),), device=device)
    out = torch.full((len(ids), peer.shape[1]), float("nan"), device=device)
    table.gather(ids, out, table.new_counts())
    assert torch.equal(out, (ids.float() + 1e6 * owner)[:, None].expand_as(out))
