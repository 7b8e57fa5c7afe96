"""Does training learn the same with every sampler?

    python -m tests.benchmarks.learning_samplers --json [--data FOLDER] [--graphs NAME,...]
        [--samplers NAME,...] [--seeds 5] [--longer 2] [--larger 4] [--best] [--again 5]

The same 2-layer GraphSAGE on real graphs through plans and our training loop, with equal epochs,
batches, fan-outs, initial weights and order of seeds; only the sampler differs. Layer-wise samplers
draw as many vertices per layer as neighbour sampling newly meets there. Test accuracy is by full
neighbourhoods. Features are the packs' own, projected to 128 columns, which keeps a run short.
`--longer` multiplies the epochs, of all samplers alike; `--larger` the layers of layer-wise ones.
`--best` tests each run at its epoch of best validation accuracy, as published comparisons do: run
until all have converged, noisier estimators are given time and none is punished for overfitting.
Some 40 samplers held to two standard errors of five seeds each expect about two to miss by chance;
`--again` trains those, and neighbour sampling, on so many further seeds and judges by all of them,
with the verdict on the first ones kept beside it.

One line per graph and sampler: mean test accuracy over the seeds, neighbour sampling's as the
baseline, the standard error of the paired difference, the statistics class and the verdict. The bar
for the classes exact and unbiased: at most 1.0 point, and at most 2 standard errors, below
neighbour sampling; others are reported. Sampling by edge weight is not among them: these graphs
have no weights, and with made-up ones the model would be another.
"""

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from gnnplan.runtime import worker
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.statistics import Layer, StatisticsClass, class_of
from gnnplan.runtime.train.recovery import list_checkpoints
from tests.benchmarks.common import record
from tests.benchmarks.learning import LEARNING_RATE, Accuracy
from tests.support.plans import make_plan

EPOCHS = {"amazon-computers": 42, "coauthor-physics": 12}
"""About 700 and 500 updates, after which neighbour sampling's validation accuracy no longer rises
(field `baseline_val` of every line: after each sixth of the epochs)."""
EVALUATIONS = 6
FEATURES = "project:128"
FANOUTS = [10, 5]
HIDDEN = 32
BATCH_SIZE = 512
LOCAL_SHARE = 4
"""Locality-aware sampling prefers the first quarter of all nodes."""
BAR = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How all samplers are trained and judged."""

    seeds: int = 5
    again: int = 0
    """Further seeds for a sampler that missed on the first ones."""
    longer: float = 1.0
    larger: float = 1.0
    best: bool = False
    epochs: int = 0

    @property
    def evaluations(self) -> int:
        """Evenly over the epochs."""
        return (2 if self.best else 1) * EVALUATIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One sampler to train with."""

    name: str
    dialect: Literal["first_seen", "every_hop"] = "first_seen"
    parameters: dict[str, float | str] = field(default_factory=dict)

    def sampler(self, sizes: list[int]) -> Sampler:
        """As a plan names it; `sizes` are what layer-wise samplers draw."""
        layered = self.name in ("ladies", "pladies", "fastgcn") or self.parameters.get("over")
        given = {"sizes": ",".join(map(str, sizes))} if layered else {}
        return Sampler(name=self.name, dialect=self.dialect, parameters=given | self.parameters)


def _way(name: str, **given: float | str) -> Way:
    # As the plan's file gives them back: numbers are float.
    plain = {key: v if isinstance(v, str) else float(v) for key, v in given.items()}
    return Way(name=name, parameters=plain)


def _labor(variant: float | str, estimator: str, **more: float | str) -> Way:
    return _way("labor", variant=variant, estimator=estimator, **more)


def _layered(name: str, **more: float | str) -> Way:
    return replace(_way(name, **more), dialect="every_hop")


def _las(factor: float, correction: str) -> Way:
    return _way("las", factor=factor, correction=correction)


