"""joint against every named policy and its bound: formulas 6, [U1], [U5], [U6], [C22] on."""

import itertools
import pickle

import numpy as np
import pytest

from gnnplan.planner.placement.costs import ReadNetwork, RowCosts, network_of_costs, objective_rows
from gnnplan.planner.placement.evaluate import evaluate, score
from gnnplan.planner.placement.lp import relax as relax_module
from gnnplan.planner.placement.lp.formulate import find_groups, make_buckets
from gnnplan.planner.placement.lp.relax import Prices, lagrangian_bound, relax
from gnnplan.planner.placement.lp.solver import Failure
from gnnplan.planner.placement.order import hotness_order
from gnnplan.planner.placement.placement import (
    ItemPlacement,
    Placement,
    check_placement,
    find_places,
)
from gnnplan.planner.placement.policies.joint import bound_placements, place_joint
from gnnplan.planner.placement.policies.legion import fill_lists
from gnnplan.planner.placement.policies.policy import Knowledge, Reason
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES
from gnnplan.planner.placement.problem import ItemKind, PlacementProblem, rows_problem
from tests.support.placements import (
    SHAPES,
    compare_policies,
    place_named,
    placed_by,
    random_problem,
)

GOALS = ("pipelined", "serial", "stages")


def instances(number):
    """Machines, laws, kinds, short host memory and reads across cliques, in turn."""
    rng = np.random.default_rng(0)
    names = list(SHAPES)
    for i in range(number):
        yield (
            *random_problem(
                rng,
                names[i % 8],
                laws=("shared", "clique", "device")[(i // 8) % 3],
                topology=(i // 24) % 2 == 0,
                host=bool(rng.random() < 0.4),
                across=bool(rng.random() < 0.3),
            ),
            GOALS[i % 3],
        )


def never_worse(start, end):
    for i, (instance, know, goal) in enumerate(instances(end)):
        if i < start:
            continue
        found = place_joint(instance, goal)
        assert found.relaxed.status == "optimal"
        check_placement(instance, found.placement)
        assert found.score.seconds == score(instance, found.placement, goal).seconds
        assert found.bound <= found.score.seconds * (1 + 1e-9)
        for policy in (p.name for p in PLACEMENT_POLICIES if p.function and p.name != "joint"):
            other = place_named(policy, instance, know)
            if isinstance(other, Reason):
                continue
            named = score(instance, other, goal).seconds
            assert found.bound <= named * (1 + 1e-9), (i, policy)
            assert found.score.seconds <= named * (1 + 1e-9), (i, policy)


@pytest.mark.slow
def test_joint_alone_is_never_worse_than_a_named_policy_on_each_machine():
    never_worse(0, 24)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 300, 50))
def test_joint_alone_is_never_worse_than_a_named_policy_on_300_instances(start):
    never_worse(start, start + 50)


def two_kinds(pcie, nvlink, hbm=(0.0, 0.0), *, goal_links=True):
    """Two GPUs of one slot, two items of each of two kinds, as in formulas 6.3."""
    loads = np.zeros((2, 6, 2, 5))
    alone = np.full((2, 2, 5), np.inf)
    for t, g in itertools.product(range(2), range(2)):
        loads[t, g, g, 3], loads[t, 2 + g, g, 1], loads[t, 4 + g, g, 0] = pcie[t], nvlink[t], hbm[t]
        alone[t, g, [0, 1, 3]] = hbm[t], nvlink[t], pcie[t]
    names = ("pcie0", "pcie1", "nvlink0", "nvlink1", "hbm0", "hbm1")
    kinds = tuple(
        ItemKind(name=name, heat=np.ones((1, 2)), laws=(0, 0), size=1, read_bytes=1.0)
        for name in ("features", "topology")
    )
    return PlacementProblem(
        kinds=kinds,
        cliques=((0, 1),),
        device_bytes=(1, 1),
        host_bytes=None,
        network=ReadNetwork(links=names, loads=loads, alone=alone),
    )


def solved(instance, goal, **options):
    rows = objective_rows(instance.network, goal)
    groups = find_groups(instance, rows)
    largest = max(instance.device_bytes)
    buckets = [make_buckets(kind, 512, largest=largest) for kind in instance.kinds]
    return rows, relax(instance, rows, groups, buckets, goal=goal, **options)


def test_a_pipelined_objective_is_not_solved_by_one_order():
    # formulas [C22]: pcie 10,10,9,9 and nvlink 40,40,1,1; PCIe-density order 40, LP 19.07
    instance = two_kinds((10.0, 9.0), (40.0, 1.0))
    assert solved(instance, "pipelined")[1].seconds == pytest.approx(19.07, abs=0.005)
    first_kind = [[np.array([g]) for g in range(2)], [np.zeros(0, np.int64)] * 2]
    placed = place_named("none", instance, Knowledge())
    assert isinstance(placed, Placement)
    own = []
    for held, ids in zip(placed.items, first_kind, strict=True):
        codes = find_places(instance, placed, len(own))[0].copy()
        codes[np.concatenate(ids).astype(int)] = 1
        own.append(type(held)(own=ids, fallback_places=[codes], on_host=None))
    dealt = Placement(policy="by hand", cliques=instance.cliques, items=tuple(own))
    # both items of kind 0 dealt: each GPU reads one of them over NVLink, 40; 18 over PCIe
    assert score(instance, dealt, "pipelined").seconds == 40.0
    # the serial optimum is 21, and its links take 20: not the pipelined optimum
    assert solved(instance, "serial")[1].seconds == pytest.approx(21.0)
    serial = place_joint(instance, "serial").placement
    assert score(instance, serial, "serial").seconds == pytest.approx(21.0)
    assert score(instance, serial, "pipelined").seconds == pytest.approx(20.0)


def test_two_capacities_of_unproportional_costs_need_the_programme():
    # formulas [C22]: (GPU, host, disk) costs (0,10,11), (0,9,60), (0,8,50), one slot on GPU and
    # host each: filling by host cost takes 59, the programme 19
    costs = np.array([[0, 10, 11], [0, 9, 60], [0, 8, 50.0]])
    alone = np.full((3, 1, 5), np.inf)
    alone[:, 0, [0, 3, 4]] = costs
    loads = np.where(np.isfinite(alone), alone, 0.0)[:, None]
    instance = PlacementProblem(
        kinds=tuple(
            ItemKind(name=f"kind {i}", heat=np.ones((1, 1)), laws=(0,), size=1, read_bytes=1.0)
            for i in range(3)
        ),
        cliques=((0,),),
        device_bytes=(1,),
        host_bytes=1,
        network=ReadNetwork(links=("reads",), loads=loads, alone=alone),
    )
    found = place_joint(instance, "serial")
    assert found.relaxed.seconds == pytest.approx(19.0)
    assert found.score.seconds == pytest.approx(19.0)
    assert found.bound == pytest.approx(19.0)
    assert place_joint(instance, "serial", solver="density").relaxed.seconds == pytest.approx(59.0)


def test_one_sort_is_the_programmes_value_where_it_is_called():
    # formulas 6.3 [C22], over 40 random instances of two kinds on one clique
    rng = np.random.default_rng(5)
    for i in range(40):
        instance, _ = random_problem(rng, ("NVSwitch 8", "slow peers, 2", "one GPU")[i % 3])
        loads = instance.network.loads.copy()
        shared = instance.network.shared()
        private = ReadNetwork(
            links=tuple(n for n, s in zip(instance.network.links, shared, strict=True) if not s),
            loads=loads[:, ~shared],
            alone=instance.network.alone,
        )
        instance = PlacementProblem(
            kinds=instance.kinds,
            cliques=instance.cliques,
            device_bytes=instance.device_bytes,
            host_bytes=None,
            network=private,
        )
        fast, exact = solved(instance, "serial")[1], solved(instance, "serial", solver="highs")[1]
        assert (fast.solver, exact.solver) == ("sort", "highs")
        assert fast.seconds == pytest.approx(exact.seconds, rel=1e-6)


def small(rng, n, *, unequal, num=4):
    """Few rows, so that every placement can be tried."""
    law = tuple(range(n)) if unequal else (0,) * n
    heat = rng.pareto(1.5, (max(law) + 1, num)) + 0.01
    peer = float(rng.choice([0.1, 0.3, 0.6, 0.9, 1.2]))
    return PlacementProblem(
        kinds=(ItemKind(name="features", heat=heat, laws=law, size=2, read_bytes=1.0),),
        cliques=(tuple(range(n)),),
        device_bytes=(int(rng.integers(2, 7)),) * n,
        host_bytes=None,
        network=network_of_costs(RowCosts(local=0.0, peer=peer, host=1.0), n),
    )


def rows_and_lists(heat, sizes, *, device_bytes, peer=0.3):
    """Few rows and few lists on two GPUs that read a byte of a peer in `peer` seconds."""
    network = network_of_costs(RowCosts(local=0.0, peer=peer, host=1.0), 2)
    return PlacementProblem(
        kinds=tuple(
            ItemKind(name=name, heat=h[None], laws=(0, 0), size=s, read_bytes=1.0)
            for name, h, s in zip(("features", "topology"), heat, sizes, strict=True)
        ),
        cliques=((0, 1),),
        device_bytes=(device_bytes,) * 2,
        host_bytes=None,
        network=ReadNetwork(
            links=network.links,
            loads=np.repeat(network.loads, 2, axis=0),
            alone=np.repeat(network.alone, 2, axis=0),
        ),
    )


def brute_force(instance):
    """Least serial seconds over every set of items of every device."""
    heat = np.concatenate([k.heat[list(k.laws)] for k in instance.kinds], axis=1)
    sizes = np.concatenate([k.sizes(np.arange(k.num_items)) for k in instance.kinds])
    peer, host = instance.network.alone[0, 0, 1], instance.network.alone[0, 0, 3]
    subsets = [
        np.isin(np.arange(len(sizes)), s)
        for r in range(len(sizes) + 1)
        for s in itertools.combinations(range(len(sizes)), r)
    ]
    subsets = [s for s in subsets if sizes[s].sum() <= instance.device_bytes[0]]
    best = np.inf
    for own in itertools.product(subsets, repeat=instance.num_devices):
        union = np.any(own, axis=0)
        cost = np.where(union, min(peer, host), host)
        best = min(best, max(float((h * cost)[~o].sum()) for h, o in zip(heat, own, strict=True)))
    return best


@pytest.mark.parametrize("unequal", [False, True])
def test_bound_and_programme_are_below_every_placement_and_joint_is_one(unequal):
    # formulas [U1]: LP <= brute force <= greedy, with equal and with different laws
    rng = np.random.default_rng(4)
    for _ in range(30):
        instance = small(rng, 2, unequal=unequal)
        found, best = place_joint(instance, "serial"), brute_force(instance)
        assert found.relaxed.seconds <= best + 1e-9
        assert found.bound <= best + 1e-9
        assert found.bound == pytest.approx(found.relaxed.seconds, rel=1e-6, abs=1e-9)
        assert best <= found.score.seconds + 1e-9
        greedy = place_named("song-jiang", instance, Knowledge())
        assert isinstance(greedy, Placement)
        assert best <= score(instance, greedy, "serial").seconds + 1e-9


def test_features_and_lists_together_are_bounded_too():
    # formulas [U5]: LP <= brute force <= Legion's search over its split, bytes and two kinds
    rng = np.random.default_rng(6)
    holding = 0
    for _ in range(25):
        degrees, row = rng.integers(0, 4, 3), int(rng.integers(8, 25))
        instance = rows_and_lists(
            rng.pareto(1.5, (2, 3)) + 0.01,
            (row, 8 + 4 * degrees),
            device_bytes=int(rng.integers(20, 61)),
            peer=float(rng.choice([0.1, 0.3, 0.6, 0.9, 1.2])),
        )
        found, best = place_joint(instance, "serial"), brute_force(instance)
        legion = place_named("legion", instance, Knowledge(in_degree=degrees))
        assert isinstance(legion, Placement)
        searched = score(instance, legion, "serial").seconds
        assert found.bound <= best + 1e-9 <= found.score.seconds + 2e-9
        assert found.score.seconds <= searched + 1e-9
        holding += any(len(ids) for ids in legion.items[1].own)
    assert holding >= 20


def seconds_of_a_search(instance):
    """Least seconds over the share of lists: either kind by heat, to the GPU with most free."""
    found = []
    for share in range(101):
        held = []
        for t, percent in enumerate((share, 100 - share)):
            queue = hotness_order(instance.kinds[t].heat[0])
            free = [m * percent // 100 for m in instance.device_bytes]
            own = fill_lists(queue, instance.kinds[t].sizes(queue), free)
            held.append(ItemPlacement(own=own, on_host=None))
        layout = Placement(policy="by hand", cliques=instance.cliques, items=tuple(held))
        found.append(score(instance, layout, "serial").seconds)
    return min(found)


def test_of_few_items_the_gap_is_mostly_that_they_are_whole():
    # formulas [U5]: mean gaps to the LP of 23% (optimum) and 121% (a search over shares), on
    # these 25 instances
    gaps = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        sizes = np.array([rng.integers(1, 5) for _ in range(6)]).reshape(2, 3)
        instance = rows_and_lists(10 * rng.random((2, 3)), sizes, device_bytes=6)
        bound, best = bound_placements(instance, "serial"), brute_force(instance)
        searched = seconds_of_a_search(instance)
        assert bound <= best + 1e-9 <= searched + 2e-9
        gaps.append((best / bound - 1, searched / bound - 1))
    assert np.mean(gaps, axis=0) == pytest.approx([0.226, 1.209], abs=5e-4)


def test_three_devices_are_bounded_by_enumeration():
    rng = np.random.default_rng(7)
    for _ in range(6):
        instance = small(rng, 3, unequal=True, num=3)
        found, best = place_joint(instance, "serial"), brute_force(instance)
        assert found.bound <= best + 1e-9 <= found.score.seconds + 2e-9


@pytest.mark.slow
def test_the_programme_of_two_cliques_has_the_size_the_formulas_say():
    # formulas [U6]: K = 256 x 2 kinds x 4 places x 2 cliques; a place more, and shares of groups
    rng = np.random.default_rng(6)
    instance, _ = random_problem(
        rng, "hybrid cube mesh, 2 x 4", num_nodes=3000, laws="clique", host=True
    )
    found = place_joint(instance, limit=256)
    assert found.relaxed.status == "optimal"
    num = sum(s.shape[0] * s.shape[1] * 4 for s in found.relaxed.shares)
    assert 1500 <= num <= 4096
    assert found.bound <= found.score.seconds


def test_unequal_laws_are_bounded_by_the_form_of_single_devices():
    # formulas [C23]: n = 2, BSIZE = 1, p_0 = (1,0), p_1 = (0,1): optimum 0; R/P form .5*C_gpu
    costs = RowCosts(local=0.0, peer=0.3, host=1.0)
    instance = rows_problem(np.eye(2), costs, [1, 1], [[0, 1]], None)
    found = place_joint(instance, "serial")
    assert (found.bound, found.score.seconds) == pytest.approx((0.0, 0.0), abs=1e-12)
    mean = rows_problem(np.full(2, 0.5), costs, [1, 1], [[0, 1]], None)
    assert bound_placements(mean, "serial") == pytest.approx(0.15)


def test_the_host_is_paid_once_for_all_cliques():
    # formulas [C25]: one node, two cliques without memory, host 1, disk 5, mu = 3, M_host = 1:
    # the optimum is 2 per both; charging mu in each clique would claim 5
    costs = RowCosts(local=0.0, host=1.0, disk=5.0)
    instance = rows_problem(np.ones(1), costs, [0, 0], [[0], [1]], 1)
    rows = objective_rows(instance.network, "serial")
    even = Prices(rows=np.full(2, 0.5), device=np.zeros(2), host=3.0 / 2)
    # rows weighted by a half each: half of the formulas' 2
    assert 2 * lagrangian_bound(instance, rows, even) == pytest.approx(2.0)
    assert place_joint(instance, "serial").score.seconds == 1.0


def test_a_solver_out_of_time_leaves_the_density_order_and_says_so(monkeypatch):
    rng = np.random.default_rng(3)
    instance, _ = random_problem(rng, "bridged 2+2", host=True)
    monkeypatch.setattr(
        relax_module.SHARED, "solve", lambda *_, **__: Failure(why="no answer in 1 s")
    )
    found = place_joint(instance)
    assert "no answer in 1 s" in found.relaxed.status
    check_placement(instance, found.placement)
    assert found.bound <= found.score.seconds


@pytest.mark.slow
def test_repeated_placements_are_the_same_to_the_byte():
    for instance, _, goal in itertools.islice(instances(12), 0, 12, 5):
        one, two = (place_joint(instance, goal) for _ in range(2))
        assert pickle.dumps([h.own for h in one.placement.items]) == pickle.dumps(
            [h.own for h in two.placement.items]
        )
        assert (one.bound, one.relaxed.seconds) == (two.bound, two.relaxed.seconds)


def test_both_solvers_give_the_same_value():
    rng = np.random.default_rng(9)
    instance, _ = random_problem(rng, "unequal 3+1", laws="device", host=True, num_nodes=60)
    values = [solved(instance, "pipelined", solver=name)[1] for name in ("highs", "cbc")]
    assert [v.solver for v in values] == ["highs", "cbc"]
    assert values[0].seconds == pytest.approx(values[1].seconds, rel=1e-6)


def test_gnnlab_without_room_for_the_topology_is_a_reason():
    rng = np.random.default_rng(2)
    instance, know = random_problem(rng, "NVSwitch 8")
    compared = compare_policies(instance, know)
    assert "topology" in compared.reasons["gnnlab"]
    assert "gnnlab" not in compared.scores
    assert compared.scores["joint"].seconds == min(s.seconds for s in compared.scores.values())


def test_rows_placed_jointly_are_what_the_runtime_reads():
    p = np.random.default_rng(0).random(80).astype(np.float32) ** 3
    costs = RowCosts(local=0.0, peer=0.3, host=1.0, disk=10.0)
    for host_rows in (None, 20, 0):
        found, reads = placed_by("joint", p, costs, [9] * 4, host_rows=host_rows)
        assert all(len(own) <= 9 for own in found.own)
        again = evaluate(p, found.own, costs, on_host=found.on_host)
        np.testing.assert_allclose(reads.seconds, again.seconds)
        others = [
            placed_by(name, p, costs, [9] * 4, host_rows=host_rows)[1].max_seconds
            for name in ("naive", "random", "song-jiang", "legion", "gnnlab")
        ]
        assert reads.max_seconds <= min(others) * (1 + 1e-12)
