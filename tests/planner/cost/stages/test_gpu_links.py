"""What links and typed graphs add to the price of sampling on a GPU."""

from dataclasses import replace
from typing import Any

import pytest

from gnnplan.planner.candidate import RankRows
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.stages.sample import more_fanouts
from gnnplan.planner.cost.terms import LINK_STARTS, add_gpu_links
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.plan.schema import GraphRef, Links, Threads, TopologyPlacement, Workload
from gnnplan.runtime.stages import Stage
from tests.support.candidates import candidate_of_ranks
from tests.support.profiles import batch_profile, timing

GRAPH = GraphRef(
    name="g", path="/g", fingerprint="f", num_nodes=10_000, num_edges=80_000, feature_dim=8,
    feature_dtype="float32", num_classes=0, task="link", num_train=5000,
)  # fmt: skip
ONE = candidate_of_ranks(
    num_ranks=1, threads=Threads(), prefetch_depth=2, policy="none", gpus=("gpu0",)
)
NOTHING = RankRows(rows={}, working_rows={}, shares={})
BEFORE = RankTimes(stages={Stage.SAMPLE: StageTime(seconds=1e-3)})


def added(
    graph: GraphRef = GRAPH, candidate: Any = ONE, list_entries: float = 0.0, **links: Any
) -> RankTimes:
    work = RankWork(
        candidate=candidate, rank=0, graph=graph, timing=timing(1000, 1), rows=NOTHING,
        row_bytes=32,
        batch=replace(batch_profile(1000), list_entries=list_entries),
        machine=load_preset("h200x1"),
        workload=Workload(batch_size=1000, links=Links(**links)),
    )  # fmt: skip
    return add_gpu_links(work, BEFORE)


def test_links_are_looked_up_and_negatives_drawn_on_the_gpu() -> None:
    both, forward, none = (added(exclude=e) for e in ("both", "forward", "none"))
    at = [t.seconds(Stage.SAMPLE) for t in (none, forward, both)]
    assert 1e-3 < at[0] < at[1] < at[2]
    # On the host every entry of a list crosses the link; what is laid out lies in GPU memory.
    assert both.device.links > none.device.links > 0
    assert both.device.memory == pytest.approx(2 * forward.device.memory)
    assert none.device.memory == 0
    hops = 2
    assert both.device.host == pytest.approx(47e-6 * (LINK_STARTS[0] + LINK_STARTS[1] * hops))
    # 1000 links both ways, and a negative each, look at 8 entries of 4 bytes.
    assert both.device.links == pytest.approx(3 * none.device.links)
    more = added(exclude="none", num_negatives=5)
    assert more.device.links == pytest.approx(5 * none.device.links)


def test_destinations_of_links_have_the_lists_that_batches_expand() -> None:
    uniform, in_batch = (
        added(exclude="none", negatives=n, list_entries=64_000.0) for n in ("uniform", "in-batch")
    )
    # 64,000 entries in the lists of 4000 expanded nodes are 16 each, the graph's mean is 8.
    assert in_batch.device.links == pytest.approx(2 * uniform.device.links)


def test_lists_in_the_gpus_memory_cross_no_link() -> None:
    near = added(candidate=replace(ONE, topology=TopologyPlacement(policy="replicated")))
    assert near.device.links == 0
    assert near.device.memory > 0


def test_nodes_are_charged_for_no_links() -> None:
    assert added(graph=replace(GRAPH, task="multiclass")) is BEFORE


def test_types_of_one_fan_out_are_drawn_together() -> None:
    own = {"a": [3, 2], "b": [3, 1]}
    assert more_fanouts(Workload(fanouts=[5, 2], num_layers=2), 3) == 0
    assert more_fanouts(Workload(fanouts=[5, 2], num_layers=2, type_fanouts=own), 3) == 2
    assert more_fanouts(Workload(fanouts=[5, 2], num_layers=2, type_fanouts=own), 2) == 1
