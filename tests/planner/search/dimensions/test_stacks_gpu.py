"""Stacks of batches where ranks are GPUs: priced by counted kernels, chosen, and carried out."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.planner.cost.stages.sample import batch_launches
from gnnplan.planner.pipeline import plan
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.search.dimensions.batches import Stacks
from gnnplan.planner.search.dimensions.dimension import Omission, ProposalInputs
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import Plan, Threads, Workload
from tests.support.candidates import candidate_of_ranks

SIZES = {"sizes": "30,20"}
WORK = Workload(batch_size=16, hidden=8, fanouts=[3, 2], allow="approximate")
BASE = candidate_of_ranks(threads=Threads(sample=1), gpus=("gpu0",))


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    return generate_rmat(tmp_path / "g", num_nodes=512, degree=6, feature_dim=7, seed=2)


def made(graph: Graph, out: Path, **changes: Any) -> Plan:
    settings = PlanSettings(**{"workload": WORK, "devices": 1, "policy": "none", **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(graph.path, settings, machine=load_preset("h200x1"), out=out)


def test_samplers_of_many_kernels_are_stacked_and_it_is_said_what_that_takes(
    graph: Graph, tmp_path: Path
) -> None:
    asked = {"sampler": "ladies", "sampler_parameters": SIZES, "dialect": "every_hop"}
    found = made(graph, tmp_path / "p", **asked)
    # Two layers start 428 kernels; stacks are as long as the epoch.
    k = found.strategy.bulk_batches
    assert k == found.prediction.steps_per_epoch > 1
    parts = found.prediction.memory_bytes["rank0"].parts
    assert parts["stack of batches"] == found.strategy.bulk_bytes > 0
    words = found.prediction.provenance["sample"]
    assert words.endswith(f"kernels counted in the sampler's code, {k} batches to a stack")
    single = [a for a in found.alternatives if "sampled at once" not in a.name and a.step_seconds]
    assert min(a.step_seconds or 0.0 for a in single) > found.prediction.step_seconds.value


def test_one_cuda_graph_beats_stacks_of_neighbours_which_are_listed(
    graph: Graph, tmp_path: Path
) -> None:
    found = made(graph, tmp_path / "p")
    assert (found.strategy.bulk_batches, found.strategy.threads.capture) == (1, 1)
    listed = [a for a in found.alternatives if "batches sampled at once" in a.name]
    assert listed
    assert all(a.step_seconds is not None for a in listed)


@pytest.mark.parametrize(
    ("changes", "task", "words"),
    [
        ({"sampler": "labor"}, "multiclass", "sampler labor with these parameters has no stacks"),
        ({}, "link", "a GPU draws links and typed graphs batch by batch"),
        ({"sampler_parameters": {"draws": "with"}}, "multiclass", "has no stacks on a GPU"),
    ],
)
def test_what_a_gpu_cannot_stack_is_left_out_with_the_reason(
    changes: dict[str, Any], task: str, words: str
) -> None:
    ask = ProposalInputs(
        settings=PlanSettings(workload=WORK, **changes), machine=load_preset("h200x1"),
        policies=("none",), task=task, num_steps=10,
    )  # fmt: skip
    (found,) = Stacks().propose(ask, BASE)
    assert isinstance(found, Omission)
    assert words in found.why


def test_a_chosen_stack_is_what_the_device_draws(
    graph: Graph, tmp_path: Path, kernel_device: torch.device
) -> None:
    pytest.importorskip("triton")
    from gnnplan.runtime.loader.device import DeviceBulkStage
    from gnnplan.runtime.loader.loader import PlannedLoader

    found = made(graph, tmp_path / "p")
    budget = {"bulk_batches": 3, "bulk_bytes": 10**7}
    strategy = replace(found.strategy, threads=Threads(sample=1), **budget)
    arrays = {name: np.load(tmp_path / "p" / ref.file) for name, ref in found.arrays.items()}
    save_plan(replace(found, strategy=strategy), arrays, tmp_path / "stacked")
    batches: list[list[Any]] = []
    for name in ("p", "stacked"):
        loader = PlannedLoader(tmp_path / name, graph, device=kernel_device, on_device=True)
        stacks = any(isinstance(stage, DeviceBulkStage) for stage in loader.stages)
        assert stacks == (name == "stacked")
        batches.append([batch.n_id.tolist() for batch in loader.batches(4)])
        loader.close()
    assert batches[0] == batches[1]


def test_fewer_kernels_shorten_what_the_sampling_lane_takes() -> None:
    one, stacked = BASE, replace(BASE, bulk_batches=16)
    assert batch_launches(stacked, 2) < batch_launches(one, 2) / 2
