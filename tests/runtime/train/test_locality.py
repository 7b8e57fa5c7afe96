"""The locality factor of a run: its schedule, one factor for all ranks, kept in checkpoints."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime import worker
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.sampling.locality import FactorSchedule
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.job import FactorControl, make_factor_control
from gnnplan.runtime.train.minibatch import STEP
from tests.support.plans import make_plan

MEASURED = Sampler(name="las", parameters={"schedule": "measured"})


class Sums(Communicator):
    """Ranks that are threads, and add."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self._shared, self._barrier = shared, barrier

    def all_reduce_sum(
        self, tensor: torch.Tensor, *, stage: Stage = Stage.ALL_REDUCE
    ) -> torch.Tensor:
        del stage
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(torch.stack(self._shared).sum(0))
        self._barrier.wait()
        return tensor


def on_ranks(shares: list[list[float]]) -> list[list[float]]:
    """Factors of each rank after each epoch, where rank r's movement takes shares[r][epoch]."""
    size = len(shares)
    shared, barrier = [None] * size, threading.Barrier(size)
    factors: list[list[float]] = [[] for _ in shares]

    def run(rank: int) -> None:
        meter = StageMeter()
        control = make_factor_control(MEASURED, meter)
        assert control is not None
        comm: Any = Sums(rank, size, shared, barrier)
        for epoch, share in enumerate(shares[rank]):
            for step in range(4):
                meter.add(Stage.GATHER, 4 * epoch + step, share)
                meter.add(STEP, 4 * epoch + step, 1.0)
            factors[rank].append(control.after_epoch(comm))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return factors


def test_the_published_schedule_is_followed_epoch_by_epoch() -> None:
    """Formulas 1.6: doubled at r >= 0.2, half-way back below 0.15, frozen between, and at 8."""
    assert on_ranks([[0.5, 0.3, 0.1, 0.17, 0.9]]) == [[2.0, 4.0, 3.0, 3.0, 3.0]]
    assert on_ranks([[0.5, 0.5, 0.5, 0.9, 0.9]]) == [[2.0, 4.0, 8.0, 8.0, 8.0]]


def test_ranks_that_measure_differently_take_one_factor() -> None:
    """0.3 and 0.05: 0.175 together, where rank 0 alone would double and rank 1 stay."""
    assert on_ranks([[0.3, 0.3], [0.05, 0.05]]) == [[1.0, 1.0], [1.0, 1.0]]
    assert on_ranks([[0.6, 0.0], [0.0, 0.0]]) == [[2.0, 1.5], [2.0, 1.5]]


def test_a_fixed_factor_stays_and_other_samplers_have_none() -> None:
    control = make_factor_control(Sampler(name="las", parameters={"factor": 3.0}), StageMeter())
    assert control is not None
    comm: Any = Sums(0, 1, [None], threading.Barrier(1))
    assert control.after_epoch(comm) == 3.0
    assert make_factor_control(Sampler(name="neighbor"), StageMeter()) is None
    with pytest.raises(SamplerError, match="expected schedule to be fixed or measured, found 'x'"):
        make_factor_control(Sampler(name="las", parameters={"schedule": "x"}), StageMeter())


def test_an_epoch_that_was_interrupted_counts_as_a_whole() -> None:
    """0.9 before and 0.05 after: 0.475 together doubles, the rest alone would not."""
    comm: Any = Sums(0, 1, [None], threading.Barrier(1))

    def control() -> FactorControl:
        return FactorControl(schedule=FactorSchedule(), meter=StageMeter(), follows=True)

    first, second = control(), control()
    first.meter.add(Stage.GATHER, 0, 0.9)
    first.meter.add(STEP, 0, 1.0)
    second.load_state(first.state(comm), rank=0)
    second.meter.add(Stage.GATHER, 0, 0.05)
    second.meter.add(STEP, 0, 1.0)
    assert second.after_epoch(comm) == 2.0


def injected(share_of_epoch: dict[int, float], steps_per_epoch: int = 5):
    """A meter whose seconds are chosen: one second a step, a share of it in the gather."""

    class Injected(StageMeter):
        base = 0

        def add(self, stage: str, step: int, seconds: float, core_seconds: float = 0.0) -> None:
            epoch = (self.base + step) // steps_per_epoch
            chosen = {STEP: 1.0, Stage.GATHER: share_of_epoch.get(epoch, 0.0)}
            super().add(stage, step, chosen.get(stage, 0.0), core_seconds)

    return Injected


def train(plan: Path, run: Path, **settings: Any) -> RunReport:
    run.mkdir(exist_ok=True)
    config = {"epochs": 4, "eval_every": 0, "pin": False, "checkpoint_every_steps": 2} | settings
    return worker.run(RunConfig(plan_folder=str(plan), run_folder=str(run), **config))


