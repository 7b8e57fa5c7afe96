"""An emulated GPU refuses what a GPU refuses: memory, lanes, kernels and the host's view of it."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.runtime.errors import InterpreterError

from gnnplan.planner.cost.graph_memory import draw_bytes
from gnnplan.planner.cost.memory import Budgets, gpu_parts
from gnnplan.planner.cost.stages.exchange_gpu import rows_in_transit
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.emulation.gpu import EmulatedGpu
from gnnplan.runtime.emulation.memory import BLOCK_BYTES, OrderError
from gnnplan.runtime.emulation.threads import start, stop
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.features.device_rows import padded_rows
from gnnplan.runtime.features.peer import DeviceExchange
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.processor import EMULATED, EmulatedProcessor, processor_of
from gnnplan.runtime.sampling.build import build_device_sampler
from gnnplan.runtime.sampling.gpu import topology as topology_module
from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.minibatch import Request
from gnnplan.runtime.sampling.registry import SAMPLERS
from gnnplan.runtime.train.streams import AbstractStreams, EmulatedStreams, streams_of
from tests.planner.cost.by_hand import request
from tests.support.candidates import candidate_of_ranks
from tests.support.profiles import batch_profile, exactly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")

CAPACITY = 1 << 20


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    started = EmulatedGpu(index=1, capacity_bytes=CAPACITY, peers=[0])
    start(started)
    yield started
    stop()


@pytest.fixture
def streams(gpu: EmulatedGpu) -> AbstractStreams:
    found = streams_of(EMULATED)
    assert isinstance(found, EmulatedStreams)
    return found


@triton.jit
def double_kernel(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def fill_kernel(address, count, BLOCK: tl.constexpr):
    at = address.to(tl.pointer_type(tl.float32)) + tl.arange(0, BLOCK)
    tl.store(at, 0.0, mask=tl.arange(0, BLOCK) < count)


@triton.jit
def increased(x):
    return x + tl.sum(tl.full((4,), 1, tl.int32), axis=0)


@triton.jit
def increase_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, increased(increased(tl.load(x + at))))


DOUBLE: Any = double_kernel
FILL: Any = fill_kernel
INCREASE: Any = increase_kernel


@pytest.mark.parametrize("weighted", [False, True])
def test_fastgcn_begins_in_what_it_keeps(
    gpu: EmulatedGpu, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, degree = 5000, 20
    monkeypatch.setattr(topology_module, "SUMMED_ENTRIES", 1000)
    rng = np.random.default_rng(0)
    indptr = np.arange(0, nodes * degree + 1, degree)
    indices = rng.integers(0, nodes, nodes * degree).astype(np.int32)
    weight = rng.integers(1, 9, nodes * degree).astype(np.float32) if weighted else None
    gpu.memory.capacity_bytes = None
    lists = DeviceTopology.load(indptr, indices, EMULATED)
    before = gpu.memory.used_bytes + (0 if weight is None else weight.nbytes)
    gpu.memory.peak_bytes = gpu.memory.used_bytes
    sampler = DeviceLayerwiseSampler(
        lists, [4], device=EMULATED, method="fastgcn", replace=True, edge_weight=weight
    )
    peak = gpu.memory.peak_bytes - before
    assert SAMPLERS["fastgcn"].node_bytes * nodes <= peak + 8 * BLOCK_BYTES
    assert peak <= SAMPLERS["fastgcn"].node_bytes * nodes + 64 * 1000
    expected = LayerwiseSampler(
        indptr, indices, [4], method="fastgcn", replace=True, edge_weight=weight
    )
    assert sampler._fixed is not None
    assert expected.graph.fixed is not None
    row = expected.graph.fixed[0]
    np.testing.assert_array_equal(sampler._fixed.ids.cpu().numpy(), row.cols)
    np.testing.assert_allclose(sampler._fixed.values.cpu().numpy(), row.values, rtol=1e-12)


@pytest.mark.parametrize("replace", [False, True])
def test_fastgcn_draws_a_stack_in_less_than_its_tables(gpu: EmulatedGpu, replace: bool) -> None:
    nodes = 40_000
    indptr, indices = np.arange(nodes + 1), np.roll(np.arange(nodes, dtype=np.int32), 1)
    gpu.memory.capacity_bytes = None
    lists = DeviceTopology.load(indptr, indices, EMULATED)
    sampler = DeviceLayerwiseSampler(lists, [4], device=EMULATED, method="fastgcn", replace=replace)
    before = gpu.memory.peak_bytes = gpu.memory.used_bytes
    requests = [Request(seeds=np.arange(9) + step, epoch=0, step=step) for step in range(8)]
    sampler.sample_stack(requests)
    assert gpu.memory.peak_bytes - before < 8 * nodes


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_buffers_of_exchanged_rows_are_those_that_are_counted(
    gpu: EmulatedGpu, stored: torch.dtype
) -> None:
    count, width = 400, 75
    own = padded_rows(count, width, stored, EMULATED)
    own.fill_(1)
    exchange = DeviceExchange(own, {1: 0}, Communicator())  # with itself: as many are served
    numbers = torch.full((count,), 1, dtype=torch.int64, device=EMULATED)
    slots = torch.arange(count, dtype=torch.int64, device=EMULATED)
    out = torch.zeros((count, width), device=EMULATED)
    before = gpu.memory.peak_bytes = gpu.memory.used_bytes
    exchange.fill(numbers, slots, None, out)
    peak = gpu.memory.peak_bytes - before
    assert bool((out == 1).all())
    counted = rows_in_transit(count, count, width * stored.itemsize, width * 4)
    # Places of rows in the batch, which the sum has room for where it was drawn.
    assert counted - 8 * count <= peak <= counted + 4 * 8 * count


def double(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    DOUBLE[(1,)](x, out, x.numel(), BLOCK=16)
    return out


def test_the_language_is_replaced_once(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    x = torch.arange(8, device=EMULATED, dtype=torch.int32)
    INCREASE[(1,)](x, BLOCK=8)
    replaced: list[object] = []
    monkeypatch.setattr(interpreter, "_patch_lang_core", lambda *found: replaced.append(found))
    INCREASE[(1,)](x, BLOCK=8)
    assert x.cpu().tolist() == list(range(16, 24))
    assert replaced == []


def test_a_processor_says_where_a_rank_computes(gpu: EmulatedGpu) -> None:
    found = processor_of(EMULATED)
    assert isinstance(found, EmulatedProcessor)
    assert found.is_gpu
    assert [found.can_map(index) for index in range(3)] == [True, True, False]
    assert not processor_of(torch.device("cpu")).is_gpu


def test_without_one_a_numbered_cpu_is_cores() -> None:
    assert not processor_of(EMULATED).is_gpu


def test_tensors_know_where_they_lie(gpu: EmulatedGpu) -> None:
    host = torch.arange(6.0)
    device = host.to(EMULATED)
    assert (host.device, device.device) == (torch.device("cpu"), EMULATED)
    assert torch.zeros(3, device=EMULATED).device == EMULATED
    assert (device * 2 + 1)[2:].view(2, 2).device == EMULATED
    assert torch.empty_like(device, device="cpu").device == torch.device("cpu")
    assert device.to(EMULATED) is device
    assert device.to(torch.float64).device == EMULATED
    back = device.cpu()
    assert back.device == torch.device("cpu")
    assert torch.equal(back, host)
    back[0] = 7.0
    assert device.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_numpy_does_not_look_into_the_device(gpu: EmulatedGpu) -> None:
    with pytest.raises(TypeError, match=r"Tensor\.cpu\(\) copies it"):
        torch.zeros(3, device=EMULATED).numpy()


def test_tensors_of_both_are_not_mixed(gpu: EmulatedGpu) -> None:
    device, host = torch.ones(3, device=EMULATED), torch.ones(3)
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        device.add(host)
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        host[torch.zeros(2, dtype=torch.int64, device=EMULATED)]
    assert (device + torch.tensor(2.0)).tolist() == [3.0] * 3
    assert device[torch.tensor([0, 2])].device == EMULATED
    device.copy_(host)
    host.copy_(device)


def test_gradients_lie_where_parameters_do(gpu: EmulatedGpu) -> None:
    model = torch.nn.Linear(3, 2).to(EMULATED)
    seen: list[torch.device] = []

    class Looked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            (grad,) = grad_outputs
            seen.append(grad.device)
            return grad

    Looked.apply(model(torch.ones(4, 3, device=EMULATED))).sum().backward()
    assert seen == [EMULATED]
    assert all(p.grad.device == EMULATED for p in model.parameters() if p.grad is not None)
    torch.optim.Adam(model.parameters(), fused=True).step()


def test_memory_runs_out_and_comes_back(gpu: EmulatedGpu) -> None:
    before = gpu.memory.used_bytes
    half = torch.empty(CAPACITY // 2, dtype=torch.uint8, device=EMULATED)
    assert gpu.memory.used_bytes - before == CAPACITY // 2
    assert processor_of(EMULATED).free_bytes() == CAPACITY // 2 - before
    with pytest.raises(torch.OutOfMemoryError, match=f"{CAPACITY // 2} of {CAPACITY} in use"):
        torch.cat([half, half])
    view = half[10:]
    del half
    assert gpu.memory.used_bytes - before == CAPACITY // 2
    del view
    gc.collect()
    assert gpu.memory.used_bytes == before


def test_kernels_address_the_device_and_locked_memory_alone(gpu: EmulatedGpu) -> None:
    host = torch.arange(6.0)
    with pytest.raises(ValueError, match="not page-locked"):
        double(host)
    assert double(host.to(EMULATED)).tolist() == [2 * n for n in range(6)]
    locked = processor_of(EMULATED).page_lock(host)
    out = torch.empty(6, device=EMULATED)
    DOUBLE[(1,)](locked, out, 6, BLOCK=16)
    assert out.tolist() == [2 * n for n in range(6)]
    with pytest.raises(InterpreterError, match="neither the emulated GPU's memory nor"):
        DOUBLE[(1,)](locked, out, 16, BLOCK=16)
    with pytest.raises(InterpreterError, match="a kernel writes 4 bytes"):
        FILL[(1,)](out.data_ptr() + 12, 6, BLOCK=16)


def test_a_lane_waits_for_what_it_reads(gpu: EmulatedGpu, streams: AbstractStreams) -> None:
    with streams.on("sample"):
        made = double(torch.ones(4, device=EMULATED))
        mark = streams.mark()
        late = double(made)
    with streams.on("gather"):
        with pytest.raises(OrderError, match=r"'gather' reads .* that lane 'sample' writes"):
            made.add(1)
        streams.wait(mark)
        assert (made + 1).tolist() == [3.0] * 4
        with pytest.raises(OrderError, match="lane 'sample' writes"):
            double(late)


def test_a_lane_waits_before_it_overwrites(gpu: EmulatedGpu, streams: AbstractStreams) -> None:
    buffer = torch.ones(4, device=EMULATED)
    processor_of(EMULATED).synchronize()
    with streams.on("gather"):
        read = buffer + 1
        mark = streams.mark()
    with pytest.raises(OrderError, match=r"lane '' writes .* that lane 'gather' reads"):
        buffer.zero_()
    streams.wait(mark)
    buffer.zero_()
    assert read.tolist() == [2.0] * 4


def test_memory_that_another_lane_reads_is_kept(gpu: EmulatedGpu, streams: AbstractStreams) -> None:
    def made() -> torch.Tensor:
        with streams.on("sample"):
            found = torch.ones(4, device=EMULATED)
            mark = streams.mark()
        streams.wait(mark)
        return found

    first = made()
    streams.keep([first])
    total = first + 1
    del first
    assert total.tolist() == [2.0] * 4
    second = made()
    total = total + second
    del second
    with pytest.raises(OrderError, match="may still read: they were not kept"):
        total.add(1)


def test_the_host_waits_for_what_is_copied_to_it(
    gpu: EmulatedGpu, streams: AbstractStreams
) -> None:
    host = torch.zeros(3)
    with streams.on("gather"):
        host.copy_(torch.ones(3, device=EMULATED), non_blocking=True)
        mark = streams.mark()
    with pytest.raises(OrderError, match="lane 'gather' may still copy to it"):
        host.tolist()
    mark.synchronize()
    assert host.tolist() == [1.0] * 3


def test_kernels_that_would_be_compiled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(InputError, match="TRITON_INTERPRET=1"):
        start(EmulatedGpu())


LAYERS: dict[str, float | str] = {"sizes": "30,30"}
LISTING = {
    "neighbor": ("first_seen", {}), "neighbor by weights": ("first_seen", {"weights": "graph"}),
    "labor": ("first_seen", {}), "labor dependent": ("first_seen", {"kappa": 4}),
    "labor exactly": ("first_seen", {"form": "exact_k"}),
    "ladies dependent": ("every_hop", {**LAYERS, "kappa": 4}),
    "neighbor with replacement": ("first_seen", {"draws": "replacement"}),
    "labor star": ("first_seen", {"variant": "star"}), "ladies": ("every_hop", LAYERS),
    "las": ("first_seen", {"factor": 2, "correction": "poisson"}),
}  # fmt: skip
"""Ways of drawing that lay lists out, and two that do not: expansion and parameters."""
FIXED_BYTES = 400_000
"""Most bytes of a draw that do not grow with its batch."""


@pytest.mark.parametrize("way", LISTING)
def test_lists_are_laid_out_in_the_bytes_that_are_counted(gpu: EmulatedGpu, way: str) -> None:
    nodes, degree, seeds = 3000, 60, np.arange(30)
    dialect, parameters = LISTING[way]
    named = Sampler(name=way.split()[0], dialect=dialect, parameters=parameters)
    indptr = np.arange(0, nodes * degree + 1, degree)
    indices = np.random.default_rng(0).integers(0, nodes, nodes * degree).astype(np.int32)
    gpu.memory.capacity_bytes = None
    drawing = build_device_sampler(
        named, DeviceTopology.load(indptr, indices, EMULATED), indptr, indices, [4, 4], 0,
        device=EMULATED, edge_ids=False, local=np.arange(100),
        edge_weight=np.linspace(0.5, 1.5, nodes * degree, dtype=np.float32),
    )  # fmt: skip
    drawing.sample(seeds, epoch=0, step=0)
    before = gpu.memory.peak_bytes = gpu.memory.used_bytes
    batch = drawing.sample(seeds, epoch=0, step=1)
    taken = gpu.memory.peak_bytes - before
    whole = [batch.blocks[0]] if dialect == "first_seen" else batch.blocks
    profiled = replace(
        batch_profile(30),
        vertices=[exactly(float(batch.n_id.numel()))],
        block_edges=[exactly(float(batch.blocks[0].indices.numel()))],
        list_entries=float(degree * sum(block.num_dst for block in whole)),
    )
    one = candidate_of_ranks(gpus=["gpu0"])
    asked = replace(request(), user_sampler=named)
    listed = draw_bytes(asked, one, profiled, on_gpu=True)
    parts = gpu_parts(
        one, asked.graph, profiled, load_preset("siton"), 0, Budgets(), draw_bytes=listed
    )
    assert (listed == 0) == (way in ("neighbor", "labor"))
    assert 0.25 * listed < taken <= parts["sampling"] + FIXED_BYTES
