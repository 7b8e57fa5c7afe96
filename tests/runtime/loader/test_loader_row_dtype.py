"""Rows stored in bfloat16 reach the first product as they are, and train what rounded rows do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.planner.queries.replay import RowCounter, RowCounts
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.device import has_triton
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.graph.generate import generate_sbm
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import DynamicCache
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
from gnnplan.runtime.train.precision import Precision
from tests.support.plans import make_plan, with_rows

WIDE = np.dtype(np.float32)
STEPS = 3
PLANS: dict[str, dict[str, Any]] = {
    "host": {},
    "own, disk, ahead": {"own_rows": 50, "disk_budget_bytes": 1 << 20, "sample_threads": 1},
    "cache": {"own_rows": 50, "cache": DynamicCache(policy="lru", rows=[90])},
}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graph]:
    """One graph with rows in float32, in bfloat16, and in float32 as bfloat16 rounds them."""
    folder = tmp_path_factory.mktemp("graphs")
    exact = generate_sbm(
        folder / "exact", num_nodes=400, degree=8.0, feature_dim=6, num_classes=3, seed=5
    )
    half = convert_rows(np.array(exact.x), BFLOAT16)
    rounded = with_rows(exact, folder / "rounded", convert_rows(half, WIDE))
    return {"exact": exact, "half": with_rows(exact, folder / "half", half), "rounded": rounded}


def loader_of(graph: Graph, folder: Path, settings: dict[str, Any], **others: Any) -> PlannedLoader:
    make_plan(graph, folder, **{"fanouts": [3, 2], "batch_size": 24, **settings})
    return PlannedLoader(folder, graph, **others)


def same_rows(half: PlannedLoader, wide: PlannedLoader) -> None:
    """Batches agree, and half the bytes are counted, as predicted, from the same sources."""
    predicted, counted = RowCounts(), RowCounter(half.plan, half._folder, half.graph, 0)
    for found, expected in zip(half.batches(STEPS), wide.batches(STEPS), strict=True):
        assert found.x.dtype == torch.bfloat16
        assert torch.equal(found.x.float().cpu(), expected.x)
        predicted.merge(counted.count(found.n_id))
    (rows, size), (same, twice) = (
        [{kind: count for kind, count in each.items() if count} for each in loader.meter.totals()]
        for loader in (half, wide)
    )
    assert rows == same == predicted.rows
    assert size == predicted.bytes
    assert {kind: 2 * count for kind, count in size.items()} == twice
    assert {kind: 2 * 6 * count for kind, count in rows.items()} == size


@pytest.mark.parametrize("name", PLANS)
def test_rows_come_in_the_type_that_they_are_stored_in(
    name: str, graphs: dict[str, Graph], tmp_path: Path
) -> None:
    half = loader_of(graphs["half"], tmp_path / "a", PLANS[name], row_dtype=torch.bfloat16)
    wide = loader_of(graphs["rounded"], tmp_path / "b", PLANS[name])
    same_rows(half, wide)
    half.close()
    wide.close()


@pytest.mark.skipif(not has_triton(), reason="no triton, whose interpreter gathers as a GPU does")
@pytest.mark.parametrize("name", PLANS)
def test_so_they_do_where_a_device_gathers(
    name: str, graphs: dict[str, Graph], tmp_path: Path, kernel_device: torch.device
) -> None:
    settings = PLANS[name] | {"precision": "bfloat16"}
    on_device = {"device": kernel_device, "on_device": True}
    half = loader_of(graphs["half"], tmp_path / "a", settings, row_dtype=None, **on_device)
    wide = loader_of(graphs["rounded"], tmp_path / "b", PLANS[name])
    same_rows(half, wide)
    half.close()
    wide.close()


class Casts(TorchDispatchMode):
    """Counts copies of a batch's rows into another type."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "_to_copy" in str(func) and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **kwargs or {})


def train(graph: Graph, folder: Path, model: str) -> tuple[list[float], int]:
    """Losses of some steps in mixed precision, and how often a batch's rows were cast."""
    loader = loader_of(graph, folder, {"model": model, "precision": "bfloat16"}, row_dtype=None)
    torch.manual_seed(3)
    work = loader.plan.workload
    net = build_model(work, graph.feature_dim, graph.num_classes, str(graph.task))
    loop = TrainLoop(
        model=net, optimizer=make_optimizer(net, learning_rate=0.01, weight_decay=0.0),
        gradients=GradientBuffer(net), comm=Communicator(), meter=StageMeter(),
        task=str(graph.task), seed=0, precision=Precision("bfloat16"),
    )  # fmt: skip
    losses, casts = list[float](), 0
    for index, batch in enumerate(loader.batches(STEPS)):
        with Casts(batch.x.shape) as seen:
            losses.append(loop.step(batch, index))
        casts += seen.count
    loader.close()
    return losses, casts


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_they_train_what_rounded_rows_do_without_a_cast(
    model: str, graphs: dict[str, Graph], tmp_path: Path
) -> None:
    """Equal to rounded rows in float32 to the bit, and to rows that are not within 2^-6."""
    losses, casts = train(graphs["half"], tmp_path / "half", model)
    rounded, more = train(graphs["rounded"], tmp_path / "rounded", model)
    exact, _ = train(graphs["exact"], tmp_path / "exact", model)
    assert losses == rounded
    assert losses == pytest.approx(exact, rel=2.0**-6)
    assert casts == 0 < more


def test_a_type_that_would_change_values_is_refused(
    graphs: dict[str, Graph], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"row_dtype: expected torch\.float32, found torch\.bfl"):
        loader_of(graphs["exact"], tmp_path / "plan", {}, row_dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"expected torch\.bfloat16 or torch\.float32, found"):
        loader_of(graphs["half"], tmp_path / "plan", {}, row_dtype=torch.float16)
