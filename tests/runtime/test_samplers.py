"""Every sampler a plan may name trains: one epoch on a small graph, and the loss falls."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from gnnplan.runtime import worker
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.io import load_plan, save_plan
from gnnplan.runtime.plan.schema import Sampler
from tests.support.plans import make_plan

Dialect = Literal["first_seen", "every_hop"]


def plan_with(
    graph: Graph, folder: Path, name: str, dialect: Dialect, parameters: dict[str, Any]
) -> Path:
    """A plan like any other but for its sampler; LAS finds 600 rows of its own."""
    plan = make_plan(
        graph,
        folder,
        batch_size=16,
        fanouts=[5, 5],
        learning_rate=0.03,
        own_rows=600,
        dialect=dialect,
    )
    sampler = Sampler(name=name, dialect=dialect, parameters=parameters)
    strategy = replace(plan.strategy, sampler=sampler)
    arrays = {each: np.load(folder / ref.file) for each, ref in plan.arrays.items()}
    save_plan(replace(plan, strategy=strategy), arrays, folder)
    return folder


SAMPLERS: list[tuple[str, Dialect, dict[str, Any]]] = [
    ("full", "first_seen", {}),
    ("neighbor", "first_seen", {}),
    ("neighbor", "first_seen", {"draws": "replacement"}),
    ("neighbor", "every_hop", {"draws": "poisson", "estimator": "horvitz-thompson"}),
    ("labor", "every_hop", {}),
    ("labor", "first_seen", {"variant": "star", "kappa": 4.0}),
    ("labor", "every_hop", {"form": "exact_k", "estimator": "plain"}),
    ("ladies", "every_hop", {"sizes": "300,500", "estimator": "hajek"}),
    ("pladies", "every_hop", {"sizes": "300,500", "estimator": "hajek"}),
    ("fastgcn", "every_hop", {"sizes": "900,900", "estimator": "hajek"}),
    ("las", "first_seen", {"factor": 4.0}),
    ("las", "every_hop", {"factor": 4.0, "correction": "hajek"}),
    (
        "las",
        "every_hop",
        {"over": "ladies", "sizes": "300,500", "factor": 2.0, "correction": "hajek"},
    ),
]


@pytest.mark.parametrize(("name", "dialect", "parameters"), SAMPLERS)
def test_one_epoch_under_each_sampler_lowers_the_loss(
    small_graph: Graph, tmp_path: Path, name: str, dialect: Dialect, parameters: dict[str, Any]
) -> None:
    folder = plan_with(small_graph, tmp_path / "plan", name, dialect, parameters)
    assert load_plan(folder).strategy.sampler.parameters == parameters
    (tmp_path / "run").mkdir()
    report = worker.run(
        RunConfig(
            plan_folder=str(folder),
            run_folder=str(tmp_path / "run"),
            epochs=1,
            eval_every=0,
            pin=False,
        )
    )
    losses = np.array(report.losses)
    assert len(losses) >= 15
    assert np.isfinite(losses).all()
    assert losses[-3:].mean() < 0.8 * losses[:3].mean()


def test_las_prefers_the_rows_of_its_rank(small_graph: Graph, tmp_path: Path) -> None:
    shares = []
    for factor in (1.0, 8.0):
        folder = tmp_path / f"plan{factor}"
        plan_with(small_graph, folder, "las", "first_seen", {"factor": factor})
        loader = PlannedLoader(folder, small_graph)
        rows = [batch.rows_by_source for batch in loader]
        loader.close()
        own = sum(each["own"] for each in rows)
        shares.append(own / sum(sum(each.values()) for each in rows))
    assert shares[1] > 1.1 * shares[0]


def test_an_unknown_sampler_in_a_plan_is_refused(small_graph: Graph, tmp_path: Path) -> None:
    folder = plan_with(small_graph, tmp_path / "plan", "nothing", "first_seen", {})
    with pytest.raises(SamplerError, match="found 'nothing'"):
        PlannedLoader(folder, small_graph)
