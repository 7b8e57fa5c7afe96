"""Tests for planner/profile/roofline.py: parameters against the real models, times by hand."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from gnnplan.planner.cost.stages.host import RELATION_STARTS, start_seconds
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.operations import (
    LayerShape,
    Operation,
    aggregation,
    layer_operations,
    multiplies_first,
    product,
)
from gnnplan.planner.profile.roofline import (
    layer_widths,
    num_parameters,
    product_rate,
    roofline_timing,
)
from gnnplan.planner.workload import SCALES, ModelTiming
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.functions import transforms_first
from gnnplan.runtime.plan.schema import Workload
from tests.support.profiles import batch_profile


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_parameters_are_those_of_the_model_that_runs(model: str, layers: int):
    work = Workload(model=model, num_layers=layers, fanouts=[3] * layers, hidden=16, heads=4)
    built = build_model(work, 30, 7, "multiclass")
    expected = sum(p.numel() for p in built.parameters())
    assert num_parameters(model, layer_widths(work, 30, 7)) == expected


def test_a_sage_layers_work_by_hand():
    # 10 destinations, 30 edges, 20 sources; 4 -> 2 columns; the inputs have no gradient.
    shape = LayerShape(
        num_src=20.0, num_dst=10.0, num_edges=30.0, in_dim=4, out_dim=2, inputs=True, heads=1
    )
    operations = list(layer_operations("sage", shape))
    # Forward twice and two weight gradients, each 2 * 10 * 4 * 2 = 160 operations.
    assert operations.count(product(10.0, 4, 2)) == 4
    # 30 edges of 4 columns, an index and a weight (24 B), and 10 sums of 16 B.
    assert aggregation(shape, 4) == Operation(flops=240.0, moved_bytes=880.0)  # 30 x 24 + 10 x 16
    assert operations.count(aggregation(shape, 4)) == 1
    inner = LayerShape(
        num_src=20.0, num_dst=10.0, num_edges=30.0, in_dim=4, out_dim=2, inputs=False, heads=1
    )
    deeper = list(layer_operations("sage", inner))
    assert len(deeper) == len(operations) + 3  # two row gradients and the aggregation's backward


def test_a_gcn_sums_first_where_that_is_cheaper_as_the_runtime_does():
    # 10,000 sources, 1,000 destinations: ten times fewer products after the sum.
    wide = LayerShape(
        num_src=1e4, num_dst=1e3, num_edges=1.1e4, in_dim=256, out_dim=256, inputs=True, heads=1
    )
    gcn = Workload(model="gcn")
    assert not multiplies_first(gcn, wide, "cpu")
    summed = list(layer_operations("gcn", wide, product_first=False))
    assert summed.count(product(1e3, 256, 256)) == 2
    assert summed.count(aggregation(wide, 256)) == 1
    assert sum(x.flops for x in summed) < sum(x.flops for x in layer_operations("gcn", wide)) / 4
    # Sums that the edges make dear come after a product that makes rows narrow.
    dense = replace(wide, num_src=2e3, num_edges=2e5, in_dim=602, out_dim=16)
    assert multiplies_first(gcn, dense, "cpu")
    assert multiplies_first(replace(gcn, model="sage"), dense, "cpu")
    # Attention scores the products; rows in 16 bits are multiplied first.
    assert multiplies_first(replace(gcn, model="gat"), wide, "cpu")
    assert multiplies_first(replace(gcn, precision="bfloat16"), wide, "cuda")


@given(
    sizes=st.tuples(st.integers(1, 300), st.integers(0, 900), st.integers(0, 4000)),
    widths=st.tuples(st.integers(1, 700), st.integers(1, 300)),
    inner=st.booleans(),
)
def test_the_order_that_is_priced_is_the_order_that_runs(
    sizes: tuple[int, int, int], widths: tuple[int, int], inner: bool
):
    num_dst, more, num_edges = sizes
    block = TorchBlock(
        num_src=num_dst + more,
        num_dst=num_dst,
        indptr=torch.linspace(0, num_edges, num_dst + 1).round().to(torch.int64),
        indices=torch.zeros(num_edges, dtype=torch.int32),
    )
    a, b = widths
    shape = LayerShape(
        num_src=block.num_src, num_dst=num_dst, num_edges=num_edges, in_dim=a, out_dim=b,
        inputs=not inner, heads=1,
    )  # fmt: skip
    for model in ("sage", "gcn"):
        priced = multiplies_first(Workload(model=model), shape, "cpu")
        assert priced == transforms_first(block, a, b, trains=True, inner=inner)


def timing(machine: str, model: str = "sage", hidden: int = 256) -> ModelTiming:
    work = Workload(model=model, num_layers=2, fanouts=[5, 3], hidden=hidden)
    return roofline_timing(
        work,
        load_preset(machine),
        batch_profile(1000),
        ranks=1,
        in_dim=128,
        num_outputs=10,
        scales=SCALES,
    )


def test_a_faster_gpu_takes_less_and_a_larger_batch_more():
    at = {name: timing(name).forward_backward for name in ("v100-nvswitch-2", "dgx-a100", "h200x1")}
    seconds = [t.at(scale=1.0, ranks=1.0, threads=1.0) for t in at.values()]
    assert seconds == sorted(seconds, reverse=True)
    table = at["dgx-a100"]
    assert table.values == sorted(table.values)
    assert table.provenance == "derived"


def test_no_batch_takes_less_than_the_starts_of_its_kernels():
    found = timing("h200x1", hidden=4).forward_backward.values[0]
    # Of a pass with two sage layers the host starts 8 + 2 x 17, each in 47 us.
    assert found == pytest.approx(42 * 47e-6)


def test_the_host_starts_every_kernel_of_a_step():
    found = timing("h200x1")
    # 8 + 2 x 17 of a pass with two sage layers, and 2 of the update, each in 47 us.
    assert found.host_seconds == pytest.approx(44 * 47e-6)
    assert found.batch_seconds == found.batch_host_seconds == 0.0
    weighted = timing("h200x1", "gcn")
    assert weighted.host_seconds == pytest.approx((8 + 2 * 14 + 2) * 47e-6)
    assert weighted.batch_seconds > weighted.batch_host_seconds == pytest.approx(72 * 47e-6)


def test_a_gpu_works_on_both_passes_and_then_on_the_update():
    found = timing("h200x1", hidden=1 << 22)
    passes = found.forward_backward.at(scale=1.0, ranks=1.0, threads=1.0)
    update = found.optimizer.at(ranks=1.0, threads=1.0)
    assert min(passes, update) > 2 * found.host_seconds  # so much that no start is waited for
    assert found.device_seconds == pytest.approx(passes + update)


def test_a_machine_whose_starts_were_not_measured_has_those_of_its_empty_kernels():
    known = load_preset("h200x1")
    assert start_seconds(known) == pytest.approx(47e-6)
    tables = {name: table for name, table in known.tables.items() if name != "gpu_start"}
    assert start_seconds(replace(known, tables=tables)) == pytest.approx(2.35 * 20e-6)


def test_a_relation_more_is_a_product_more_and_its_parameters():
    work = Workload(model="rgcn", num_layers=2, fanouts=[5, 3], hidden=32)

    def made(relations: int) -> ModelTiming:
        batch = replace(batch_profile(1000), edge_types=[1 / relations] * relations)
        return roofline_timing(
            work, load_preset("h200x1"), batch, ranks=1, in_dim=128, num_outputs=10, scales=SCALES
        )

    two, three = made(2), made(3)
    assert three.num_parameters - two.num_parameters == 32 * 32 + 32 * 10
    assert two.num_parameters == 129 * 32 + 3 * 32 * 32 + 32 + 3 * 32 * 10 + 10
    # A start of the host takes 47 us.
    assert three.host_seconds - two.host_seconds == pytest.approx(2 * RELATION_STARTS * 47e-6)
    assert three.activation_bytes > two.activation_bytes


@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "rgcn"])
@pytest.mark.parametrize("inputs", [True, False])
def test_products_in_16_bits_move_half_the_bytes_and_all_else_the_same(model: str, inputs: bool):
    shape = LayerShape(
        num_src=2e4, num_dst=1e4, num_edges=3e4, in_dim=64, out_dim=32, inputs=inputs, heads=2
    )
    whole = list(layer_operations(model, shape, product_first=True))
    half = list(layer_operations(model, shape, product_first=True, item_bytes=2))
    assert [each.flops for each in half] == [each.flops for each in whole]
    products = [product(rows, *ab) for rows in (2e4, 1e4) for ab in ((64, 32), (32, 64))]
    for narrow, wide in zip(half, whole, strict=True):
        times = 2 if wide in products else 1
        assert times * narrow.moved_bytes == wide.moved_bytes
    # Before each forward product of the features, float32's are read and 2 bytes are written.
    rounded = list(layer_operations(model, shape, product_first=True, item_bytes=2, rounds=True))
    more = sum(each.moved_bytes for each in rounded) - sum(each.moved_bytes for each in half)
    rows = 3e4 if model in ("sage", "rgcn") else 2e4
    assert more == (6 * 64 * rows if inputs else 0)


MACHINES = ("v100-nvswitch-2", "dgx-a100", "h200x1")
preset = functools.cache(load_preset)


@given(
    model=st.sampled_from(["sage", "gcn", "gat", "rgcn"]),
    precision=st.sampled_from(["bfloat16", "float16"]),
    machine=st.sampled_from(MACHINES),
    in_dim=st.integers(1, 1024),
    hidden=st.integers(1, 64),
    seeds=st.integers(1, 4000),
)
def test_rows_stored_as_products_take_them_are_never_slower(
    model: str, precision: str, machine: str, in_dim: int, hidden: int, seeds: int
):
    def derived(asked: str, stored: str) -> ModelTiming:
        work = Workload(
            model=model,
            num_layers=2,
            fanouts=[5, 3],
            hidden=8 * hidden,
            precision=asked,  # pyright: ignore[reportArgumentType]
        )
        return roofline_timing(
            work, preset(machine), batch_profile(seeds), ranks=1, in_dim=in_dim, num_outputs=10,
            scales=SCALES, feature_dtype=stored,
        )  # fmt: skip

    narrow, rounded = derived(precision, precision), derived(precision, "float32")
    assert narrow.device_seconds < rounded.device_seconds
    pairs = zip(narrow.forward_backward.values, rounded.forward_backward.values, strict=True)
    assert all(less <= more for less, more in pairs)
    whole = derived("float32", "float32")
    if model == "gat":  # which multiplies first in float32 too
        assert narrow.device_seconds <= whole.device_seconds
    assert derived("float32", precision) == whole  # a batch's rows come in float32


def test_products_in_16_bits_take_half_of_tf32s_seconds_where_a_gpu_has_it():
    half, tf32, whole = (Workload(precision=each) for each in ("bfloat16", "tf32", "float32"))
    newer, older = preset("dgx-a100"), preset("v100-nvswitch-2")
    rates = [product_rate(newer, each).values[0] for each in (half, tf32, whole)]
    assert rates[0] == 2 * rates[1] > 2 * rates[2]
    assert product_rate(older, half) == product_rate(older, whole)


def test_a_model_of_unknown_work_is_refused_in_one_line():
    with pytest.raises(SettingsError, match="expected model sage, gcn, gat") as caught:
        timing("siton", model="mine:make")
    assert "\n" not in str(caught.value)
