"""Tests for planner/machine/routes.py: the way through a machine, and shared links by hand."""

import math
from dataclasses import replace

import pytest

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import Link, MachineModel, Memory, Processor, Switch
from gnnplan.planner.machine.routes import (
    Reader,
    Route,
    byte_seconds,
    lines,
    moved_bytes,
    routes,
    row_seconds,
    shortest,
)
from gnnplan.planner.probe.presets import load_preset


def link(
    name: str,
    source: str,
    target: str,
    *,
    gbs: float | int = 10,
    latency: float | int = 0,
    transaction: int = 0,
    gather: float | int = 0,
) -> Link:
    return Link(
        name=name,
        source=source,
        target=target,
        latency_seconds=float(latency),
        bandwidth_bytes_per_second=gbs * 1e9,
        transaction_bytes=transaction,
        gather_bytes_per_second=gather * 1e9,
    )


def machine(links: list[Link], *, gpus: int = 2, numa: int = 0) -> MachineModel:
    return MachineModel(
        name="by hand",
        fingerprint="x",
        provenance="preset",
        processors=[
            Processor(name=f"gpu{g}", kind="cuda", memory=f"gpu{g}.memory") for g in range(gpus)
        ],
        memories=[
            Memory(name="host0", kind="host", capacity_bytes=1),
            *(Memory(name=f"gpu{g}.memory", kind="device", capacity_bytes=1) for g in range(gpus)),
        ],
        switches=[Switch(name=f"numa{n}", kind="numa") for n in range(numa)],
        links=[
            *links,
            *(link(f"hbm{g}", f"gpu{g}.memory", f"gpu{g}", gbs=1e3) for g in range(gpus)),
        ],
    )


def names(route: Route | None) -> list[str]:
    assert route is not None
    return [x.name for x in route.links]


@pytest.mark.parametrize(
    ("dim", "expected"),
    # formulas 2.4 [C7], [L2]: lines of 4 D bytes.
    [(1, 1), (16, 1), (17, 2), (100, 7), (128, 8), (256, 16), (602, 38.5), (25, 2.5)],
)
def test_lines_per_row(dim: int, expected: float):
    assert lines(4 * dim) == expected


