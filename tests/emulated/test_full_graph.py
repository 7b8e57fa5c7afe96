"""The whole graph on an emulated GPU: what is drawn, the gradients, and the memory it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gnnplan.planner.fullgraph.formulas import crossing_rows
from gnnplan.planner.fullgraph.memory import device_bytes
from gnnplan.planner.fullgraph.parts import sizes_of
from gnnplan.planner.fullgraph.timing import StandIn
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.emulation.gpu import EmulatedGpu
from gnnplan.runtime.emulation.memory import BLOCK_BYTES
from gnnplan.runtime.emulation.threads import start, stop
from gnnplan.runtime.fullgraph.forward import FullGraphModel
from gnnplan.runtime.fullgraph.part import Part, build_part, connect_parts
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.schema import FullGraph, Workload
from gnnplan.runtime.processor import EMULATED
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.fullgraph import FullGraphLoop, WholeEpoch
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import make_optimizer
from tests.runtime.fullgraph.cases import Case, gradient_of, new_model, pyg_loss, random_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
HOST = torch.device("cpu")
BAR = 1e-5
TENSORS = 60
"""Tensors that live at once, at most; each takes whole blocks, whose rests no sum counts."""


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    started = EmulatedGpu(index=0, capacity_bytes=1 << 30)
    start(started)
    yield started
    stop()


class Other(StandIn):
    """The other rank of two, whose rows are zeros that lie where this rank's do."""

    def all_to_all_ids(
        self, ids: Tensor, counts: Sequence[int], *, stage: Stage = Stage.EXCHANGE_IDS
    ) -> tuple[Tensor, list[int]]:
        """When the parts are made, all nodes of the other's halo; later the first three."""
        if stage is not Stage.HALO_EXCHANGE:
            return super().all_to_all_ids(ids, counts, stage=stage)
        assert ids.device == HOST
        return torch.arange(3), [0, 3]

    def all_to_all_rows(
        self, rows: Tensor, counts: Sequence[int], received_counts: Sequence[int], *,
        out: Tensor | None = None, stage: Stage = Stage.EXCHANGE_ROWS,
    ) -> Tensor:  # fmt: skip
        """Made anew at every call."""
        return rows.new_zeros(sum(received_counts), rows.shape[1])


def open_part(
    case: Case, name: str, settings: FullGraph, device: torch.device, **model: Any
) -> Any:
    """Rank 0 of two; the other one is played."""
    partition = (np.arange(len(case.y)) % 3 > 0).astype(np.int32)
    parts = connect_parts([
        build_part(case.indptr, case.indices, partition, rank, 2, loops=name != "sage")
        for rank in range(2)
    ])  # fmt: skip
    mine = parts[0]
    comm = Other(0, 2, mine.inner[mine.send], [int(n) for n in mine.send_counts])
    made = new_model(name, case.x.shape[1], **model).to(device)
    full = FullGraphModel(
        made, name, case.indptr, case.indices, partition, settings, comm=comm, device=device
    )
    return full, mine


@pytest.mark.parametrize("name", ["gcn", "gat"])
@pytest.mark.parametrize("drop", ["nodes", "edges", "boundary-edges"])
@pytest.mark.usefixtures("gpu")
def test_what_is_drawn_and_kept_is_the_hosts(name: str, drop: Any) -> None:
    case, settings = random_case(), FullGraph(keep=0.3, drop=drop, rounding="stochastic")
    there, here = (
        open_part(case, name, settings, device)[0].layers(3) for device in (EMULATED, HOST)
    )
    assert len({int(layer.outer.num_edges) for layer in here}) > 1
    for found, expected in zip(there, here, strict=True):
        assert found.send.device == EMULATED
        assert torch.equal(found.send.cpu(), expected.send)
        assert (found.send_counts, found.received_counts) == (
            expected.send_counts, expected.received_counts,
        )  # fmt: skip
        for mine, theirs in (
            (found.inner, expected.inner),
            (found.outer, expected.outer),
            (found.joined, expected.joined),
        ):
            assert (mine is None) == (theirs is None)
            for field in ("indptr", "indices", "weight"):
                a, b = (getattr(block, field, None) for block in (mine, theirs))
                assert (a is None) == (b is None), field
                if a is not None and b is not None:
                    assert torch.equal(a.cpu(), b), field


