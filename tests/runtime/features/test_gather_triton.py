"""The Triton gather returns rows bit for bit: on CUDA where there is one, else interpreted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnplan.runtime.features.location import encode

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
POISON = -12345.0


class Case:
    """A table cut into sources, and what each node's row is."""

    def __init__(
        self,
        device: torch.device,
        *,
        num_nodes: int,
        width: int,
        dtypes: list[torch.dtype],
        pad: int = 0,
        wide: bool = False,
        coarse: bool = False,
    ) -> None:
        from gnnplan.runtime.features.device_rows import DeviceRows
        from gnnplan.runtime.features.gather_triton import DeviceTable

        rng = np.random.default_rng([num_nodes, width, len(dtypes)])
        self.device = device
        self.numbers = rng.integers(0, len(dtypes), num_nodes)
        slots = np.zeros(num_nodes, np.int64)
        sources: dict[int, Any] = {}
        self.rows: list[Tensor] = [torch.empty(0)] * num_nodes
        for number, dtype in enumerate(dtypes):
            nodes = rng.permutation(np.flatnonzero(self.numbers == number))
            slots[nodes] = np.arange(nodes.size)
            values = rng.standard_normal((nodes.size, width + pad)).astype(np.float32)
            table = torch.from_numpy(np.round(values * 4) / 4 if coarse else values).to(dtype)
            table = (
                table.pin_memory() if device.type == "cuda" and number == 1 else table.to(device)
            )
            sources[number] = DeviceRows(f"kind{number}", table[:, :width])
            for slot, node in enumerate(nodes):
                self.rows[node] = table[slot, :width].cpu()
        self.table = DeviceTable(encode(self.numbers, slots, wide=wide), sources, device)
        self.width = width

    def check(
        self, ids: np.ndarray, dtype: torch.dtype, *, max_programs: int | None = None
    ) -> None:
        """Gather into a poisoned output; values, guard rows and counters must be right."""
        count = len(ids)
        guarded = torch.full((count + 2, self.width), POISON, dtype=dtype, device=self.device)
        counts = self.table.new_counts()
        out = guarded[1 : count + 1]
        self.table.gather(
            torch.from_numpy(ids).to(self.device), out, counts, max_programs=max_programs
        )
        expected = [self.rows[node].to(dtype) for node in ids]
        found = guarded.cpu()
        if count:
            assert torch.equal(found[1:-1], torch.stack(expected))
        poison = torch.full((self.width,), POISON, dtype=dtype)
        assert torch.equal(found[0], poison)
        assert torch.equal(found[-1], poison)
        by_source = np.bincount(self.numbers[ids], minlength=257) if count else np.zeros(257)
        np.testing.assert_array_equal(counts.cpu().numpy(), by_source)


@pytest.mark.parametrize("width", [1, 3, 7, 8, 101, 602])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gaps", [False, True])
def test_padded_rows_come_back_bit_for_bit_and_no_other_row_is_touched(
    width: int, dtype: torch.dtype, gaps: bool, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.features.device_rows import DeviceRows, owns_padding, padded_rows
    from gnnplan.runtime.features.gather_triton import DeviceTable

    num_nodes, count = 23, 19
    rows = torch.randn((num_nodes, width)).to(dtype)
    table = padded_rows(num_nodes, width, dtype, kernel_device)
    table.copy_(rows)
    assert owns_padding(table)
    codes = encode(np.zeros(num_nodes, np.uint8), np.arange(num_nodes))
    device_table = DeviceTable(codes, {0: DeviceRows("own", table)}, kernel_device)
    make = padded_rows if gaps else lambda n, w, t, d: torch.empty((n, w), dtype=t, device=d)
    guarded = make(count + 2, width, dtype, kernel_device)
    guarded[:] = POISON
    ids = torch.from_numpy(fresh_ids(num_nodes, count)).to(kernel_device)
    counts = device_table.new_counts()
    device_table.gather(ids, guarded[1:-1], counts)
    assert torch.equal(guarded[1:-1].cpu(), rows[ids.cpu()])
    assert (guarded[[0, -1]].float() == torch.tensor(POISON).to(dtype).float()).all()
    assert int(counts[0]) == count


def fresh_ids(num_nodes: int, count: int) -> np.ndarray:
    """Random ids with repetitions, both ends among them where there is room."""
    rng = np.random.default_rng()
    ids = rng.integers(0, num_nodes, count)
    ids[: min(count, 4)] = [0, num_nodes - 1, 0, num_nodes - 1][: min(count, 4)]
    return ids


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 16, 31, 100, 128, 602, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_width_and_dtype_come_back_bit_for_bit(
    width: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    case = Case(kernel_device, num_nodes=61, width=width, dtypes=[dtype] * 3)
    case.check(fresh_ids(61, 37), dtype)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 1000])