HT = "horvitz-thompson"
WAYS: dict[str, Way] = {
    "neighbor": _way("neighbor"),
    "neighbor-replacement": _way("neighbor", draws="replacement"),
    "full": _way("full"),
    "labor-0-ht": _labor(0, HT),
    "labor-1-ht": _labor(1, HT),
    "labor-star-ht": _labor("star", HT),
    "labor-0-exact-k": _labor(0, "plain", form="exact_k"),
    "labor-0-hajek": _labor(0, "hajek"),
    "labor-1-hajek": _labor(1, "hajek"),
    "labor-star-hajek": _labor("star", "hajek"),
    "labor-1-exact-k": _labor(1, "hajek", form="exact_k"),
    "labor-0-kappa-4-smooth": _labor(0, HT, kappa=4),
    "labor-0-kappa-4-frozen": _labor(0, HT, kappa=4, dependence="frozen"),
    "labor-0-kappa-64-smooth": _labor(0, HT, kappa=64),
    "labor-0-kappa-64-frozen": _labor(0, HT, kappa=64, dependence="frozen"),
    "labor-0-kappa-inf": _labor(0, HT, kappa="inf"),
    "ladies": _layered("ladies"),
    "ladies-count2": _layered("ladies", norm="count2"),
    "ladies-replacement": _layered("ladies", draws="replacement"),
    "ladies-hajek": _layered("ladies", estimator="hajek"),
    "pladies": _layered("pladies"),
    "pladies-hajek": _layered("pladies", estimator="hajek"),
    "pladies-kappa-64-smooth": _layered("pladies", kappa=64),
    "fastgcn": _layered("fastgcn"),
    "fastgcn-without-replacement": _layered("fastgcn", draws="without-replacement"),
    "fastgcn-hajek": _layered("fastgcn", estimator="hajek"),
    "las-2-replacement": _las(2, "replacement"),
    "las-2-poisson": _las(2, "poisson"),
    "las-2-uncorrected": _las(2, "none"),
    "las-8-replacement": _las(8, "replacement"),
    "las-8-poisson": _las(8, "poisson"),
    "las-8-hajek": _las(8, "hajek"),
    "las-8-uncorrected": _las(8, "none"),
    "las-8-over-ladies": _layered("las", factor=8, correction="poisson", over="ladies"),
}
"""Every sampler of the runtime, neighbour sampling first."""


