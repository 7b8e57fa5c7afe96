"""GCN's weights of padded batches, made by kernels, are those of the loops, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.models.weights import PaddedGcn, count_self_loops, fill_weights
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.memory import Envelope
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.seeds import SeedSchedule
from tests.runtime.models.test_weights_device import looped_graph

pytest.importorskip("triton")

SLOW = pytest.mark.slow
NODES, FANOUTS = 80, [3, 2]
CASES = [
    (True, "full", Dialect.FIRST_SEEN, False),
    (False, "sampled", Dialect.FIRST_SEEN, True),
    pytest.param(True, "sampled", Dialect.FIRST_SEEN, False, marks=SLOW),
    pytest.param(True, "sampled", Dialect.EVERY_HOP, False, marks=SLOW),
    pytest.param(False, "sampled", Dialect.EVERY_HOP, False, marks=SLOW),
    pytest.param(False, "full", Dialect.EVERY_HOP, True, marks=SLOW),
]


@pytest.mark.parametrize(("loops", "norm", "dialect", "tight"), CASES)
def test_gcn_weights_of_padded_batches_are_those_of_the_loops(
    loops: bool, norm: Any, dialect: Dialect, tight: bool, kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from gnnplan.runtime.models import weights
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.padded import PaddedDraws
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    monkeypatch.setattr(weights, "_WEIGHED", 16)
    graph = looped_graph(int(loops), loops=loops)
    counted = count_self_loops(*graph)
    degree = np.diff(graph[0])
    gcn = PaddedGcn(
        torch.from_numpy(degree).to(kernel_device) if norm == "full" else None,
        None if counted is None or norm != "full" else torch.from_numpy(counted).to(kernel_device),
        nested=dialect is Dialect.FIRST_SEEN, may_loop=counted is not None,
    )  # fmt: skip
    oracle = NeighborSampler(*graph, FANOUTS, dialect=dialect, seed=1)
    sampler = DeviceNeighborSampler(
        DeviceTopology.load(*graph, kernel_device), FANOUTS, device=kernel_device, dialect=dialect,
        seed=1,
    )  # fmt: skip
    schedule = SeedSchedule(np.arange(12), 7, seed=1)
    room = Envelope.largest(7, FANOUTS, NODES, every_hop=dialect is Dialect.EVERY_HOP)
    batches = [
        fill_weights(
            oracle.sample(schedule.share(0, step)[0], epoch=0, step=step),
            Workload(model="gcn", gcn_norm=norm), degree, self_loops=counted,
        )
        for step in range(schedule.num_steps)
    ]  # fmt: skip
    if tight:  # the larger batch overflows
        room = Envelope((*room.rows[:-1], len(batches[0].n_id)), room.edges)
    draws = PaddedDraws(sampler, schedule, room, weights=gcn)
    batch = draws.new_batch()
    draws.begin_epoch(0)
    for expected in batches:
        draws.fill(batch)
        fits = len(expected.n_id) < room.rows[-1]
        assert int(batch.overflow) == (not fits)
        for found, block in zip(batch.blocks, expected.blocks, strict=True):
            edges, rows = (block.num_edges, block.num_dst) if fits else (0, 0)
            assert found.dst is not None
            assert found.weight is not None
            indptr, indices, dst, weight = (
                each.cpu().numpy()
                for each in (found.indptr, found.indices, found.dst, found.weight)
            )
            assert block.weight is not None
            np.testing.assert_array_equal(indptr[: rows + 1], block.indptr[: rows + 1])
            assert (indptr[rows:] == edges).all()
            np.testing.assert_array_equal(indices[:edges], block.indices[:edges])
            np.testing.assert_array_equal(weight[:edges], block.weight[:edges])
            if fits:
                row = np.repeat(np.arange(rows), np.diff(block.indptr))
                np.testing.assert_array_equal(dst[:edges], row)
            assert (indices[edges:] == found.num_src - 1).all()
            assert (dst[edges:] == found.num_dst - 1).all()
            assert not weight[edges:].any()
    assert batches[0].blocks[0].num_edges > 20
