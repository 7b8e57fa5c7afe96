"""A plan's sampler is built by name, with its parameters, and refused in one line where wrong."""

import math
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest

from gnnplan.runtime import codec
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import BatchSampler, build_sampler
from gnnplan.runtime.sampling.minibatch import Block, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.registry import SAMPLERS, parameters_of
from gnnplan.runtime.sampling.statistics import Layer, StatisticsClass, class_of, is_weighted

Dialect = Literal["first_seen", "every_hop"]
INDPTR = np.arange(0, 101 * 6, 6, dtype=np.int64)
INDICES = np.random.default_rng(1).integers(0, 100, 600).astype(np.int32)
EDGE_WEIGHT = np.random.default_rng(2).random(600).astype(np.float32)
SEEDS = np.arange(0, 100, 5, dtype=np.int64)
EXACT, UNBIASED, APPROXIMATE = StatisticsClass


def sampler(name: str, dialect: Dialect = "every_hop", **parameters: Any) -> Sampler:
    return Sampler(name=name, dialect=dialect, parameters=parameters)


def build(chosen: Sampler, fanouts: list[int] | None = None) -> BatchSampler:
    return build_sampler(
        chosen,
        INDPTR,
        INDICES,
        fanouts or [3, 2],
        7,
        edge_ids=True,
        edge_weight=EDGE_WEIGHT,
        local=np.arange(10),
    )


def batch_of(chosen: Sampler, fanouts: list[int] | None = None) -> MiniBatch:
    return build(chosen, fanouts).sample(SEEDS, epoch=1, step=2)


