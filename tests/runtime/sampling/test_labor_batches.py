"""LABOR's batches: the same for any threads and ranks, and one clear error for bad input."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.labor import Form, LaborSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from tests.support.labor import drawn, graph_of, skewed_graph

TWO_SEEDS = graph_of({0: [2, 3, 4, 5], 1: [2, 3]}, 6)


def as_bytes(batch: MiniBatch) -> bytes:
    arrays = [batch.n_id, *(a for b in batch.blocks for a in (b.indptr, b.indices, b.weight))]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


@pytest.mark.parametrize(
    "settings",
    [{}, {"form": "exact_k"}, {"variant": "star"}, {"kappa": 8}, {"relabel_budget_bytes": 0}],
)
def test_batches_are_byte_identical_for_1_2_and_4_threads(settings: dict[str, Any]) -> None:
    order = np.random.default_rng(5).permutation(300).astype(np.int64)
    found: list[list[bytes]] = []
    for threads in (1, 2, 4):
        sampler = LaborSampler(*skewed_graph(), [5, 3], **settings)

        def one(step: int, sampler: LaborSampler = sampler) -> bytes:
            return as_bytes(sampler.sample(order[step : step + 30], epoch=0, step=step))

        with ThreadPoolExecutor(threads) as pool:
            found.append(list(pool.map(one, range(30))))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", list(Form))
def test_labor_0_draws_the_same_rows_whatever_the_split_over_ranks(form: Form, ranks: int) -> None:
    sampler = LaborSampler(*skewed_graph(), [5, 3], form=form, edge_ids=True, seed=9)
    seeds = np.random.default_rng(2).permutation(300)[:64].astype(np.int64)

    def rows(part: NDArray[np.int64]) -> list[dict[int, tuple[int, ...]]]:
        batch = sampler.sample(part, epoch=1, step=2)
        return [
            {
                int(batch.n_id[i]): tuple(block.e_id[block.indptr[i] : block.indptr[i + 1]])
                for i in range(block.num_dst)
                if block.e_id is not None
            }
            for block in batch.blocks
        ]

    union: list[dict[int, tuple[int, ...]]] = [{}, {}]
    for part in np.split(seeds, ranks):
        for hop, found in enumerate(rows(part)):
            assert all(union[hop].get(node, edges) == edges for node, edges in found.items())
            union[hop] |= found
    assert union == rows(seeds)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("variant", [0, "star"])
def test_an_empty_seed_list_gives_an_empty_batch(variant: int | str, dialect: Dialect) -> None:
    sampler = LaborSampler(*skewed_graph(), [3, 2], variant=variant, dialect=dialect)
    batch = drawn(sampler, [], 1)[0]
    assert [(b.num_src, b.num_dst, b.num_edges) for b in batch.blocks] == [(0, 0, 0)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fanouts": [0]}, "fan-out"),
        ({"fanouts": [3, -2]}, "fan-out"),
        ({"fanouts": []}, "fan-out"),
        ({"variant": -1}, "variant"),
        ({"variant": "all"}, "variant"),
        ({"form": "exact"}, "form"),
        ({"edge_weight": np.array([1.0, -1, 1, 1, 1, 1])}, "found -1.0 at edge 1"),
        ({"edge_weight": np.array([1.0, 1, np.nan, 1, 1, 1])}, "found nan at edge 2"),
        ({"edge_weight": np.ones(5)}, r"\[6\]"),
        ({"edge_weight": np.ones(6, dtype=np.float16)}, "float32 or float64"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    fanouts = settings.pop("fanouts", [1])
    with pytest.raises(SamplerError, match=message) as caught:
        LaborSampler(*TWO_SEEDS, fanouts, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("seeds", "message"), [([0, 300], "found 300"), ([-1], "found -1"), ([4, 4], "node 4 twice")]
)
def test_bad_seeds_are_refused_and_leave_the_sampler_usable(seeds: list[int], message: str) -> None:
    sampler = LaborSampler(*skewed_graph(), [3, 2], variant=1)
    before = as_bytes(drawn(sampler, [1, 2, 3], 1)[0])
    with pytest.raises(SamplerError, match=message):
        drawn(sampler, seeds, 1)
    assert as_bytes(drawn(sampler, [1, 2, 3], 1)[0]) == before