def crossing_rows_of(part: Part, keep: float) -> int:
    """Rows that arrive on average where edges are dropped."""
    return round(crossing_rows(np.bincount(part.halo_edges[1]).tolist(), keep))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        ("sage", False), ("sage", True), ("gat", True),
        pytest.param("gcn", False, marks=SLOW), pytest.param("gat", False, marks=SLOW),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_whole_graph(
    name: str, deterministic: bool, gpu: EmulatedGpu
) -> None:
    """By kernels, and where atomic additions are not allowed by slabs of edges."""
    case = random_case(num_nodes=90)
    model = new_model(name, case.x.shape[1])
    pyg_loss(model, case).backward()
    expected = gradient_of(model)
    moved = new_model(name, case.x.shape[1]).to(EMULATED)
    full = FullGraphModel(
        moved, name, case.indptr, case.indices, np.zeros(len(case.y), np.int32), FullGraph(),
        comm=Communicator(), device=EMULATED,
    )  # fmt: skip
    torch.use_deterministic_algorithms(deterministic)
    try:
        logits = full.forward(case.x.to(EMULATED), full.layers(0))
        rows = torch.from_numpy(case.train).to(EMULATED)
        torch.nn.functional.cross_entropy(logits[rows], case.y.to(EMULATED)[rows]).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    found = gradient_of(moved).cpu()
    assert float((found - expected).abs().max() / expected.abs().max()) < BAR


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sage", FullGraph()),
        ("sage", FullGraph(precompute_first_layer=True)),
        ("gcn", FullGraph(keep=0.3)),
        ("gat", FullGraph()),
        ("gat", FullGraph(keep=0.3)),
        ("sage", FullGraph(keep=0.3, drop="edges")),
        ("gat", FullGraph(keep=0.3, drop="edges")),
        ("gcn", FullGraph(keep=0.3, drop="boundary-edges")),
        ("sage", FullGraph(exchange="broadcast")),
    ],
)
@pytest.mark.slow
def test_a_gpus_peak_is_the_predicted_one_or_little_less(
    name: str, settings: FullGraph, gpu: EmulatedGpu
) -> None:
    """The sum is no less than what is counted but for part blocks, and at most a fifth more."""
    case = random_case(num_nodes=600, degree=8, width=32)
    full, part = open_part(case, name, settings, EMULATED, hidden=32)
    x = case.x[torch.from_numpy(part.inner)].to(EMULATED)
    if settings.precompute_first_layer:
        full.precompute(x)
    seeds = torch.arange(part.num_inner // 2).to(EMULATED)
    loop = FullGraphLoop(
        model=full.model,
        optimizer=make_optimizer(full.model, learning_rate=1e-3, weight_decay=0.0),
        gradients=GradientBuffer(full.model), comm=Communicator(), meter=StageMeter(),
        task="multiclass", seed=0, full=full, x=x, seeds=seeds,
        y=torch.zeros(len(seeds), dtype=torch.int64, device=EMULATED), num_seeds=len(seeds),
    )  # fmt: skip
    for epoch in range(2):
        loop.step(WholeEpoch(epoch=epoch), epoch)
    work = Workload(model=name, num_layers=3, fanouts=[-1] * 3, hidden=32, heads=2)
    crossing = replace(sizes_of(part), halo=crossing_rows_of(part, settings.keep), sent=3)
    if settings.exchange == "broadcast":
        others = 600 - part.num_inner
        crossing = replace(crossing, received=(0, others), halo=others, sent=part.num_inner)
    predicted = device_bytes(
        sizes_of(part), [32, 32, 32, 4], workload=work, settings=settings, crossing=crossing,
        num_parameters=sum(p.numel() for p in full.model.parameters()), num_seeds=len(seeds),
    )  # fmt: skip
    total, peak = sum(predicted.values()), gpu.memory.peak_bytes
    assert peak - TENSORS * BLOCK_BYTES <= total <= 1.2 * peak, (predicted, peak)