@pytest.mark.parametrize("over", ["neighbor", "ladies"])
def test_a_resumed_run_draws_with_the_factor_of_an_undisturbed_one(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    """Factors 1, 2, 4, 3 by an injected meter; stopped within the third epoch."""
    plan = tmp_path / "plan"
    sampler = Sampler(
        name="las",
        dialect="every_hop",
        parameters={
            "schedule": "measured",
            "correction": "hajek",
            "over": over,
            "sizes": "200,300" if over == "ladies" else "",
        },
    )
    make_plan(small_graph, plan, batch_size=64, own_rows=1000, sampler=sampler)
    chosen: list[float] = []
    set_factor = PlannedLoader.set_factor

    def spy(loader: PlannedLoader, factor: float) -> None:
        chosen.append(factor)
        set_factor(loader, factor)

    monkeypatch.setattr(PlannedLoader, "set_factor", spy)
    meter = injected({0: 0.5, 1: 0.5, 2: 0.05, 3: 0.17})
    monkeypatch.setattr("gnnplan.runtime.loader.loader.StageMeter", meter)
    through = train(plan, tmp_path / "through")
    assert chosen == [2.0, 4.0, 3.0, 3.0]
    chosen.clear()
    train(plan, tmp_path / "stopped", max_steps=12)
    meter.base = 12  # a new process numbers its steps from 0 again
    resumed = train(plan, tmp_path / "stopped", resume=True)
    assert chosen == [2.0, 4.0, 4.0, 3.0, 3.0]
    assert resumed.first_step == 12
    assert resumed.losses == through.losses[12:]
    meter.base = 0
    monkeypatch.setattr("gnnplan.runtime.loader.loader.StageMeter", injected({}))
    assert train(plan, tmp_path / "unmoved").losses[5:] != through.losses[5:]


def test_validation_knows_no_factor(small_graph: Graph, tmp_path: Path) -> None:
    """Sampled evaluation draws uniformly: equal scores before and under any factor."""
    from gnnplan.runtime.train.evaluate import evaluate

    plan = tmp_path / "plan"
    made = make_plan(
        small_graph, plan, own_rows=1000, sampler=Sampler(name="las", parameters={"factor": 1.0})
    )
    loader = PlannedLoader(plan, small_graph)
    from gnnplan.runtime.models.build import build_model

    model = build_model(
        made.workload, small_graph.feature_dim, small_graph.num_classes, str(small_graph.task)
    )

    def outputs() -> tuple[list[np.ndarray], float]:
        loader.set_epoch(0)
        sampled = [batch.n_id for batch in loader]
        score = evaluate(
            model, small_graph, loader.store, small_graph.val_idx, workload=made.workload,
            fanouts=[3, 2],
        )  # fmt: skip
        return sampled, score.value

    plain, score = outputs()
    loader.set_factor(8.0)
    preferring, same = outputs()
    assert any(not np.array_equal(a, b) for a, b in zip(plain, preferring, strict=True))
    assert score == same


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_take_one_factor_and_keep_it_through_a_restart(
    small_graph: Graph, tmp_path: Path
) -> None:
    """Rank 0 sees 0.9 of its step in data movement, rank 1 nothing: 0.45, so 2, 4, 8 and frozen.

    Killed in step 13, within the third epoch, whose factor is 4.
    """
    sampler = Sampler(
        name="las",
        dialect="every_hop",
        parameters={"schedule": "measured", "correction": "hajek"},
    )
    make_plan(
        small_graph, tmp_path / "plan", ranks=2, batch_size=64, own_rows=1000, sampler=sampler,
        model="tests.support.models:metered",
    )  # fmt: skip

    def run(name: str, fault: str) -> tuple[RunReport, list[str]]:
        notes = tmp_path / f"{name}.factors"
        environment = {
            "GNNPLAN_TEST_SHARES": "0.9,0.0",
            "GNNPLAN_TEST_FACTORS": str(notes),
            "GNNPLAN_TEST_FAULT": fault,
        }
        report = launch.train(
            tmp_path / "plan", run_folder=tmp_path / name, epochs=4, eval_every=0,
            checkpoint_every_steps=2, max_restarts=1, environment=environment, oversubscribe=True,
        )  # fmt: skip
        return report, [Path(f"{notes}.{rank}").read_text() for rank in (0, 1)]

    through, factors = run("through", "-1:0:none")
    assert factors == ["2.0 4.0 8.0 8.0 "] * 2
    resumed, factors = run("killed", "1:13:kill:once")
    assert factors == ["2.0 4.0 4.0 8.0 8.0 "] * 2
    assert resumed.first_step == 12
    assert resumed.losses == through.losses[12:]