def check_block(block: Block, batch: MiniBatch) -> None:
    assert block.e_id is not None
    rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
    np.testing.assert_array_equal(batch.n_id[block.indices], INDICES[block.e_id])
    np.testing.assert_array_equal(batch.n_id[rows], block.e_id // 6)


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_every_named_sampler_gives_blocks_of_the_graphs_edges(name: str) -> None:
    batch = batch_of(sampler(name))
    assert len(batch.blocks) == 2
    assert batch.blocks[-1].num_dst == len(SEEDS)
    assert batch.num_edges > 0
    for block in batch.blocks:
        check_block(block, batch)


@pytest.mark.parametrize("draws", ["without-replacement", "replacement", "poisson"])
@pytest.mark.parametrize("estimator", ["plain", "horvitz-thompson", "hajek"])
def test_neighbours_are_drawn_and_weighted_as_the_plan_says(draws: str, estimator: str) -> None:
    batch = batch_of(sampler("neighbor", draws=draws, estimator=estimator, weights="graph"))
    assert (batch.blocks[0].weight is None) == (estimator == "plain")
    per_row = np.diff(batch.blocks[-1].indptr)
    assert (per_row == 3).all() == (draws != "poisson")


def test_default_neighbour_sampling_is_the_uniform_sampler() -> None:
    expected = NeighborSampler(INDPTR, INDICES, [3, 2], seed=7).sample(SEEDS, epoch=1, step=2)
    found = batch_of(sampler("neighbor", "first_seen"))
    np.testing.assert_array_equal(found.n_id, expected.n_id)


def test_full_takes_every_neighbour_whatever_the_fanouts() -> None:
    (block,) = batch_of(sampler("full"), [1]).blocks
    assert (np.diff(block.indptr) == 6).all()
    with pytest.raises(SamplerError, match="expected one fan-out per layer, found none"):
        build_sampler(sampler("full"), INDPTR, INDICES, [], 0)


def test_layer_sizes_are_the_plans_or_the_fanouts() -> None:
    batch = batch_of(sampler("ladies", sizes="9,4"))
    assert batch.num_sampled_nodes[1] <= 9
    assert batch_of(sampler("ladies"), [9, 4]).n_id.tolist() == batch.n_id.tolist()


@pytest.mark.parametrize("correction", ["none", "replacement", "poisson", "hajek"])
def test_locality_over_ladies_draws_layers_by_the_correction(correction: str) -> None:
    settings = {"over": "ladies", "sizes": "20,30", "factor": 8.0, "correction": correction}
    batch = batch_of(sampler("las", **settings))
    assert (batch.blocks[0].weight is None) == (correction == "none")
    for block in batch.blocks:
        check_block(block, batch)


def test_frozen_labor_repeats_its_draws() -> None:
    made = build(sampler("labor", kappa="inf"))
    first, second = (made.sample(SEEDS, epoch=0, step=step) for step in (0, 9))
    assert first.n_id.tolist() == second.n_id.tolist()
    made = build(sampler("labor"))
    assert made.sample(SEEDS, epoch=0, step=9).n_id.tolist() != first.n_id.tolist()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (sampler("labour"), "expected a sampler among full, neighbor"),
        (sampler("neighbor", fanout=3.0), "found 'fanout'"),
        (sampler("full", kappa=2.0), "parameters among none"),
        (sampler("neighbor", draws="twice"), "draws to be one of without-replacement"),
        (sampler("neighbor", weights="mine"), "expected weights none, or graph"),
        (sampler("las", factor=0.5), "factor of at least 1"),
        (sampler("las", factor="much"), "factor to be a number"),
        (sampler("las", over="labor"), "over to be neighbor or ladies"),
        (sampler("las", over="ladies", factor=0.5), "factor of at least 1"),
        (sampler("las", "first_seen", over="ladies"), "expected dialect every_hop"),
        (sampler("las", correction="some"), "correction to be one of none, replacement"),
        (sampler("labor", kappa=0.5), "kappa"),
        (sampler("labor", variant=-1.0), "variant"),
        (sampler("labor", form="some"), "form to be one of"),
        (sampler("ladies", "first_seen"), "expected dialect every_hop"),
        (sampler("ladies", sizes="9;4"), "sizes as in"),
        (sampler("fastgcn", norm="fro"), "found 'norm'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(chosen: Sampler, message: str) -> None:
    with pytest.raises(SamplerError, match=message) as caught:
        build(chosen)
    assert "\n" not in str(caught.value)


def test_a_sampler_without_an_entry_is_named() -> None:
    with pytest.raises(SamplerError, match=r"expected a sampler among .*, found 'toy'") as caught:
        build(sampler("toy"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_zero_fanouts_are_refused(name: str) -> None:
    if name == "full":
        return  # its fan-outs only say how many hops there are
    with pytest.raises(SamplerError, match="found 0 in") as caught:
        build(sampler(name), [3, 0])
    assert "\n" not in str(caught.value)


def test_graph_weights_are_wanted_only_from_graphs_that_have_them() -> None:
    with pytest.raises(SamplerError, match="edge_weight"):
        build_sampler(sampler("neighbor", weights="graph"), INDPTR, INDICES, [3], 0)


@pytest.mark.parametrize(
    ("chosen", "mean", "total", "other"),
    [
        (sampler("neighbor"), EXACT, EXACT, EXACT),
        (sampler("neighbor", estimator="hajek"), EXACT, EXACT, EXACT),
        (sampler("neighbor", draws="replacement"), UNBIASED, UNBIASED, APPROXIMATE),
        (sampler("neighbor", weights="graph"), APPROXIMATE, APPROXIMATE, APPROXIMATE),
        (sampler("labor"), APPROXIMATE, APPROXIMATE, APPROXIMATE),
        (sampler("labor", estimator="horvitz-thompson"), UNBIASED, UNBIASED, APPROXIMATE),
        (sampler("labor", form="exact_k", estimator="plain"), UNBIASED, UNBIASED, APPROXIMATE),
        (sampler("labor", form="exact_k", variant=1.0), APPROXIMATE, APPROXIMATE, APPROXIMATE),
        (
            sampler("labor", estimator="horvitz-thompson", kappa="inf"),
            APPROXIMATE,
            APPROXIMATE,
            APPROXIMATE,
        ),
        (sampler("ladies"), APPROXIMATE, APPROXIMATE, APPROXIMATE),
        (sampler("ladies", draws="replacement"), UNBIASED, UNBIASED, APPROXIMATE),
        (sampler("pladies"), UNBIASED, UNBIASED, APPROXIMATE),
        (sampler("fastgcn"), UNBIASED, UNBIASED, APPROXIMATE),
        (sampler("las"), UNBIASED, UNBIASED, APPROXIMATE),
        (sampler("las", correction="none"), APPROXIMATE, APPROXIMATE, APPROXIMATE),
        (sampler("full"), EXACT, EXACT, EXACT),
    ],
)
def test_class_of_a_plans_sampler(
    chosen: Sampler, mean: StatisticsClass, total: StatisticsClass, other: StatisticsClass
) -> None:
    assert [class_of(chosen, layer) for layer in Layer] == [mean, total, other]


def test_parameters_survive_the_plan_file_as_numbers_and_words() -> None:
    chosen = sampler("labor", variant="star", kappa=4.0)
    again = codec.decode(Sampler, codec.to_plain(chosen))
    assert again == chosen
    assert parameters_of(again)["kappa"] == 4
    assert math.isinf(float(parameters_of(sampler("labor", kappa="inf"))["kappa"]))


def test_a_sampler_imports_neither_torch_nor_the_other_samplers() -> None:
    code = (
        "import sys, numpy as np\n"
        "from gnnplan.runtime.plan import Sampler\n"
        "from gnnplan.runtime.sampling.build import build_sampler\n"
        "build_sampler(Sampler(), np.zeros(2, np.int64), np.zeros(0, np.int32), [2], 0)\n"
        "folder = 'gnnplan.runtime.sampling.'\n"
        "loaded = {'torch', f'{folder}labor', f'{folder}layerwise'}\n"
        "print(sorted(loaded & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


WEIGHTS = [
    Sampler(name="full"),
    *(
        Sampler(name="neighbor", parameters={"draws": draws, "estimator": e, "weights": weights})
        for draws in ("without-replacement", "replacement", "poisson")
        for e in ("plain", "horvitz-thompson", "hajek")
        for weights in ("none", "graph")
    ),
    *(
        Sampler(name="labor", parameters={"form": form, "estimator": e})
        for form in ("poisson", "exact_k")
        for e in ("plain", "horvitz-thompson", "hajek")
    ),
    *(
        Sampler(name=name, dialect="every_hop", parameters={"sizes": "20,40", "estimator": e})
        for name in ("ladies", "pladies", "fastgcn")
        for e in ("plain", "horvitz-thompson")
    ),
    *(
        Sampler(name="las", parameters={"factor": 2.0, "correction": correction})
        for correction in ("none", "replacement", "poisson", "hajek")
    ),
]


@pytest.mark.parametrize("sampler", WEIGHTS, ids=str)
def test_blocks_have_weights_where_it_is_said(small_graph: Graph, sampler: Sampler) -> None:
    """Plans for models that take none rest on it."""
    graph = (np.array(small_graph.indptr), np.array(small_graph.indices))
    weight = np.linspace(0.5, 2.0, len(graph[1])).astype(np.float32)
    made = build_sampler(
        sampler, *graph, [4, 4], 0, edge_weight=weight, local=np.arange(50), steps_per_epoch=4
    )
    batch = made.sample(np.arange(20), epoch=0, step=0)
    assert any(block.weight is not None for block in batch.blocks) == is_weighted(sampler)