def new_vertices(graph: Graph) -> list[int]:
    """Vertices that a hop of neighbour sampling newly meets, averaged over an epoch's batches."""
    sampler = NeighborSampler(graph.indptr, graph.indices, FANOUTS)
    order = np.random.default_rng(0).permutation(graph.train_idx)
    batches = [
        sampler.sample(np.sort(seeds), epoch=0, step=step).num_sampled_nodes[1:]
        for step, seeds in enumerate(np.array_split(order, -(-len(order) // BATCH_SIZE)))
    ]
    return [round(size) for size in np.mean(batches, axis=0)]


def train(
    graph: Graph, folder: Path, sampler: Sampler, seed: int, how: Protocol
) -> tuple[Accuracy, list[float]]:
    """One run: accuracies at its end or its best, and validation accuracies on the way there."""
    make_plan(
        graph,
        folder / "plan",
        hidden=HIDDEN,
        fanouts=FANOUTS,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        own_rows=graph.num_nodes // LOCAL_SHARE,
        seed=seed,
        sampler=sampler,
    )
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    every = how.epochs // how.evaluations
    config = RunConfig(
        plan_folder=str(folder / "plan"),
        run_folder=str(run),
        epochs=how.epochs,
        eval_every=every,
        keep_checkpoints=how.epochs if how.best else 0,
        pin=False,
    )
    report = worker.run(config)
    curve = [epoch.val for epoch in report.epochs if epoch.val is not None]
    at = int(np.argmax(curve)) if how.best else len(curve) - 1
    if how.best:
        # Back to the checkpoint of that epoch: a resumed run has nothing left to do but the test.
        last = (at + 1) * every
        for later in list_checkpoints(run / "checkpoints")[last:]:
            later.unlink()
        report = worker.run(replace(config, epochs=last, resume=True, eval_every=how.epochs))
    assert report.test_score is not None
    return Accuracy(curve[at], report.test_score), curve


def compare(source: Path, folder: Path, names: list[str], how: Protocol) -> None:
    """Train one data pack with every named sampler and print a line for each."""
    graph = import_graph(source, folder / source.stem, options=ImportOptions(features=FEATURES))
    sizes = [min(round(how.larger * n), graph.num_nodes) for n in new_vertices(graph)]
    epochs = round(how.longer * EPOCHS.get(source.stem, 20))
    how = replace(how, epochs=epochs)
    found: dict[str, list[float]] = {}
    curve: list[float] = []

    def more(name: str, seeds: range) -> list[tuple[Accuracy, list[float]]]:
        sampler = WAYS[name].sampler(sizes)
        runs = [train(graph, folder, sampler, seed, how) for seed in seeds]
        found[name] = found.get(name, []) + [accuracy.test for accuracy, _ in runs]
        return runs

    for name in ["neighbor", *(n for n in names if n != "neighbor")]:
        start = time.process_time()
        runs = more(name, range(how.seeds))
        if name == "neighbor":
            curve = np.mean([values for _, values in runs], axis=0).tolist()
        kind = class_of(WAYS[name].sampler(sizes), Layer.MEAN)
        first = difference, error = _difference(found[name], found["neighbor"])
        verdict = _verdict(kind, difference, error) if name != "neighbor" else "baseline"
        judged = {"verdict": verdict}
        if verdict == "missed" and how.again:
            judged["first_verdict"], everything = verdict, how.seeds + how.again
            more("neighbor", range(len(found["neighbor"]), everything))
            runs += more(name, range(how.seeds, everything))
            difference, error = _difference(found[name], found["neighbor"])
            judged["verdict"] = _verdict(kind, difference, error)
        tests, baseline = found[name], found["neighbor"][: len(found[name])]
        record(
            f"learning_{source.stem}_{name}",
            float(np.mean(tests)),
            "test accuracy",
            baseline=float(np.mean(baseline)),
            ratio=float(np.mean(tests) / np.mean(baseline)),
            difference=difference,
            standard_error=error,
            first_difference=first[0],
            first_standard_error=first[1],
            statistics_class=str(kind),
            **judged,
            val=float(np.mean([accuracy.val for accuracy, _ in runs])),
            baseline_val=curve,
            tests=tests,
            seeds=len(tests),
            epochs=epochs,
            tested_at="best validation" if how.best else "end",
            features=FEATURES,
            layer_sizes=sizes,
            cpu_seconds=time.process_time() - start,
        )


def _difference(tests: list[float], baseline: list[float]) -> tuple[float, float]:
    """Mean of the paired differences and its standard error."""
    differences = np.subtract(tests, baseline[: len(tests)])
    return float(differences.mean()), _standard_error(differences)


def _standard_error(differences: np.ndarray) -> float:
    if len(differences) < 2:
        return float("nan")
    return float(differences.std(ddof=1) / np.sqrt(len(differences)))


def _verdict(kind: StatisticsClass, difference: float, error: float) -> str:
    if kind is StatisticsClass.APPROXIMATE:
        return "reported"
    return "within" if difference > -BAR and difference > -2 * error else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always)")
    parser.add_argument("--data", default=os.environ.get("GNNPLAN_TEST_DATA", "../shared/data"))
    parser.add_argument("--graphs", default=",".join(EPOCHS))
    parser.add_argument("--samplers", default=",".join(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--longer", type=float, default=1.0, help="times the usual epochs")
    parser.add_argument("--larger", type=float, default=1.0, help="times the usual layers")
    parser.add_argument("--best", action="store_true", help="test at the best validation")
    parser.add_argument("--again", type=int, default=0, help="further seeds for those outside")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.graphs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(options.data) / f"{name}.npz"
            how = Protocol(
                seeds=options.seeds,
                again=options.again,
                longer=options.longer,
                larger=options.larger,
                best=options.best,
            )
            compare(path, Path(folder), options.samplers.split(","), how)


if __name__ == "__main__":
    main()
