"""The device's stages make the batches of the host's: in Triton's interpreter where no GPU is."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import InputError, SlowerPathWarning, forget_warnings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.loader import factory
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.weights import count_degrees
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import DynamicCache, Sampler, TopologyPlacement
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
from tests.support.plans import make_plan

pytest.importorskip("triton")

from gnnplan.runtime.features import device_rows
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.loader import (
    device as loader_device_sample,
    device_place as loader_device_place,
    factory as loader_build,
)
from gnnplan.runtime.loader.device import DeviceMiniBatch
from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler
from gnnplan.runtime.sampling.registry import SAMPLERS

STEPS = 3


@pytest.fixture(scope="module")
def tiny_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """400 nodes: the interpreter runs kernels one program at a time."""
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    return generate_sbm(folder, num_nodes=400, degree=8.0, feature_dim=6, num_classes=3, seed=5)


def open_loader(graph: Graph, folder: Path, device: torch.device, **settings: Any) -> PlannedLoader:
    """The device's stages over a fresh plan."""
    settings = {"fanouts": [3, 2], "batch_size": 24, **settings}
    make_plan(graph, folder, **settings)
    return PlannedLoader(folder, graph, device=device, on_device=True)


def host_loader(graph: Graph, folder: Path, **settings: Any) -> PlannedLoader:
    """The host's stages under the same plan."""
    return PlannedLoader(folder, graph, on_device=False, **settings)


def assert_same(found: Any, expected: Any) -> None:
    """Ids, blocks, rows and labels are equal, bit for bit."""
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    np.testing.assert_array_equal(found.seeds, expected.seeds)
    np.testing.assert_array_equal(found.input_id, expected.input_id)
    assert found.global_num_seeds == expected.global_num_seeds
    assert torch.equal(found.x.cpu(), expected.x)
    assert torch.equal(found.y.cpu(), expected.y)
    for mine, theirs in zip(found.device_blocks, expected.blocks, strict=True):
        assert (mine.num_src, mine.num_dst) == (theirs.num_src, theirs.num_dst)
        np.testing.assert_array_equal(mine.indptr.cpu().numpy(), theirs.indptr[: mine.num_dst + 1])
        np.testing.assert_array_equal(mine.indices.cpu().numpy(), theirs.indices[: mine.num_edges])
        assert (mine.weight is None) == (theirs.weight is None)
        if mine.weight is not None:
            np.testing.assert_array_equal(mine.weight.cpu().numpy(), theirs.weight)


def _lists(loader: PlannedLoader) -> Any:
    drawing = loader.topology
    assert isinstance(drawing, loader_device_sample.DeviceSampleStage)
    return drawing.sampler.topology


PLANS: dict[str, dict[str, Any]] = {
    "host": {},
    "every_hop": {"dialect": "every_hop", "own_rows": 100},
    "threads": {"own_rows": 100, "sample_threads": 2, "prefetch_depth": 3},
    "full": {"sampler": Sampler(name="full"), "fanouts": [-1, -1], "batch_size": 6},
    "gcn": {"model": "gcn", "topology": TopologyPlacement(policy="replicated")},
    "gcn sampled": {"model": "gcn", "gcn_norm": "sampled", "dialect": "every_hop"},
    "disk": {"disk_budget_bytes": 1 << 20, "own_rows": 50},
    "cache": {"own_rows": 50, "cache": DynamicCache(policy="lru", rows=[90])},
    "ladies": {
        "sampler": Sampler(name="ladies", dialect="every_hop", parameters={"sizes": "30,20"})
    },
    "labor": {"sampler": Sampler(name="labor", parameters={"kappa": 4})},
    "las": {
        "sampler": Sampler(name="las", parameters={"factor": 3, "correction": "poisson"}),
        "own_rows": 80,
    },
    "las that changes": {
        "sampler": Sampler(name="las", parameters={"factor": 2, "schedule": "measured"}),
        "own_rows": 80,
    },
}
ON_HOST = ("las that changes",)
"""Plans whose batches the host draws."""


