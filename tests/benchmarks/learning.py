"""Does sampled training under a plan learn what full-batch training learns?

    python -m tests.benchmarks.learning --json [--data FOLDER] [--graphs amazon-computers,...]

On real graphs, with the same model (2-layer GraphSAGE), split, optimiser and learning rate: our
mini-batches of sampled neighbours against plain PyTorch on the full graph, several seeds each. The
bar: our mean test accuracy at most 1.0 point, and at most 2 standard errors of the difference,
below the full graph's. Each side's number of updates is chosen by its validation accuracy.
"""

import argparse
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from gnnplan.runtime import worker
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.launch.config import RunConfig
from tests.benchmarks.common import record
from tests.support.plans import make_plan

FEATURES = {"amazon-computers": "dense", "coauthor-physics": "project:256"}
HIDDEN = 64
BUDGETS = (200, 400)
"""Optimiser steps, ours rounded up to whole epochs; each side keeps the budget whose mean
validation accuracy is best, so that the test set chooses nothing."""
BATCH_SIZE = 1024
LEARNING_RATE = 3e-3
"""At 0.01 both ways end anywhere between 0.73 and 0.90 on amazon-computers' raw word counts."""
FANOUTS = [15, 10]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one trained model."""

    val: float
    test: float


@dataclass(frozen=True, slots=True)
class Scores:
    """Test accuracies of both, one per seed, at the budget each side's validation chose."""

    sampled: list[float]
    full_batch: list[float]
    sampled_updates: int
    full_batch_updates: int

    @property
    def difference(self) -> float:
        """Mean of ours less mean of theirs."""
        return float(np.mean(self.sampled) - np.mean(self.full_batch))

    @property
    def standard_error(self) -> float:
        """Of the difference of the two means."""
        parts = [np.var(s, ddof=1) / len(s) for s in (self.sampled, self.full_batch)]
        return float(np.sqrt(sum(parts)))


def full_batch_accuracies(graph: Graph, seed: int) -> dict[int, Accuracy]:
    """Plain PyTorch on the whole graph, scored after each of `BUDGETS` Adam steps.

    The mean over neighbours is one sparse product; that of the inputs is the same in every step.
    """
    assert graph.x is not None
    assert graph.y is not None
    x = torch.from_numpy(np.array(graph.x, dtype=np.float32))
    y = torch.from_numpy(np.array(graph.y))
    train, val, test = map(torch.from_numpy, (graph.train_idx, graph.val_idx, graph.test_idx))
    mean = mean_matrix(graph)
    around_x = mean @ x
    torch.manual_seed(seed)
    first, second = SAGEConv(x.shape[1], HIDDEN), SAGEConv(HIDDEN, graph.num_classes)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)

    def logits() -> torch.Tensor:
        h = (first.lin_l(around_x) + first.lin_r(x)).relu()
        return second.lin_l(mean @ h) + second.lin_r(h)

    found: dict[int, Accuracy] = {}
    for step in range(1, max(BUDGETS) + 1):
        optimizer.zero_grad()
        functional.cross_entropy(logits()[train], y[train]).backward()
        optimizer.step()
        if step in BUDGETS:
            with torch.no_grad():
                right = (logits().argmax(1) == y).float()
            found[step] = Accuracy(float(right[val].mean()), float(right[test].mean()))
    return found


def mean_matrix(graph: Graph) -> torch.Tensor:
    """Sparse [N, N]: row v averages over v's in-neighbours."""
    indptr, indices = (torch.from_numpy(np.array(a)).long() for a in (graph.indptr, graph.indices))
    degree = indptr.diff()
    values = torch.repeat_interleave(1 / degree.clamp(min=1).float(), degree)
    size = (graph.num_nodes, graph.num_nodes)
    return torch.sparse_csr_tensor(indptr, indices, values, size, check_invariants=False)


def sampled_accuracy(graph: Graph, folder: Path, seed: int, updates: int) -> Accuracy:
    """Ours after `updates` steps, by full-neighbour inference."""
    name = f"{graph.name}-{seed}-{updates}"
    make_plan(
        graph,
        folder / name,
        hidden=HIDDEN,
        fanouts=FANOUTS,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        sample_threads=1,
        seed=seed,
    )
    run = folder / f"run-{name}"
    run.mkdir()
    epochs = -(-updates // -(-len(graph.train_idx) // BATCH_SIZE))
    config = RunConfig(
        plan_folder=str(folder / name),
        run_folder=str(run),
        epochs=epochs,
        eval_every=epochs,
        keep_checkpoints=0,
        pin=False,
    )
    report = worker.run(config)
    val = report.epochs[-1].val
    assert report.test_score is not None
    assert val is not None
    return Accuracy(val, report.test_score)


def compare(source: Path, folder: Path, num_seeds: int) -> Scores:
    """Train one data pack both ways, `num_seeds` times each."""
    options = ImportOptions(features=FEATURES.get(source.stem, "dense"))
    graph = import_graph(source, folder / source.stem, options=options)
    ours: dict[int, list[Accuracy]] = {budget: [] for budget in BUDGETS}
    full: dict[int, list[Accuracy]] = {budget: [] for budget in BUDGETS}
    for seed in range(num_seeds):
        for budget in BUDGETS:
            ours[budget].append(sampled_accuracy(graph, folder, seed, budget))
        for budget, accuracy in full_batch_accuracies(graph, seed).items():
            full[budget].append(accuracy)
    kept, full_kept = best_budget(ours), best_budget(full)
    return Scores(
        sampled=[a.test for a in ours[kept]],
        full_batch=[a.test for a in full[full_kept]],
        sampled_updates=kept,
        full_batch_updates=full_kept,
    )


def best_budget(found: dict[int, list[Accuracy]]) -> int:
    """The budget of best mean validation accuracy; the smaller one in a tie."""
    return max(sorted(found), key=lambda budget: float(np.mean([a.val for a in found[budget]])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always)")
    parser.add_argument("--data", default=os.environ.get("GNNPLAN_TEST_DATA", "../shared/data"))
    parser.add_argument("--graphs", default=",".join(FEATURES))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    torch.set_num_threads(1)
    for name in options.graphs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            scores = compare(Path(options.data) / f"{name}.npz", Path(folder), options.seeds)
        record(
            f"test accuracy, {name}, sampled training",
            float(np.mean(scores.sampled)),
            "share",
            baseline=float(np.mean(scores.full_batch)),
            ratio=float(np.mean(scores.sampled) / np.mean(scores.full_batch)),
            difference=scores.difference,
            standard_error=scores.standard_error,
            sampled=scores.sampled,
            full_batch=scores.full_batch,
            sampled_updates=scores.sampled_updates,
            full_batch_updates=scores.full_batch_updates,
            seeds=options.seeds,
        )


if __name__ == "__main__":
    main()