@pytest.mark.parametrize("line_bytes", [32, 64, 128])
def test_lines_of_a_row_are_the_mean_over_the_offsets_it_may_start_at(line_bytes: int):
    # formulas 2.4 [C7]: rows one after the other, the first aligned; offsets repeat after CLS
    for row_bytes in range(4, 801):
        starts = range(0, line_bytes * row_bytes, row_bytes)
        touched = [(at + row_bytes - 1) // line_bytes - at // line_bytes + 1 for at in starts]
        assert lines(row_bytes, line_bytes) == sum(touched) / line_bytes


def test_whole_lines_of_the_payload_are_right_only_for_rows_that_keep_their_alignment():
    # formulas 2.4 [C7]: the published ceil(4 D / 64) iff L mod 64 is 0 or gcd(L, 64)
    for row_bytes in range(4, 801):
        published = math.ceil(row_bytes / 64)
        aligned = row_bytes % 64 in (0, math.gcd(row_bytes, 64))
        assert (lines(row_bytes) == published) == aligned
        assert lines(row_bytes) >= published
    # D = 602 and 25: 38 and 2 as published, 38.5 and 2.5 touched
    assert [math.ceil(4 * dim / 64) for dim in (602, 25)] == [38, 2]
    assert [lines(4 * dim) for dim in (602, 25)] == [38.5, 2.5]


def test_a_wide_way_wins_for_much_and_a_quick_one_for_little():
    # 1 KB: 1 us + 1 us against 10 us + 0.01 us; 1 MB: 1 ms against 10 + 10 us.
    slow = link("quick", "host0", "gpu0.memory", gbs=1, latency=1e-6)
    wide = [
        link("wide1", "host0", "s", gbs=100, latency=5e-6),
        link("wide2", "s", "gpu0.memory", gbs=100, latency=5e-6),
    ]
    m = machine([slow, *wide])
    assert names(shortest(m, "host0", "gpu0", 1e3)) == ["quick", "hbm0"]
    assert names(shortest(m, "host0", "gpu0", 1e6)) == ["wide1", "wide2", "hbm0"]


def test_no_way_leads_through_a_third_gpus_memory():
    m = machine(
        [
            link("a", "gpu2.memory", "gpu1.memory"),
            link("b", "gpu1.memory", "gpu0.memory"),
        ],
        gpus=3,
    )
    assert shortest(m, "gpu2.memory", "gpu0") is None
    assert names(shortest(m, "gpu1.memory", "gpu0")) == ["b", "hbm0"]
    with pytest.raises(MachineError, match="expected a way from gpu2"):
        routes(m, "gpu2.memory", "gpu0")


def test_interleaved_memory_is_read_over_every_node_in_equal_shares():
    m = machine(
        [
            link("dram0", "host0", "numa0"),
            link("dram1", "host0", "numa1"),
            link("bridge", "numa1", "numa0", gbs=2),
            link("pcie0", "numa0", "gpu0.memory"),
        ],
        numa=2,
    )
    found = routes(m, "host0", "gpu0")
    assert [r.share for r in found] == [0.5, 0.5]
    assert [names(r) for r in found] == [
        ["dram0", "pcie0", "hbm0"],
        ["dram1", "bridge", "pcie0", "hbm0"],
    ]


def test_a_switch_is_shared_by_all_who_cross_it():
    # Two GPUs behind one 10 GB/s port: each row of 100 B takes as long as two.
    m = machine(
        [
            link("port", "host0", "plx0", gbs=10),
            link("pcie0", "plx0", "gpu0.memory", gbs=10),
            link("pcie1", "plx0", "gpu1.memory", gbs=10),
        ]
    )
    both = [Reader(name=f"gpu{g}", routes=routes(m, "host0", f"gpu{g}")) for g in (0, 1)]
    assert row_seconds(both[:1], 100) == {"gpu0": pytest.approx(1e-8)}
    assert row_seconds(both, 100) == {g: pytest.approx(2e-8) for g in ("gpu0", "gpu1")}
    assert byte_seconds(both)["gpu0"] == pytest.approx(2e-10)


def test_random_rows_move_whole_transactions_at_the_random_rate():
    # 100 B rows in units of 64: 2.5 lines of 64 B = 160 B at 8 of 10 GB/s: 20 ns.
    x = link("x", "a", "b", transaction=64, gather=8)
    assert moved_bytes(x, 100) == 160
    assert row_seconds([Reader(name="r", routes=[Route(links=(x,))])], 100)["r"] == pytest.approx(
        20e-9
    )


def test_a_route_of_no_links_is_infinitely_wide():
    assert Route(links=()).bandwidth_bytes_per_second == math.inf


def test_peers_of_an_nvswitch_meet_at_the_port():
    m = load_preset("dgx-a100")
    gpus = [g.name for g in m.gpus]

    def peers(readers: list[str]) -> dict[str, float]:
        return row_seconds(
            [
                Reader(
                    name=g,
                    routes=[
                        replace(r, share=1 / 7)
                        for other in gpus
                        if other != g
                        for r in routes(m, f"{other}.memory", g)
                    ],
                )
                for g in readers
            ],
            512,
        )

    # 12 links of 25 GB/s at 70% for random reads: all eight read at a port's full rate.
    assert 512 / peers(gpus)["gpu3"] == pytest.approx(12 * 25e9 * 0.7, rel=1e-6)


def test_gpus_behind_one_switch_of_a_dgx_v100_halve_each_others_host_reads():
    m = load_preset("dgx-v100")

    def alone_and_together(others: list[str]) -> float:
        readers = [Reader(name=g, routes=routes(m, "host0", g)) for g in ("gpu0", *others)]
        return 512 / row_seconds(readers, 512)["gpu0"]

    one = alone_and_together([])
    assert one == pytest.approx(15.76e9 * 0.75, rel=1e-3)  # 3.0 x16 at 75%
    assert alone_and_together(["gpu1"]) == pytest.approx(one / 2)
    assert alone_and_together(["gpu2"]) == pytest.approx(one)
