"""Kernels of sampling on a GPU: the laws against the runtime's samplers, counted again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.planner.cost.memory import HELD, gpu_batch_bytes, gpu_stack_bytes
from gnnplan.planner.cost.stages.host import UPDATE_STARTS, block_starts, pass_starts
from gnnplan.planner.cost.stages.sample import OWN_TENSORS, batch_launches, launch_words
from gnnplan.planner.cost.terms import LINK_STARTS
from gnnplan.planner.profile.loop import make_loop
from gnnplan.planner.profile.protocol import GpuTimingRequest
from gnnplan.planner.workload import BatchProfile, Spread
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.models import build as convolutions, functions
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import Sampler, Threads, Workload
from gnnplan.runtime.sampling.exclusion import Candidates, Exclude
from gnnplan.runtime.sampling.minibatch import Dialect, Request
from gnnplan.runtime.sampling.registry import BY_TYPE, WITHOUT_LINKS
from gnnplan.runtime.sampling.typed import SortedByType, TypedSampler
from tests.runtime.sampling.device_cases import random_graph, seeds_of, topology_of

pytest.importorskip("triton")

from gnnplan.planner.profile.gpu_timing import GpuTimed
from gnnplan.runtime.sampling.gpu import stack as device_stack
from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler, DeviceNeighborSampler
from gnnplan.runtime.sampling.gpu.stack import batch_bytes, stack_of, with_own_tensors
from gnnplan.runtime.sampling.gpu.tasks import (
    DeviceExcludingSampler,
    DeviceLinkSampler,
    DeviceNegatives,
    DeviceTypedSampler,
)
from tests.support.candidates import candidate_of_ranks

ONE = candidate_of_ranks(
    num_ranks=1, threads=Threads(), prefetch_depth=2, policy="none", gpus=("gpu0",)
)
FREE = """
empty empty_like empty_strided new_empty view _unsafe_view view_as reshape _reshape_alias slice
select narrow alias detach t transpose permute unsqueeze squeeze expand as_strided split
split_with_sizes unbind lift_fresh is_pinned set_ resize_ _local_scalar_dense
_record_function_enter_new _record_function_exit
"""
NO_KERNEL = frozenset(FREE.split())
"""Operations that start none: views, allocations, and waiting for a value."""


class Counter(TorchDispatchMode):
    """Counts the operators that reach a device, and kernels beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.inside = 0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name = func._schema.name.split("::")[1]
        self.found += not self.inside and name not in NO_KERNEL
        return func(*args, **(kwargs or {}))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device) -> Callable[..., int]:
    """Kernels that a call starts: torch's and ours."""
    if kernel_device.type == "cuda":
        pytest.skip("counted in Triton's interpreter, where every launch can be seen")
    from triton.runtime.interpreter import GridExecutor

    counter, launch = Counter(), GridExecutor.__call__

    @contextmanager
    def one_kernel() -> Iterator[None]:
        counter.found += not counter.inside
        before, counter.inside = counter.inside, True
        yield
        counter.inside = before

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_kernel():
            return launch(self, *args, **kwargs)

    def measure(call: Callable[[], object]) -> int:
        call()
        counter.found = 0
        with counter:
            call()
        return counter.found

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return measure


def requests_of(graph: Any, k: int) -> list[Request]:
    return [Request(seeds=seeds_of(graph, 6, 0), epoch=0, step=step) for step in range(k)]


@pytest.mark.parametrize(("dialect", "hops"), [(Dialect.FIRST_SEEN, 2), (Dialect.EVERY_HOP, 1)])
def test_neighbours_start_as_many_kernels_as_the_law_says(
    dialect: Dialect, hops: int, count: Callable[..., int], kernel_device: torch.device
) -> None:
    graph, every_hop = random_graph(1), dialect is Dialect.EVERY_HOP
    topology = topology_of(graph, kernel_device)
    sampler = DeviceNeighborSampler(topology, [2] * hops, device=kernel_device, dialect=dialect)
    seeds = seeds_of(graph, 6, 0)
    alone = count(lambda: sampler.sample(seeds, epoch=0, step=0))
    assert batch_launches(ONE, hops, every_hop=every_hop) == pytest.approx(alone, rel=0.1)
    batch = sampler.sample(seeds, epoch=0, step=0)
    assert count(lambda: with_own_tensors(batch)) <= OWN_TENSORS
    for k in (4, 8):
        requests = requests_of(graph, k)
        together = count(lambda r=requests: stack_of(sampler).sample_stack(r))
        stacked = replace(ONE, bulk_batches=k, prefetch_depth=0)
        law = batch_launches(stacked, hops, every_hop=every_hop) - OWN_TENSORS / k
        assert law * k == pytest.approx(together, rel=0.1)


