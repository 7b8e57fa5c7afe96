"""The generators: shape of the graphs, determinism, and that there is something to learn."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_communities, generate_rmat, generate_sbm
from gnnplan.runtime.graph.generate_draws import noisy_labels, signal_length


def matrix(graph: Graph) -> sp.csr_matrix:
    data = np.ones(graph.num_edges)
    return sp.csr_matrix((data, graph.indices, graph.indptr), shape=(graph.num_nodes,) * 2)


@pytest.mark.parametrize("make", [generate_rmat, generate_sbm])
@pytest.mark.parametrize(("nodes", "degree"), [(2, 0.4), (37, 3.0), (1000, 9.5), (1024, 20)])
def test_graphs_are_symmetric_without_loops_or_repeats_and_of_the_asked_degree(
    make, nodes, degree, tmp_path: Path
):
    graph = make(tmp_path / "g", num_nodes=nodes, degree=degree, feature_dim=3, num_classes=2)
    A = matrix(graph)
    assert (A != A.T).nnz == 0
    assert A.diagonal().sum() == 0
    assert A.data.max() == 1
    A.sum_duplicates()
    assert A.nnz == graph.num_edges == 2 * max(1, round(nodes * degree / 2))
    assert graph.x is not None
    assert graph.x.dtype == np.float32
    assert graph.x.shape == (nodes, 3)


@pytest.mark.parametrize("make", [generate_rmat, generate_sbm])
def test_equal_seeds_give_equal_graphs_and_other_seeds_others(make, tmp_path: Path):
    sizes = {"num_nodes": 500, "degree": 6.0, "feature_dim": 4, "num_classes": 3}
    prints = [
        make(tmp_path / str(i), **sizes, seed=seed).fingerprint for i, seed in enumerate((1, 1, 2))
    ]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("make", [generate_rmat, generate_communities])
def test_generators_of_nodes_share_their_usual_sizes(make):
    usual, those = (inspect.signature(each).parameters for each in (generate_sbm, make))
    shared = ("feature_dim", "num_classes", "seed", "train_fraction", "val_fraction")
    assert [usual[name].default for name in shared] == [those[name].default for name in shared]


def test_splits_are_disjoint_and_of_the_asked_size(tmp_path: Path):
    graph = generate_sbm(
        tmp_path / "g",
        num_nodes=1000,
        degree=30,
        feature_dim=2,
        num_classes=2,
        train_fraction=0.25,
    )
    parts = [graph.train_idx, graph.val_idx, graph.test_idx]
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert [len(p) for p in parts] == pytest.approx([250, 100, 200], abs=2)


def test_signal_length_gives_the_wanted_accuracy():
    # Two classes: P(right) = Phi(s / sqrt 2); Phi(0.6745) = 0.75, so s = 0.6745 sqrt 2 = 0.9539.
    assert signal_length(2, 0.5) == pytest.approx(0.9539, abs=1e-3)
    assert signal_length(10, 0.0) == 0.0


def test_noise_gives_a_share_of_the_labels_any_of_the_other_classes():
    communities = np.arange(40_000) % 4
    found = noisy_labels(communities, 4, 0.3, np.random.default_rng(1))
    shift = np.bincount((found - communities) % 4, minlength=4) / 40_000
    assert shift == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=0.006)  # 4 standard deviations at .1
    alone = noisy_labels(np.zeros(9, np.int64), 1, 0.5, np.random.default_rng(1))
    assert not alone.any()


def test_neighbours_tell_more_than_ten_points_beyond_the_features(tmp_path: Path):
    graph = generate_sbm(
        tmp_path / "g",
        num_nodes=10_000,
        degree=15.0,
        feature_dim=32,
        num_classes=8,
        train_fraction=0.3,
    )
    assert graph.x is not None
    y = graph.y
    assert y is not None
    A = matrix(graph)
    mean = A @ graph.x / np.maximum(A.sum(axis=1), 1)
    both = np.hstack([graph.x, np.asarray(mean)])

    def accuracy(features) -> float:
        model = LogisticRegression(max_iter=300).fit(features[graph.train_idx], y[graph.train_idx])
        return float(model.score(features[graph.test_idx], y[graph.test_idx]))

    alone, with_neighbours = accuracy(np.asarray(graph.x)), accuracy(both)
    assert with_neighbours > alone + 0.15
    assert with_neighbours < 0.97  # label noise and mixed edges leave something to learn
    assert alone > 0.3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nodes": 1}, "at least 2 nodes"),
        ({"degree": 0.0}, "mean degree"),
        ({"degree": 90.0}, "mean degree"),
        ({"num_nodes": 10**12}, r"edges fit in memory, found 1000000000000 nodes .* = 160000.0 GB"),
        ({"num_classes": 0}, "classes"),
        ({"train_fraction": 0.0}, "split fractions"),
        ({"train_fraction": 0.9}, "split fractions"),
    ],
)
def test_impossible_sizes_are_one_dataset_error_and_leave_nothing(change, words, tmp_path: Path):
    sizes = {"num_nodes": 100, "degree": 4.0, "feature_dim": 2, "num_classes": 2} | change
    with pytest.raises(DatasetError, match=words):
        generate_sbm(tmp_path / "g", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_a_degree_the_model_cannot_reach_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="lower the degree"):
        generate_rmat(tmp_path / "g", num_nodes=64, degree=31.0, feature_dim=2, num_classes=2)


@pytest.mark.slow
def test_five_million_edges_take_less_than_fifteen_seconds_and_two_gigabytes(tmp_path: Path):
    # In a process of its own, so that the peak is the generator's alone.
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from gnnplan.runtime.graph.generate import generate_sbm\n"
        "g = generate_sbm(Path(sys.argv[1]), num_nodes=200_000, degree=25, feature_dim=64)\n"
        "use = resource.getrusage(resource.RUSAGE_SELF)\n"
        "from gnnplan.runtime.process import memory_bytes\n"  # ru_maxrss begins with the parent's
        "print(g.num_edges, use.ru_utime + use.ru_stime, memory_bytes()[0])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "g")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(out[0]) == 5_000_000
    assert float(out[1]) < 15
    assert int(out[2]) < 2e9