SLOW = ("ladies",)
"""Plans whose host sampler takes long to compile."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PLANS]
)
def test_batches_and_counts_are_the_hosts(
    name: str, tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    loader = open_loader(tiny_graph, tmp_path / "plan", kernel_device, **PLANS[name])
    host = host_loader(tiny_graph, tmp_path / "plan")
    assert isinstance(loader.store, DeviceFeatureStore)
    for found, expected in zip(loader.batches(STEPS), host.batches(STEPS), strict=True):
        assert isinstance(found, DeviceMiniBatch) == (name not in ON_HOST)
        found.device_blocks = found.device_blocks or torch_blocks(found)
        assert_same(found, expected)
    (rows, num_bytes), (host_rows, host_bytes) = loader.meter.totals(), host.meter.totals()
    assert {k: n for k, n in rows.items() if n} == {k: n for k, n in host_rows.items() if n}
    assert {k: n for k, n in num_bytes.items() if n} == {k: n for k, n in host_bytes.items() if n}
    lists, host_lists = loader.meter.list_totals()[0], host.meter.list_totals()[0]
    assert lists == host_lists
    assert bool(lists) == (name == "gcn")
    assert set(loader.meter.stages()) >= {"seeds", "sample", "gather", "batch"}
    loader.close()
    host.close()


def test_rows_are_given_back_once_the_device_has_done_what_was_asked_of_it(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = open_loader(tiny_graph, tmp_path / "plan", kernel_device)
    held, done = loader.over("val"), list[str]()
    processor = processor_of(kernel_device)

    def fail() -> None:
        done.append("waited")
        raise RuntimeError("a kernel before failed")

    monkeypatch.setattr(processor, "synchronize", fail)
    monkeypatch.setattr(loader_build, "processor_of", lambda device: processor)
    monkeypatch.setattr(loader.store, "close", lambda: done.append("closed"))
    held.close()
    assert done == []
    loader.close()
    assert done == ["waited", "closed"]


def train(loader: PlannedLoader, graph: Graph, device: torch.device) -> list[float]:
    """Losses of some steps from the same parameters."""
    torch.manual_seed(3)
    plan = loader.plan
    model = build_model(plan.workload, graph.feature_dim, graph.num_classes, str(graph.task))
    model.to(device)
    loop = TrainLoop(
        model=model,
        optimizer=make_optimizer(model, learning_rate=0.01, weight_decay=0.0),
        gradients=GradientBuffer(model),
        comm=Communicator(),
        meter=StageMeter(),
        task=str(graph.task),
        seed=0,
    )
    return loop.run(loader.batches(STEPS), 0, lambda loss: None)


def test_a_device_that_draws_leaves_no_second_copy_of_gcns_degrees_on_the_host(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[bool]()

    def count(*lists: Any) -> Any:
        counted.append(True)
        return count_degrees(*lists)

    monkeypatch.setattr(factory, "count_degrees", count)
    loader = open_loader(tiny_graph, tmp_path / "plan", kernel_device, **PLANS["gcn"])
    assert len(list(loader.batches(1))) == 1
    loader.close()
    assert not counted
    host_loader(tiny_graph, tmp_path / "plan").close()
    assert counted == [True]


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_losses_are_the_hosts(
    model: str, tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    loader = open_loader(
        tiny_graph, tmp_path / "plan", kernel_device, model=model, sample_threads=1, own_rows=99
    )
    host = host_loader(tiny_graph, tmp_path / "plan")
    found = train(loader, tiny_graph, kernel_device)
    expected = train(host, tiny_graph, torch.device("cpu"))
    # The same kernels on the CPU: the same bits. On a GPU sums are taken in another order.
    tolerance = 1e-5 if kernel_device.type == "cuda" else 0.0
    assert found == pytest.approx(expected, rel=tolerance, abs=0.0)
    assert len(found) > 1


def test_the_view_for_pyg_is_the_hosts(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    make_plan(tiny_graph, tmp_path / "plan", fanouts=[3, 2], batch_size=24)
    loader = PlannedLoader(
        tmp_path / "plan", tiny_graph, device=kernel_device, on_device=True, blocks=False
    )
    host = host_loader(tiny_graph, tmp_path / "plan", blocks=False)
    found, expected = next(iter(loader)), next(iter(host))
    for name in ("x", "edge_index", "n_id", "e_id", "y", "input_id"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    assert found.num_sampled_nodes == expected.num_sampled_nodes


def test_the_order_of_drawn_ids_cannot_be_overwritten(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    loader = open_loader(tiny_graph, tmp_path / "plan", kernel_device)
    batch = next(iter(loader))
    with pytest.raises(AttributeError, match="not replaced"):
        batch.n_id = np.arange(3)
    with pytest.raises(AttributeError, match="not replaced"):
        batch.blocks = list(batch.blocks)


def test_a_plan_without_triton_runs_on_the_host_with_one_warning(
    tiny_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_device_place, "has_triton", lambda: False)
    forget_warnings()
    with pytest.warns(SlowerPathWarning, match="Triton is not installed; pip install"):
        loader = open_loader(tiny_graph, tmp_path / "plan", torch.device("cpu"))
    again = PlannedLoader(tmp_path / "plan", tiny_graph, on_device=True)  # warns no more
    host = host_loader(tiny_graph, tmp_path / "plan")
    for found, twin, expected in zip(loader, again, host, strict=True):
        np.testing.assert_array_equal(found.n_id, expected.n_id)
        assert torch.equal(found.x, expected.x)
        assert torch.equal(twin.x, expected.x)


def test_a_sampler_without_a_form_on_a_gpu_draws_on_the_host_with_one_warning(
    tiny_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SAMPLERS["neighbor"], gpu="")
    monkeypatch.setitem(SAMPLERS, "neighbor", spec)
    forget_warnings()
    with pytest.warns(SlowerPathWarning, match="sampler neighbor has no form on a GPU; plan with"):
        loader = open_loader(tiny_graph, tmp_path / "plan", torch.device("cpu"))
    again = PlannedLoader(tmp_path / "plan", tiny_graph, on_device=True)  # warns no more
    host = host_loader(tiny_graph, tmp_path / "plan")
    for found, twin, expected in zip(loader, again, host, strict=True):
        np.testing.assert_array_equal(found.n_id, expected.n_id)
        assert torch.equal(found.x, expected.x)
        assert torch.equal(twin.x, expected.x)


def test_a_host_that_locks_no_memory_gathers_and_draws_itself(
    tiny_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: torch.Tensor, device: torch.device) -> None:
        raise device_rows.PinError("0.01 GB of host memory cannot be page-locked (CUDA error 2)")

    def no_topology(*args: Any, **settings: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device_rows, "lock_pages", refuse)
    monkeypatch.setattr(loader_build, "open_device_sampler", no_topology)
    forget_warnings()
    with pytest.warns(SlowerPathWarning) as said:
        loader = open_loader(tiny_graph, tmp_path / "plan", torch.device("cpu"))
    words = sorted(str(each.message) for each in said)
    assert len(words) == 2
    assert words[0].startswith("batches are drawn by the host's processor, because the topology")
    assert words[1].startswith("rows are gathered by the host's processor and copied, because 0.01")
    host = host_loader(tiny_graph, tmp_path / "plan")
    for found, expected in zip(loader.batches(2), host.batches(2), strict=True):
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.y, expected.y)


def plan_capture(graph: Graph, folder: Path, **settings: Any) -> None:
    """A plan that samples by a graph."""
    plan = make_plan(graph, folder, **{"fanouts": [3, 2], "batch_size": 24, **settings})
    arrays = {name: np.load(folder / ref.file) for name, ref in plan.arrays.items()}
    threads = replace(plan.strategy.threads, capture=1)
    save_plan(replace(plan, strategy=replace(plan.strategy, threads=threads)), arrays, folder)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_plan_may_sample_by_one_graph(
    threads: int, tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    plan_capture(tiny_graph, tmp_path / "plan", sample_threads=threads)
    loader = PlannedLoader(tmp_path / "plan", tiny_graph, device=kernel_device, on_device=True)
    drawing = loader.topology
    assert isinstance(drawing, loader_device_sample.DeviceSampleStage)
    assert isinstance(drawing.sampler, CapturedNeighborSampler)
    assert drawing.sampler.batch_size == 24
    host = host_loader(tiny_graph, tmp_path / "plan")
    for found, expected in zip(loader.batches(STEPS), host.batches(STEPS), strict=True):
        assert_same(found, expected)
    assert drawing.sampler.buffer_bytes > 0
    loader.close()


@pytest.mark.parametrize("fanouts", [None, [-1, 2]])
def test_a_loader_over_other_seeds_draws_from_the_same_lists(
    fanouts: list[int] | None, tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    plan_capture(tiny_graph, tmp_path / "plan", topology=TopologyPlacement(policy="replicated"))
    loader = PlannedLoader(tmp_path / "plan", tiny_graph, device=kernel_device, on_device=True)
    host = host_loader(tiny_graph, tmp_path / "plan")
    over = {"batch_size": 20, "num_neighbors": fanouts}
    held, expected = loader.over("val", **over), host.over("val", **over)
    lists, lent = _lists(loader), _lists(held)
    assert lent.indices is lists.indices
    assert lent.counts is not lists.counts
    for found, other in zip(held, expected, strict=True):
        assert_same(found, other)
    held.close()
    assert_same(next(iter(loader)), next(iter(host)))


def test_what_no_graph_can_draw_is_sampled_kernel_by_kernel_with_one_warning(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    plan_capture(
        tiny_graph, tmp_path / "plan", sampler=Sampler(name="full"), fanouts=[-1, -1], batch_size=6
    )
    forget_warnings()

    def open_device() -> PlannedLoader:
        return PlannedLoader(tmp_path / "plan", tiny_graph, device=kernel_device, on_device=True)

    with pytest.warns(SlowerPathWarning, match="kernel by kernel") as said:
        loader = open_device()
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowerPathWarning)
        open_device().close()
    host = host_loader(tiny_graph, tmp_path / "plan")
    assert_same(next(iter(loader)), next(iter(host)))


def test_a_script_of_ones_own_makes_batches_of_nccls_rows_when_it_asks_for_them(
    tiny_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(Communicator, "between_gpus", True)
    forget_warnings()
    peers = make_plan(tiny_graph, tmp_path / "peers", ranks=2, peers=True, sample_threads=2)
    alone = make_plan(tiny_graph, tmp_path / "alone", sample_threads=2)
    store = host_loader(tiny_graph, tmp_path / "alone").store
    threads_ahead = loader_device_place.threads_ahead
    with pytest.warns(SlowerPathWarning, match="when the script asks for them, because rows of"):
        assert threads_ahead(peers, store, None, gpu) == 0
    assert threads_ahead(peers, store, Communicator(), gpu) == 2  # the product's own training
    assert threads_ahead(alone, store, None, gpu) == 2
    monkeypatch.setattr(Communicator, "between_gpus", False)
    assert threads_ahead(peers, store, None, gpu) == 2


def test_attention_over_weighted_blocks_is_refused_in_the_hosts_words(
    tiny_graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    plan = {"model": "gat", "sampler": Sampler(name="labor", dialect="every_hop")}
    loader = open_loader(tiny_graph, tmp_path / "plan", kernel_device, **plan)
    assert load_plan(tmp_path / "plan").strategy.sampler.name == "labor"
    with pytest.raises(InputError, match="without edge weights"):
        next(iter(loader))