def test_batches_of_any_size_are_gathered(count: int, kernel_device: torch.device) -> None:
    case = Case(kernel_device, num_nodes=200, width=8, dtypes=[torch.float32] * 2)
    case.check(fresh_ids(200, count), torch.float32)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_rows_are_converted_to_the_output_dtype(
    stored: torch.dtype, out: torch.dtype, kernel_device: torch.device
) -> None:
    # Triton's interpreter cuts bits off where hardware rounds to bfloat16: give it none to cut.
    exact = out is torch.bfloat16 and kernel_device.type == "cpu"
    case = Case(kernel_device, num_nodes=50, width=20, dtypes=[stored] * 2, coarse=exact)
    case.check(fresh_ids(50, 40), out)


@pytest.mark.parametrize("wide", [False, True])
def test_sources_of_several_dtypes_serve_one_batch(wide: bool, kernel_device: torch.device) -> None:
    case = Case(kernel_device, num_nodes=90, width=12, dtypes=DTYPES, wide=wide)
    case.check(fresh_ids(90, 70), torch.float32)


@pytest.mark.parametrize("pad", [1, 2, 4, 5])
def test_strided_and_unaligned_rows_are_read(pad: int, kernel_device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        case = Case(kernel_device, num_nodes=40, width=16, dtypes=[dtype], pad=pad)
        case.check(fresh_ids(40, 33), dtype)


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_a_capped_grid_strides_over_the_whole_batch(
    programs: int, kernel_device: torch.device
) -> None:
    case = Case(kernel_device, num_nodes=80, width=1024, dtypes=[torch.float32] * 2)
    case.check(fresh_ids(80, 29), torch.float32, max_programs=programs)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("programs", [1, 3, 64])
def test_rows_read_in_the_order_of_their_places_are_the_same(
    programs: int, wide: bool, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.features import gather_triton

    monkeypatch.setattr(gather_triton, "_reads_far", lambda codes, sources: True)
    monkeypatch.setattr(gather_triton, "_LEAST_SORTED", 2)
    case = Case(kernel_device, num_nodes=90, width=12, dtypes=DTYPES, wide=wide)
    case.check(fresh_ids(90, 300), torch.float32, max_programs=programs)


def test_only_much_memory_of_the_host_is_read_in_order(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.features import gather_triton
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.gather_triton import DeviceTable
    from gnnplan.runtime.features.location import encode

    monkeypatch.setattr(gather_triton, "REACH_BYTES", 10 * 16)
    codes = encode(np.zeros(11, np.uint8), np.arange(11))
    for kind, rows, sorts in (("host", 10, False), ("host", 11, True), ("own", 11, False)):
        table = torch.zeros((rows, 4), device=kernel_device)
        assert DeviceTable(codes, {0: DeviceRows(kind, table)}, kernel_device)._sorts == sorts
    # Much memory, but few of the nodes lie there: 4 of 100, then 5.
    table = torch.zeros((100, 4), device=kernel_device)
    sources = {0: DeviceRows("own", table), 1: DeviceRows("host", table)}
    for far, sorts in ((4, False), (5, True)):
        codes = encode((np.arange(100) < far).astype(np.uint8), np.arange(100))
        assert DeviceTable(codes, sources, kernel_device)._sorts == sorts


@pytest.mark.parametrize("sources", [3, 5])
@pytest.mark.parametrize("turns", [0, 1, 1000])
def test_rows_are_counted_alike_in_fields_and_turn_by_turn(
    turns: int, sources: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.features import gather_triton

    monkeypatch.setattr(gather_triton, "PACKED_TURNS", turns)
    case = Case(kernel_device, num_nodes=80, width=1024, dtypes=[torch.float32] * sources)
    case.check(fresh_ids(80, 70), torch.float32, max_programs=3)


@pytest.mark.usefixtures("shuffled")
def test_the_order_of_programs_changes_neither_rows_nor_counters(
    kernel_device: torch.device,
) -> None:
    case = Case(kernel_device, num_nodes=80, width=33, dtypes=[torch.float32] * 3)
    case.check(fresh_ids(80, 300), torch.float32, max_programs=3)


def test_ids_and_slots_out_of_range_are_counted_and_not_written(
    kernel_device: torch.device,
) -> None:
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.gather_triton import DeviceTable

    rows = DeviceRows("own", torch.ones((3, 4), device=kernel_device))
    codes = encode(np.array([0, 0, 0, 0, 1]), np.array([0, 1, 2, 3, 0]))
    table = DeviceTable(codes, {0: rows}, kernel_device)
    ids = torch.tensor([-1, 0, 3, 5, 2, 4, 2**40], device=kernel_device)
    out = torch.full((7, 4), POISON, device=kernel_device)
    counts = table.new_counts()
    table.gather(ids, out, counts)
    # Two rows are there; slot 3 and the ids -1, 5 and 2^40 are not; node 4 is another's to fill.
    assert (out[:, 0] == 1).tolist() == [False, True, False, False, True, False, False]
    assert (out == POISON).all(dim=1).tolist() == [True, False, True, True, False, True, True]
    assert (int(counts[0]), int(counts[256]), int(counts.sum())) == (2, 4, 6)


def test_bad_ids_are_counted_once_though_sources_of_several_dtypes_take_several_launches(
    kernel_device: torch.device,
) -> None:
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.gather_triton import DeviceTable

    sources = {
        number: DeviceRows("own", torch.ones((2, 4), dtype=dtype, device=kernel_device))
        for number, dtype in enumerate(DTYPES)
    }
    codes = encode(np.array([0, 1, 2, 0, 1]), np.array([0, 1, 1, 2, 5]))
    table = DeviceTable(codes, sources, kernel_device)
    ids = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 2**40], device=kernel_device)
    counts = table.new_counts()
    table.gather(ids, torch.empty((8, 4), device=kernel_device), counts)
    # Ids -1, 5 and 2^40 are no nodes; slots 2 of source 0 and 5 of source 1 are not there.
    assert counts[[0, 1, 2, 256]].tolist() == [1, 1, 1, 5]


def test_counters_add_up_over_calls(kernel_device: torch.device) -> None:
    case = Case(kernel_device, num_nodes=30, width=4, dtypes=[torch.float32] * 2)
    counts = case.table.new_counts()
    ids = torch.arange(30, device=kernel_device)
    for _ in range(3):
        case.table.gather(ids, torch.empty((30, 4), device=kernel_device), counts)
    expected = 3 * np.bincount(case.numbers, minlength=2)
    assert counts[:2].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i, o, c: (i.int(), o, c), "int64"),
        (lambda i, o, c: (i, o[:, :3], c), "output"),
        (lambda i, o, c: (i, o.double(), c), "bfloat16 output"),
        (lambda i, o, c: (i, o, c[:5]), "counters"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    change: Callable[..., Any], words: str, kernel_device: torch.device
) -> None:
    case = Case(kernel_device, num_nodes=10, width=4, dtypes=[torch.float32])
    ids = torch.arange(5, device=kernel_device)
    out = torch.empty((5, 4), device=kernel_device)
    with pytest.raises(ValueError, match=words):
        case.table.gather(*change(ids, out, case.table.new_counts()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="offsets past 2^31 elements need a GPU")
def test_offsets_past_two_to_the_31_elements_are_exact() -> None:
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.gather_triton import DeviceTable

    device, num_nodes, width = torch.device("cuda"), (1 << 24) + 3, 130
    values = torch.zeros((num_nodes, width), dtype=torch.float16, device=device)
    ids = torch.tensor([0, num_nodes // 2, num_nodes - 1], device=device)
    values[ids] = torch.randn((3, width), device=device).half()
    table = DeviceTable(
        encode(np.zeros(num_nodes, np.uint8), np.arange(num_nodes)),
        {0: DeviceRows("own", values)},
        device,
    )
    out = torch.full((3, width), POISON, dtype=torch.float16, device=device)
    table.gather(ids, out, table.new_counts())
    assert torch.equal(out, values[ids])
