"""The grid's cap and the way to peers follow from the machine's rates."""

from dataclasses import replace
from typing import Any

import pytest

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.cost.stages import exchange_gpu
from gnnplan.planner.cost.stages.exchange_gpu import most_in_transit, peer_way, transit_parts
from gnnplan.planner.cost.stages.gather_gpu import (
    Flow,
    fewest_programs,
    gather_programs,
    gather_seconds_with,
)
from gnnplan.planner.machine.model import Table
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.plan.schema import Threads
from tests.planner.cost.by_hand import request
from tests.support.candidates import candidate_of_ranks
from tests.support.profiles import exactly


def placed(**rows: float) -> PlacedRows:
    each = RankRows(rows=rows, working_rows={}, shares={})
    return PlacedRows(policy="test", ranks=[each, each], host_rows=0)


def candidate(preset: Any) -> Candidate:
    gpus = tuple(gpu.name for gpu in preset.gpus[:2])
    return candidate_of_ranks(
        num_ranks=2, threads=Threads(), prefetch_depth=2, policy="test", gpus=gpus,
        cliques=((0, 1),),
    )  # fmt: skip


def test_the_cap_is_the_narrowest_grid_within_a_twentieth_of_the_widest() -> None:
    for under_way in (1.0, 8192.0, 1e5, 7e6):
        flows = {
            "a": Flow(seconds=2e-3, under_way_bytes=under_way),
            "b": Flow(seconds=5e-4, under_way_bytes=3e5),
        }
        cap, widest = fewest_programs(flows), gather_seconds_with(flows, 4096)
        assert gather_seconds_with(flows, cap) <= 1.05 * widest
        assert cap == 1 or gather_seconds_with(flows, cap - 1) > 1.05 * widest


def test_rows_over_pcie_want_a_narrow_grid_and_rows_at_hand_a_wide_one() -> None:
    machine = load_preset("hgx-h100")
    chosen = candidate(machine)
    far = gather_programs(machine, chosen, placed(host=1e5), 512)
    near = gather_programs(machine, chosen, placed(own=1e5), 512)
    both = gather_programs(machine, chosen, placed(host=1e5, own=1e5), 512)
    # 55 GB/s for 1 us is 55 kB, some 7 programs; 3.35 TB/s for .7 us is 2.3 MB, some 290.
    assert 1 <= far <= 30
    assert 100 <= near <= 600
    assert far <= both <= near
    assert gather_programs(machine, chosen, placed(), 512) == 0


def test_a_measured_cap_of_reads_from_the_host_is_the_grids() -> None:
    machine = load_preset("hgx-h100")
    chosen = candidate(machine)
    for cap in (50, 132, 528):
        table = Table(
            unit="programs", axes=["ranks"], points=[[1.0]], values=[float(cap)], spread=0.0
        )
        measured = machine.with_tables({MachineTable.GPU_UVA_PROGRAMS: table})
        far = gather_programs(measured, chosen, placed(host=1e5), 512)
        # Within a twentieth of the time of the measured grid, which is near the best itself.
        assert cap / 1.06 <= far <= cap
        near = gather_programs(measured, chosen, placed(own=1e5), 512)
        assert near == gather_programs(machine, chosen, placed(own=1e5), 512)


def test_few_rows_of_peers_are_read_in_place() -> None:
    machine = load_preset("hgx-h100")
    assert peer_way(machine, candidate(machine), placed(peer=100.0), 512) == "mapped"
    assert peer_way(machine, candidate(machine), placed(own=1e5), 512) == "mapped"


def test_many_narrow_rows_of_peers_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load_preset("hgx-h100")
    chosen = candidate(machine)
    real = exchange_gpu.read_seconds

    def lines(machine: Any, candidate: Any, row_bytes: int) -> dict[str, list[float]]:
        """Peers whose links move lines of 128 bytes at a tenth of their rate."""
        found = dict(real(machine, candidate, row_bytes))
        found["peer"] = [10 * 128 * s / row_bytes for s in found["peer"]]
        return found

    monkeypatch.setattr(exchange_gpu, "read_seconds", lines)
    assert peer_way(machine, chosen, placed(peer=1e6), 8) == "exchange"
    assert peer_way(machine, chosen, placed(peer=10.0), 8) == "mapped"
    many = [replace(batch, vertices=[*batch.vertices[:-1], exactly(1e6)]) for batch in
            request(machine).profile.batches]  # fmt: skip
    narrow = replace(request(machine).graph, feature_dim=2)
    asked = replace(
        request(machine), graph=narrow, profile=replace(request(machine).profile, batches=many)
    )
    each = replace(placed(peer=5e5, own=5e5).ranks[0], shares={"peer": 0.5, "own": 0.5})
    half = replace(placed(), ranks=[each, each])
    # Half of a million rows of 8 bytes and their ids come, and as many go; all may, by placement.
    (part, *_) = transit_parts(asked, chosen, half)
    assert part == {"rows in transit": 2 * 500_000 * 16}
    assert most_in_transit(asked, chosen, disk=False) == 2 * 1_000_000 * 16
    ahead = replace(chosen, threads=replace(chosen.threads, sample=1))
    assert transit_parts(asked, ahead, half) == [{}] * len(half.ranks)
    assert most_in_transit(asked, ahead, disk=False) == 0
    assert most_in_transit(asked, ahead, disk=True) == 1_000_000 * 16
