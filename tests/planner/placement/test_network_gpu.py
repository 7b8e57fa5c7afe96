"""Links of a machine as a placement's network."""

from itertools import pairwise

import numpy as np
import pytest

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.stages.gather_gpu import read_seconds
from gnnplan.planner.machine.routes import lines
from gnnplan.planner.placement.costs import (
    CROSS,
    DISK,
    HOST,
    OWN,
    PEER,
    ReadNetwork,
    RowCosts,
    drop_dominated,
    objective_rows,
)
from gnnplan.planner.placement.evaluate import score
from gnnplan.planner.placement.lp.formulate import find_groups
from gnnplan.planner.placement.place import read_network
from gnnplan.planner.placement.policies.joint import bound_placements, place_joint
from gnnplan.planner.placement.problem import ItemKind, PlacementProblem, rows_problem
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.plan.schema import Threads
from tests.support.candidates import candidate_of_ranks
from tests.support.gpu_networks import Access, gpu_network
from tests.support.placements import placed_by

ROW = Access(bytes=512, counted=512.0)


def all_gpus(name: str) -> Candidate:
    machine = load_preset(name)
    names = tuple(gpu.name for gpu in machine.gpus)
    rank = {gpu: r for r, gpu in enumerate(names)}
    return candidate_of_ranks(
        num_ranks=len(names),
        threads=Threads(),
        prefetch_depth=0,
        policy="",
        gpus=names,
        cliques=tuple(tuple(rank[g] for g in clique) for clique in machine.cliques),
    )


@pytest.mark.parametrize("name", ["dgx-v100", "siton", "dgx-a100", "iowa-v100-bridge-2+2"])
def test_all_reading_at_once_takes_the_links_what_a_plan_is_priced_with(name: str):
    # one row each from one place: the slowest link of a GPU is its seconds per row [C7]
    machine, candidate = load_preset(name), all_gpus(name)
    network = gpu_network(machine, candidate, [ROW])
    priced = read_seconds(machine, candidate, 512)
    for source, s in (("own", OWN), ("peer", PEER), ("host", HOST), ("disk", DISK)):
        together = network.loads[0, :, :, s].sum(axis=1)
        for g in range(candidate.num_ranks):
            crossed = network.loads[0, :, g, s] > 0
            assert together[crossed].max() * 512 == pytest.approx(priced[source][g])


def test_two_gpus_of_a_switch_share_it_and_the_bridge_carries_half():
    machine = load_preset("siton")
    network = gpu_network(machine, all_gpus("siton"), [ROW])
    shared = dict(zip(network.links, network.shared(), strict=True))
    assert shared["plx0.h2d"]
    assert shared["dram0.read"]
    assert not shared["pcie0.h2d"]
    at = network.links.index("bridge.1.0")
    bridge = next(x for x in machine.links if x.name == "bridge.1.0")
    # half of the host's pages lie on the other NUMA node (interleaved)
    expected = 0.5 / bridge.bandwidth_bytes_per_second
    assert network.loads[0, at, 0, HOST] == pytest.approx(expected)
    assert network.loads[0, at, 4, HOST] == 0.0


def test_a_neighbours_id_moves_a_whole_transaction():
    machine, candidate = load_preset("siton"), all_gpus("siton")
    network = gpu_network(machine, candidate, [Access(bytes=4, counted=64.0)])
    slot = next(x for x in machine.links if x.name == "pcie0.h2d")
    moved = lines(4, slot.transaction_bytes) * slot.transaction_bytes
    at = network.links.index("pcie0.h2d")
    assert network.loads[0, at, 0, HOST] * 64 == pytest.approx(moved / slot.gather_bytes_per_second)


def test_other_cliques_are_places_only_where_asked_for():
    machine, candidate = load_preset("siton"), all_gpus("siton")
    assert np.isinf(gpu_network(machine, candidate, [ROW]).alone[0, :, CROSS]).all()
    across = gpu_network(machine, candidate, [ROW], across=True)
    assert np.isfinite(across.alone[0, :, CROSS]).all()
    # six GPUs of other pairs in equal shares, over the reader's own slot
    at = across.links.index("pcie0.h2d")
    slot = across.loads[0, at, 0, HOST]
    assert across.loads[0, at, 0, CROSS] == pytest.approx(slot)


def instance(name: str, share: float = 0.1) -> PlacementProblem:
    candidate = all_gpus(name)
    heat = np.random.default_rng(0).pareto(1.2, (1, 4000)).clip(0, 1)
    kind = ItemKind(
        name="features",
        heat=heat,
        laws=(0,) * candidate.num_ranks,
        size=512,
        read_bytes=512.0,
    )
    return PlacementProblem(
        kinds=(kind,),
        cliques=candidate.cliques,
        device_bytes=(int(share * 4000) * 512,) * candidate.num_ranks,
        host_bytes=None,
        network=gpu_network(load_preset(name), candidate, [ROW]),
    )


def test_gpus_that_differ_in_links_behind_a_slower_one_are_alike():
    # hybrid cube mesh: GPUs 2 and 3 have two wide NVLinks in their clique, 0 and 1 have one
    asked = instance("dgx-v100")
    rows = objective_rows(asked.network, "pipelined")
    assert len(find_groups(asked, rows).groups) > 1
    fewer = drop_dominated(rows)
    assert len(fewer.names) < len(rows.names)
    assert len(find_groups(asked, fewer).groups) == 1


def test_rows_left_out_never_decide():
    asked = instance("dgx-v100")
    rows = objective_rows(asked.network, "pipelined")
    fewer = drop_dominated(rows)
    rng = np.random.default_rng(1)
    for _ in range(50):
        reads = rng.pareto(1.0, (1, 8, 5)) * (rng.random((1, 8, 5)) < 0.7)
        assert fewer.values(reads).max() == pytest.approx(rows.values(reads).max())


def test_joint_is_within_a_hundredth_of_its_bound_on_a_machines_links():
    found = [place_joint(instance("dgx-v100", share)) for share in (0.05, 0.1, 0.2)]
    assert all(each.gap <= 0.01 for each in found)
    assert all(a.score.seconds > b.score.seconds for a, b in pairwise(found))
    assert found[0].score.binding.endswith("h2d")


def test_gpus_that_share_a_slot_wait_longer_and_joint_knows():
    # GPUs 0 and 1 share a PCIe switch, GPU 2 has one to itself
    machine = load_preset("dgx-a100")
    candidate = candidate_of_ranks(
        num_ranks=3,
        threads=Threads(),
        prefetch_depth=0,
        policy="joint",
        gpus=("gpu0", "gpu1", "gpu2"),
        cliques=((0, 1, 2),),
    )
    network = read_network(machine, candidate, 512, RowCosts(local=1.0))
    assert isinstance(network, ReadNetwork)
    host = network.alone[0, :, HOST]
    assert host[0] == host[1] == pytest.approx(2 * host[2])
    p = np.random.default_rng(2).pareto(1.5, 300).clip(0, 1)
    worst = network.alone[0].max(axis=0)
    costs = RowCosts(local=worst[OWN], peer=worst[PEER], host=worst[HOST], disk=worst[DISK])
    problem = rows_problem(p, network, [20] * 3)
    assert problem.row_costs == costs

    def seconds(known: ReadNetwork | RowCosts) -> float:
        found, _ = placed_by("joint", p, known, [20] * 3)
        return score(problem, found, "serial").seconds

    assert seconds(network) <= seconds(costs) * (1 + 1e-12)
    assert seconds(network) <= bound_placements(problem, "serial") * 1.1
