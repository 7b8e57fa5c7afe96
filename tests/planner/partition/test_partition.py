"""Tests for planner/partition/partition.py: every partitioner through the one interface."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.partition import PARTITIONERS, partition
from gnnplan.planner.partition.problem import Balance
from tests.planner.partition.graphs import csc, random_csc, ring_of_cliques
from tests.reference.partition_quality import measure_quality

NEEDS = {"kaminpar": "kaminpar", "metis": "pymetis"}


def needs(name: str) -> str:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"package {NEEDS[name]} is not installed")
    return name


@pytest.mark.parametrize("name", PARTITIONERS)
def test_same_arguments_same_bytes(name: str):
    indptr, indices = random_csc(400, 3000, 5)
    training = np.arange(0, 400, 3)
    first, second = (
        partition(indptr, indices, parts=4, name=needs(name), training=training, seed=9)
        for _ in range(2)
    )
    assert first.dtype == np.int32
    assert first.tobytes() == second.tobytes()
    assert first.shape == (400,)
    assert set(first.tolist()) <= set(range(4))


@pytest.mark.parametrize("name", ["kaminpar", "metis"])
def test_edge_cuts_find_planted_clusters(name: str):
    """Eight complete graphs of 12 in a ring, four parts: the best cut is 4 edges, stored twice."""
    indptr, indices = ring_of_cliques(8, 12)
    parts = partition(indptr, indices, parts=4, name=needs(name), seed=1)
    quality = measure_quality(indptr, indices, parts, num_parts=4)
    assert quality.edge_cut == 8
    assert quality.nodes.tolist() == [24] * 4


def test_metis_gets_node_weights_whose_sum_its_integers_hold(monkeypatch: pytest.MonkeyPatch):
    handed: dict[str, Any] = {}

    def part_graph(_parts: int, _graph: Any, **settings: Any) -> tuple[int, np.ndarray]:
        handed.update(settings)
        return 0, np.arange(400) % 4

    other = SimpleNamespace(
        zero_copy_dtype=lambda: np.int16,
        Options=SimpleNamespace,
        CSRAdjacency=SimpleNamespace,
        part_graph=part_graph,
    )
    monkeypatch.setitem(sys.modules, "pymetis", other)
    training = np.arange(0, 400, 4)
    partition(*random_csc(400, 3000, 5), parts=4, name="metis", training=training)
    weights = handed["vweights"].astype(np.int64)
    # 64 per node and quantity are 51,200 in all; 16 bits hold 32,767.
    assert 30_000 < weights.sum() <= np.iinfo(np.int16).max
    others = np.delete(weights, training)
    np.testing.assert_allclose(weights[training].mean() / others.mean(), 5, rtol=0.05)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_one_part_and_no_nodes(name: str):
    indptr, indices = csc(3, [(0, 1)])
    assert partition(indptr, indices, parts=1, name=name).tolist() == [0, 0, 0]
    empty = np.zeros(1, np.int64), np.zeros(0, np.int32)
    assert partition(*empty, parts=4, name=name).tolist() == []


@pytest.mark.parametrize("name", PARTITIONERS)
def test_a_graph_without_edges_is_still_spread(name: str):
    indptr, indices = np.zeros(65, np.int64), np.zeros(0, np.int32)
    parts = partition(indptr, indices, parts=4, name=needs(name), training=np.arange(64))
    assert np.bincount(parts, minlength=4).max() <= 17


@pytest.mark.parametrize("name", PARTITIONERS)
def test_shares_follow_the_weights(name: str):
    indptr, indices = random_csc(600, 3000, 2)
    training = np.arange(600)
    parts = partition(
        indptr, indices, parts=3, name=needs(name), training=training, weights=(4, 2, 2)
    )
    # At most 3% above its share, as asked; a part below it is no harm.
    assert (np.bincount(parts) <= np.array([309, 155, 155])).all()


def test_random_is_within_one_node_of_its_shares_and_differs_by_seed():
    indptr, indices = random_csc(101, 300, 2)
    training = np.arange(40)
    parts = [
        partition(indptr, indices, parts=4, name="random", training=training, seed=s)
        for s in (0, 1)
    ]
    assert np.bincount(parts[0][:40]).tolist() == [10] * 4
    assert np.ptp(np.bincount(parts[0])) <= 2
    assert (parts[0] != parts[1]).any()


def test_hash_is_the_id_modulo_the_parts():
    indptr, indices = random_csc(11, 20, 2)
    assert partition(indptr, indices, parts=3, name="hash").tolist() == [i % 3 for i in range(11)]


@pytest.mark.parametrize("name", PARTITIONERS)
def test_the_volume_objective_never_ends_above_the_cut(name: str):
    indptr, indices = random_csc(500, 4000, 8)
    volumes = [
        measure_quality(
            indptr,
            indices,
            partition(
                indptr,
                indices,
                parts=4,
                name=needs(name),
                training=np.arange(0, 500, 2),
                objective=objective,
            ),
            num_parts=4,
        ).volume
        for objective in ("cut", "volume")
    ]
    assert volumes[1] <= volumes[0]


def test_partitioners_cut_less_than_random_on_a_real_graph(data_folder: Path):
    pytest.importorskip("kaminpar", reason="package kaminpar is not installed")
    with np.load(data_folder / "amazon-photo.npz") as pack:
        indptr, indices, training = pack["indptr"], pack["indices"], pack["train_mask"]
    cuts = {
        name: measure_quality(
            indptr,
            indices,
            partition(indptr, indices, parts=4, name=name, training=training),
            num_parts=4,
        ).cut_share
        for name in ("kaminpar", "random")
    }
    assert cuts["random"] == pytest.approx(0.75, abs=0.02)  # 1 - 1/4
    assert cuts["kaminpar"] < 0.3 * cuts["random"]


def test_wrong_requests_say_what_was_expected():
    indptr, indices = csc(3, [(0, 1)])
    with pytest.raises(SettingsError, match=r"a partitioner among kaminpar, .*found 'spectral'"):
        partition(indptr, indices, parts=2, name="spectral")
    with pytest.raises(SettingsError, match="1 to 32768 parts, found 0"):
        partition(indptr, indices, parts=0)
    with pytest.raises(SettingsError, match="2 weights of at least 1"):
        partition(indptr, indices, parts=2, weights=(1, 0))
    with pytest.raises(SettingsError, match=r"training ids below 3, found 0\.\.7"):
        partition(indptr, indices, parts=2, training=np.array([0, 7]))
    with pytest.raises(SettingsError, match="imbalances above 0"):
        Balance(nodes=0.0)


def test_the_packages_are_not_needed_to_import_the_module():
    """A child process in which both imports fail can still hash, and says what is missing."""
    script = (
        "import sys; sys.modules['kaminpar'] = sys.modules['pymetis'] = None\n"
        "import numpy as np\n"
        "from gnnplan.planner.partition.partition import partition\n"
        "graph = np.array([0, 1, 2]), np.array([1, 0])\n"
        "assert partition(*graph, parts=2, name='hash').tolist() == [0, 1]\n"
        "for name in ('kaminpar', 'metis'):\n"
        "    try: partition(*graph, parts=2, name=name)\n"
        "    except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "expected the package kaminpar" in lines[0]
    assert "expected the package pymetis" in lines[1]
