"""What no sampler can use is refused in one line, by whichever name the plan gives the sampler."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling import checks
from gnnplan.runtime.sampling.build import BatchSampler, build_sampler
from gnnplan.runtime.sampling.checks import float32_weight
from gnnplan.runtime.sampling.registry import SAMPLERS

NUM_NODES = 100
INDPTR = np.arange(0, 6 * NUM_NODES + 1, 6, dtype=np.int64)
INDICES = np.random.default_rng(1).integers(0, NUM_NODES, 6 * NUM_NODES).astype(np.int32)
BY_LAYER = ("ladies", "pladies", "fastgcn")
WEIGHTED = [name for name, spec in SAMPLERS.items() if "weights" in spec.parameters]
DEPENDENT = [name for name, spec in SAMPLERS.items() if spec.dependent]


def build(
    name: str,
    fanouts: list[Any] | None = None,
    weight: NDArray[np.floating] | None = None,
    **parameters: Any,
) -> BatchSampler:
    return build_sampler(
        Sampler(name=name, dialect="every_hop", parameters=parameters),
        INDPTR,
        INDICES,
        [3, 2] if fanouts is None else fanouts,
        7,
        edge_weight=weight,
        local=np.arange(10),
    )


def refused(words: str) -> Any:
    """One line that says what was found."""
    return pytest.raises(SamplerError, match=rf"\A[^\n]*{words}[^\n]*; [^\n]*\Z")


@pytest.mark.parametrize("name", [n for n in SAMPLERS if n != "full"])
@pytest.mark.parametrize("bad", [0, -2])
def test_fanouts_and_layer_sizes_are_positive(name: str, bad: int) -> None:
    with refused(f"found {bad}"):
        build(name, [3, bad])


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_a_sampler_without_hops_is_refused(name: str) -> None:
    with refused("found (none|0)"):
        build(name, [])


@pytest.mark.parametrize("name", [n for n in SAMPLERS if n not in BY_LAYER])
def test_more_neighbours_than_the_graph_has_are_all_of_a_row(name: str) -> None:
    # A fan-out is an upper bound per row, so one above every degree is no mistake.
    batch = build(name, [NUM_NODES + 1]).sample(np.arange(5), epoch=0, step=0)
    drawn = np.diff(batch.blocks[0].indptr)
    assert (drawn == 6).all() or name == "las"  # which by default draws with replacement
    assert (drawn <= NUM_NODES + 1).all()


@pytest.mark.parametrize("name", BY_LAYER)
def test_layers_larger_than_the_graph_are_refused(name: str) -> None:
    with refused(f"between 1 and the graph's {NUM_NODES} nodes, found {NUM_NODES + 1}"):
        build(name, [3, NUM_NODES + 1])
    with refused("expected 2 sizes"):
        build(name, sizes="5")


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([3, NUM_NODES], f"between 0 and 99, found {NUM_NODES} at position 1"),
        ([-1], "found -1 at position 0"),
        ([3, 4, 3], r"node 3 twice \(again at position 2\)"),
    ],
)
def test_seeds_out_of_range_or_twice_are_refused(name: str, seeds: list[int], words: str) -> None:
    sampler = build(name)
    with refused(words):
        sampler.sample(np.array(seeds), epoch=0, step=0)
    assert sampler.sample(np.arange(4), epoch=0, step=0).num_seeds == 4


@pytest.mark.parametrize("name", [n for n in SAMPLERS if n != "labor"])
def test_seeds_that_are_no_list_are_refused(name: str) -> None:
    with refused("seeds as a list of node ids"):
        build(name).sample(np.array([[1, 2]]), epoch=0, step=0)


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_negative_or_no_number_are_refused(name: str, bad: float) -> None:
    weight = np.ones(len(INDICES), np.float32)
    weight[7] = bad
    with refused(rf"found {bad} at edge 7 \(1 such\)"):
        build(name, weight=weight, weights="graph")
    with refused("one edge weight per stored edge"):
        build(name, weight=weight[:5], weights="graph")


def test_weights_are_checked_part_by_part_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CHECKED_WEIGHTS", 1 << 10)
    weight = np.ones(1 << 20, np.float32)
    tracemalloc.start()
    try:
        kept = float32_weight(weight, len(weight))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.shares_memory(kept, weight)
    assert not kept.flags.writeable
    assert peak < len(weight) // 8
    weight[[5000, 70_000]] = -1, np.nan
    with refused(r"found -1.0 at edge 5000 \(2 such\)"):
        float32_weight(weight, len(weight))


@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("kappa", [0.0, -1.0, 0.5, 1.5, float("nan")])
def test_kappa_is_a_whole_number_of_batches(name: str, kappa: float) -> None:
    with refused(f"kappa .* found {kappa}"):
        build(name, kappa=kappa)


@pytest.mark.parametrize("over", ["neighbor", "ladies"])
@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, float("nan"), float("inf")])
def test_a_locality_factor_is_at_least_1(over: str, factor: float) -> None:
    with refused(f"factor of at least 1 .* found {factor}"):
        build("las", factor=factor, over=over)


@pytest.mark.parametrize("variant", [-1.0, 0.5, float("nan"), float("inf")])
def test_labor_makes_a_whole_number_of_passes(variant: float) -> None:
    with refused("LABOR variant .* found"):
        build("labor", variant=variant)
    with refused("tolerance of at least 0, found -0.5"):
        build("labor", variant="star", tolerance=-0.5)