@pytest.mark.parametrize(("dialect", "hops"), [(Dialect.FIRST_SEEN, 2), (Dialect.EVERY_HOP, 1)])
def test_neighbours_by_type_start_as_many_kernels_as_the_law_says(
    dialect: Dialect, hops: int, count: Callable[..., int], kernel_device: torch.device
) -> None:
    indptr, indices = random_graph(1)
    rows = SortedByType.of(indptr, indices, np.arange(len(indices)) % 3, 3)
    sampler = DeviceTypedSampler(
        topology_of((rows.ends, rows.indices), kernel_device), [[2] * hops] * 3,
        device=kernel_device, dialect=dialect, node_type=np.zeros(len(indptr) - 1, np.int32),
    )  # fmt: skip
    seeds = seeds_of((indptr, indices), 6, 0)
    alone = count(lambda: sampler.sample(seeds, epoch=0, step=0))
    every_hop = dialect is Dialect.EVERY_HOP
    assert batch_launches(ONE, hops, sampler=BY_TYPE, every_hop=every_hop) == pytest.approx(
        alone, rel=0.1
    )


@pytest.mark.parametrize("hops", [1, 3])
def test_links_start_as_many_kernels_more_as_the_law_says(
    hops: int, count: Callable[..., int], kernel_device: torch.device
) -> None:
    graph = random_graph(1)
    topology = topology_of(graph, kernel_device)
    sampler = DeviceLinkSampler(
        DeviceExcludingSampler(topology, [2] * hops, device=kernel_device),
        DeviceNegatives(topology, 2, candidates=Candidates.UNIFORM, seed=0),
        Exclude.BOTH,
    )
    stored = np.flatnonzero(np.diff(graph[0]))[:6]
    pairs = np.stack([np.asarray(graph[1])[graph[0][stored]], stored], axis=1).astype(np.int64)
    ids, constant_per_hop = np.arange(6), LINK_STARTS
    alone = count(
        lambda: sampler.sample(pairs, pairs, epoch=0, step=0, input_id=ids, global_num_seeds=6)
    )
    law = batch_launches(ONE, hops, sampler=WITHOUT_LINKS)
    law += constant_per_hop[0] + constant_per_hop[1] * hops
    assert law == pytest.approx(alone, rel=0.1)


def test_layers_start_as_many_kernels_as_the_law_says(
    count: Callable[..., int], kernel_device: torch.device
) -> None:
    graph = random_graph(1)
    sampler = DeviceLayerwiseSampler(topology_of(graph, kernel_device), [5], device=kernel_device)
    for k in (1, 4):
        requests = requests_of(graph, k)
        together = count(lambda r=requests: sampler.sample_stack(r))
        stacked = replace(ONE, bulk_batches=k, prefetch_depth=0)
        law = batch_launches(stacked, 1, sampler="ladies") - (OWN_TENSORS / k if k > 1 else 0)
        assert law * k == pytest.approx(together, rel=0.1)


def test_large_stacks_start_fewer_kernels_per_batch_small_ones_more_and_a_graph_few() -> None:
    alone, four, sixteen, many = (
        batch_launches(replace(ONE, bulk_batches=k), 2) for k in (1, 4, 16, 64)
    )
    assert many < sixteen < alone < four
    assert batch_launches(replace(ONE, threads=Threads(capture=1)), 2) == 7
    assert "16 batches to a stack" in launch_words(replace(ONE, bulk_batches=16), "neighbor")
    assert "for neighbours, not for labor" in launch_words(ONE, "labor")
    assert launch_words(replace(ONE, threads=Threads(capture=1)), "neighbor") == "by one CUDA graph"


@pytest.mark.parametrize("dialect", list(Dialect))
def test_room_for_a_stack_is_what_the_runtime_counts(
    dialect: Dialect, kernel_device: torch.device
) -> None:
    graph, every_hop = random_graph(1), dialect is Dialect.EVERY_HOP
    sampler = DeviceNeighborSampler(
        topology_of(graph, kernel_device), [3, 2], device=kernel_device, dialect=dialect,
        edge_ids=True,
    )  # fmt: skip
    batch = sampler.sample(seeds_of(graph, 8, 0), epoch=0, step=0)

    def spread(value: int) -> Spread:
        return Spread(mean=value, std=0.0, p99=value, largest=value)

    known = BatchProfile(
        seeds_per_rank=8,
        num_batches=300,
        vertices=[spread(8), *(spread(b.num_src) for b in reversed(batch.blocks))],
        edges=[spread(n) for n in batch.num_sampled_edges],
        block_edges=[spread(b.indices.numel()) for b in batch.blocks],
        input_standard_error=0.0,
        half_epoch_error=0.0,
    )
    held = gpu_batch_bytes(known, every_hop=every_hop)
    assert held == pytest.approx(batch_bytes(batch), rel=0.01)
    assert device_stack._PASSING + 1 == HELD
    # The runtime's own division gives the k that was asked for.
    budget = gpu_stack_bytes(known, 16, 2, every_hop=every_hop)
    assert budget // (HELD * batch_bytes(batch)) - 2 * 3 in (16, 17)


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, str], GpuTimed]:
    """Sampler, loader and model by the GPU's own kernels, interpreted."""
    monkeypatch.setattr(functions, "runs_on_device", lambda x: x.dtype == torch.float32)
    for module in (functions, convolutions):
        monkeypatch.setattr(module, "runs_on_kernels", lambda x: False)
    generate_rmat(tmp_path / "g", num_nodes=300, degree=8.0, feature_dim=16, train_fraction=0.5)

    def make(model: str, layers: int, dialect: Any) -> GpuTimed:
        work = Workload(model=model, fanouts=[3] * layers, num_layers=layers, hidden=8, heads=2)
        request = GpuTimingRequest(
            graph=str(tmp_path / "g"), workload=work, seeds=12, scales=[1.0], captures=True,
            sampler=Sampler(name="neighbor", dialect=dialect),
        )  # fmt: skip
        return GpuTimed(request, torch.device("cpu"))

    return make


def nodes_of(loss: torch.Tensor) -> int:
    """Nodes of a backward pass."""
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [after for after, _ in node.next_functions]
    return len(seen)


@pytest.mark.parametrize(("model", "layers"), [("sage", 1), ("sage", 3), ("gcn", 2), ("gat", 2)])
def test_a_step_and_its_blocks_start_what_the_host_is_charged_for(
    model: str, layers: int, loop: Callable[..., GpuTimed], count: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    timed, nodes, backward = loop(model, layers, "first_seen"), list[int](), torch.Tensor.backward

    def counted(self: torch.Tensor, *args: Any, **named: Any) -> None:
        nodes.append(nodes_of(self))
        backward(self, *args, **named)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    drawn = timed._sizes(12)
    batches = iter([timed._hand(drawn.next()) for _ in range(2)])
    kernels = count(lambda: timed._take(next(batches)))
    assert kernels + nodes[-1] == pass_starts(model, layers) + UPDATE_STARTS
    # One kernel gathers; its counters and the copy of labels are no kernels on a processor.
    assert count(lambda: timed._hand(drawn.next())) == 1 + block_starts(model, layers)


@pytest.mark.parametrize(("relations", "layers"), [(2, 1), (3, 1), (3, 2), (2, 2)])
def test_a_step_of_rgcn_starts_what_the_host_is_charged_for(
    relations: int, layers: int, loop: Callable[..., GpuTimed], count: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    del loop  # its processor is a GPU's
    monkeypatch.setattr(convolutions, "processor_of", lambda device: SimpleNamespace(apart=True))
    indptr, indices = random_graph(1)
    fanouts = [[2] * layers] * relations
    node_type = (np.arange(len(indptr) - 1) % 2).astype(np.int32)
    edge_type = np.arange(len(indices)) % relations
    sampler = TypedSampler(indptr, indices, edge_type, fanouts, node_type=node_type)
    batch = sampler.sample(seeds_of((indptr, indices), 9, 0), epoch=0, step=0)
    batch.x, batch.y = torch.ones(len(batch.n_id), 8), torch.zeros(9, dtype=torch.int64)
    batch.device_blocks = torch_blocks(batch)
    work = Workload(model="rgcn", fanouts=[2] * layers, num_layers=layers, hidden=8)
    types = GraphTypes(
        edge_types=[str(n) for n in range(relations)], node_types=["a", "b"], widths=[8, 4]
    )
    step, nodes, backward = (
        make_loop(build_model(work, 8, 3, "multiclass", types=types), work, "multiclass"),
        list[int](),
        torch.Tensor.backward,
    )

    def counted(self: torch.Tensor, *args: Any, **named: Any) -> None:
        nodes.append(nodes_of(self))
        backward(self, *args, **named)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    kernels = count(lambda: step.step(batch, 0))
    law = pass_starts("rgcn", layers, relations) + UPDATE_STARTS
    assert law == pytest.approx(kernels + nodes[-1], rel=0.1)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("hops", [1, 3])
def test_around_a_captured_graph_the_host_starts_what_the_law_says(
    dialect: Dialect, hops: int, loop: Callable[..., GpuTimed], count: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    timed = loop("sage", hops, dialect.value)
    captured = CapturedNeighborSampler.of(timed._sampler, 12)
    seeds = timed._seeds(12)
    captured.sample(seeds, epoch=0, step=0)  # fills the buffers that a replay would
    monkeypatch.setattr(CapturedNeighborSampler, "_steps", lambda self: None)
    around = count(lambda: captured.sample(seeds, epoch=0, step=0))
    law = batch_launches(
        replace(ONE, threads=Threads(capture=1)), hops, every_hop=dialect is Dialect.EVERY_HOP
    )
    # Its replay is a launch more; the copy of the seeds is counted with the labels'.
    assert law == around + 1 - 1
