"""Every pure cost formula against numbers worked by hand or asserted for the published formula."""

from dataclasses import replace

import numpy as np
import pytest

from gnnplan.planner.cost.backends.backend import startup_seconds
from gnnplan.planner.cost.cache_model import cross_validate
from gnnplan.planner.cost.pipeline_time import (
    expected_maximum,
    finish_times,
    kappa,
    period,
    slow_each_other,
    stochastic_period,
    straggler_seconds,
)
from gnnplan.planner.cost.request import expected_vertices, inclusion_at, interpolate_inclusion
from gnnplan.planner.cost.stages.all_reduce import (
    Fabric,
    algorithm_seconds,
    all_reduce_seconds,
    exposed_bucket_seconds,
    exposed_seconds,
    gradient_bytes,
    ring_seconds,
)
from gnnplan.planner.cost.stages.gather import PAGE_BYTES, gather_seconds, touched_rows
from gnnplan.planner.cost.stages.sample import sample_seconds
from gnnplan.planner.machine.model import Table
from gnnplan.planner.machine.routes import lines
from tests.reference.storage_seconds import (
    disk_seconds,
    distinct_pages,
    epoch_seconds,
    random_gather_seconds,
)


class TestStraggler:
    """[A1] of docs/formulas.md 8.1; expected values stand there."""

    def test_kappa_is_the_published_table(self) -> None:
        found = [round(kappa(p), 3) for p in (2, 4, 8, 16)]
        assert found == [0.564, 1.029, 1.424, 1.766]

    def test_kappa_of_two_is_one_over_root_pi(self) -> None:
        assert kappa(2) == pytest.approx(np.pi**-0.5, rel=1e-5)

    def test_eight_correlated_ranks_end_at_22_01_ms(self) -> None:
        assert 20 + straggler_seconds(20.0, 2.0, 8, 0.5) == pytest.approx(22.01, abs=0.005)

    def test_unequal_means_are_integrated_not_added(self) -> None:
        assert expected_maximum([20.0, 20.0, 20.0, 23.0], [1.0] * 4) == pytest.approx(
            23.02, abs=0.005
        )

    def test_equals_monte_carlo(self) -> None:
        draws = np.random.default_rng(0).normal([1, 2, 3], [0.5, 1, 0.2], (200_000, 3))
        assert expected_maximum([1.0, 2.0, 3.0], [0.5, 1.0, 0.2]) == pytest.approx(
            draws.max(1).mean(), abs=0.01
        )

    def test_constant_ranks_end_with_the_slowest(self) -> None:
        assert expected_maximum([1.0, 5.0, 3.0], [0.0, 0.0, 0.0]) == 5

    def test_constant_and_varying_ranks_mix(self) -> None:
        # E[max(0, Z)] = 1 / sqrt(2 pi)
        assert expected_maximum([0.0, 0.0], [0.0, 1.0]) == pytest.approx(
            (2 * np.pi) ** -0.5, abs=1e-2
        )

    def test_noise_common_to_all_ranks_costs_nothing(self) -> None:
        assert straggler_seconds(20.0, 2.0, 8, 1.0) == 0

    def test_a_correlation_beyond_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            straggler_seconds(1.0, 1.0, 2, 1.5)


class TestPipeline:
    """[A2] of docs/formulas.md 8.2."""

    @pytest.mark.parametrize(
        ("depths", "in_flight", "expected"),
        [([1, 1], None, 16.0), ([2, 2], None, 10.0), (None, 1, 20.0)],
    )
    def test_times_4_6_10(
        self, depths: list[int] | None, in_flight: int | None, expected: float
    ) -> None:
        assert period([4.0, 6.0, 10.0], depths=depths, in_flight=in_flight) == expected

    def test_two_items_in_flight_bind_where_neither_stage_nor_buffer_does(self) -> None:
        # (3 + 3 + 3) / 2 = 4.5 beside (3 + 3) / 2 and 3, by hand.
        assert period([3.0, 3.0, 3.0], depths=[2, 2], in_flight=2) == 4.5
        assert period([3.0, 3.0, 3.0], depths=[2, 2]) == 3.0

    def test_two_workers_halve_a_stage(self) -> None:
        assert period([12.0, 5.0], workers=[2, 1], depths=[2], freed_at_start=True) == 6.0

    def test_a_shared_resource_adds_its_stages(self) -> None:
        assert period([4.0, 6.0], shared=[(1.5, [0, 1])]) == 15.0

    def test_an_epoch_fills_once(self) -> None:
        # 4 + 6 + 10 to fill, then 49 periods of 10, by hand.
        assert epoch_seconds([4.0, 6.0, 10.0], 10.0, 50) == 510.0
        assert epoch_seconds([4.0], 4.0, 0) == 0.0

    def test_the_recursion_ends_the_same_epoch_at_510(self) -> None:
        # Times 4, 6, 10 at depth 2: the first item after 20, then one every 10.
        end = finish_times(np.repeat([[4.0], [6.0], [10.0]], 50, axis=1), [2, 2])
        assert end[-1, 0] == 20.0
        assert np.diff(end[-1]).tolist() == [10.0] * 49
        assert end[-1, -1] == 510.0

    @pytest.mark.parametrize(
        ("times", "depths"),
        [
            ([4, 6, 10], [1, 1]),
            ([4, 6, 10], [2, 2]),
            ([4, 9, 10], [2, 1]),
            ([7, 6, 5], [1, 3]),
            ([3, 3, 3], [2, 2]),
        ],
    )
    def test_the_recursion_reaches_the_period(self, times: list[int], depths: list[int]) -> None:
        seconds = np.repeat(np.array(times, dtype=np.float64)[:, None], 400, axis=1)
        end = finish_times(seconds, depths)
        found = (end[-1, -1] - end[-1, 199]) / 200
        assert found == pytest.approx(period([float(t) for t in times], depths=depths), abs=0.05)

    def test_random_stalls_fall_with_depth(self) -> None:
        # Two lognormal stages of mean 10, cv .5, buffers freed at the end: 20.0, 12.6, 10.9, 10.4.
        draws = np.random.default_rng(3).standard_normal((2, 6000))
        sigma = np.sqrt(np.log(1.25))
        times = 10 * np.exp(sigma * draws - sigma**2 / 2)
        found = [finish_times(times, [d])[-1, -1] / 6000 for d in (1, 2, 4, 8)]
        assert found == pytest.approx([20.0, 12.6, 10.9, 10.4], rel=0.03)

    def test_deeper_prefetch_is_never_slower(self) -> None:
        found = [stochastic_period(9.0, 10.0, variation=0.4, depth=d) for d in (1, 2, 4, 8)]
        assert found == sorted(found, reverse=True)
        assert found[-1] >= 10.0

    def test_the_period_is_reproducible(self) -> None:
        a, b = (stochastic_period(9.0, 10.0, variation=0.4, depth=2) for _ in range(2))
        assert a == b

    def test_full_overlap_pays_the_full_slowdown(self) -> None:
        assert slow_each_other(10.0, 10.0, loader_slowdown=2.0, trainer_slowdown=2.0) == (
            20.0,
            20.0,
        )

    def test_a_short_loader_slows_the_trainer_for_its_share_only(self) -> None:
        loader, trainer = slow_each_other(1.0, 10.0, loader_slowdown=1.0, trainer_slowdown=2.0)
        # The loader is busy for f of the time, t' = 10 / (1 - f / 2) and f = 1 / t': t' = 10.5.
        assert loader == 1.0
        assert trainer == pytest.approx(10.5, rel=1e-6)

    def test_nothing_to_do_takes_no_time(self) -> None:
        assert slow_each_other(0.0, 0.0, loader_slowdown=2.0, trainer_slowdown=2.0) == (0.0, 0.0)


class TestAllReduce:
    """[A3] of docs/formulas.md 8.3."""

    def test_ring_of_eight_takes_210_us(self) -> None:
        assert ring_seconds(4e6, 8, 10e-6, 100e9) == pytest.approx(210e-6)

    def test_140_us_of_them_are_latency(self) -> None:
        assert ring_seconds(0.0, 8, 10e-6, 100e9) == pytest.approx(140e-6)

    def test_trees_beat_rings_over_many_hosts_and_a_switch_beats_both(
        self,
    ) -> None:
        box = Fabric(
            devices=8, start_seconds=1e-5, hop_seconds=4e-6, bytes_per_second=4e11, adds=True
        )
        assert algorithm_seconds(4e6, box) == pytest.approx(
            {
                "ring": 10e-6 + 14 * 4e-6 + 14 / 8 * 4e6 / 4e11,
                "tree": 10e-6 + 14 * 4e-6 + 4e6 / (0.46 * 4e11),
                "switch": 25e-6 + 4e6 / (0.85 * 5 / 6 * 4e11),
            }
        )
        many = replace(box, hosts=8, host_hop_seconds=30e-6, card_bytes_per_second=2e11)
        found = algorithm_seconds(4e6, many)
        assert [round(1e6 * found[x]) for x in ("ring", "tree", "switch")] == [917, 289, 248]
        assert "switch" not in algorithm_seconds(4e6, replace(many, adds=False))

    @pytest.mark.parametrize("hosts", [1, 2, 64])
    @pytest.mark.parametrize("adds", [False, True])
    def test_more_bandwidth_and_less_latency_are_never_slower(self, hosts: int, adds: bool) -> None:
        fabric = Fabric(
            devices=4, hosts=hosts, start_seconds=1e-5, hop_seconds=4e-6, bytes_per_second=1e11,
            host_hop_seconds=3e-5, card_bytes_per_second=5e10, adds=adds,
        )  # fmt: skip

        def seconds(size: float = 1e6, **changes: float) -> float:
            changed = replace(fabric, **changes)
            return min(algorithm_seconds(size, changed).values())

        usual = seconds()
        for changes in (
            {"bytes_per_second": 2e11}, {"card_bytes_per_second": 1e11}, {"hop_seconds": 1e-6},
            {"host_hop_seconds": 1e-5}, {"start_seconds": 5e-6},
        ):  # fmt: skip
            assert seconds(**changes) <= usual
        assert seconds(2e6) > usual > seconds(5e5)
        assert seconds(hosts=2 * hosts) > usual

    def test_the_last_bucket_is_exposed(self) -> None:
        seconds = [ring_seconds(n, 4, 10e-6, 10e9) for n in (25e6, 5e6)]
        assert exposed_bucket_seconds([5e-3, 10e-3], seconds) == pytest.approx(0.81e-3, abs=5e-6)

    def test_one_rank_sums_nothing(self) -> None:
        table = Table(
            unit="s", axes=["bytes", "ranks"], points=[[1.0], [2.0]], values=[5.0], spread=0.0
        )
        assert all_reduce_seconds(table, 100.0, 1) == 0.0
        assert all_reduce_seconds(table, 100.0, 2) == pytest.approx(5.0)
        assert ring_seconds(4e6, 1, 1e-5, 1e9) == 0.0

    def test_what_is_hidden_is_not_exposed(self) -> None:
        assert exposed_seconds(6.0, 10.0, 0.5) == 1.0
        assert exposed_seconds(6.0, 10.0, 0.0) == 6.0
        assert exposed_seconds(6.0, 100.0, 0.5) == 0.0

    def test_gradients_are_float32(self) -> None:
        assert gradient_bytes(250_000) == 1_000_000


class TestFrontier:
    """[A5] of docs/formulas.md 8.5."""

    def test_doubling_a_half(self) -> None:
        # 1 - (1 - .5)^2 = .75, by hand.
        p = np.array([0.5, 0.0, 1.0], dtype=np.float32)
        assert inclusion_at(p, 2.0).tolist() == [0.75, 0.0, 1.0]
        assert expected_vertices(p, 2.0) == 1.75

    def test_growth_is_concave(self) -> None:
        p = np.random.default_rng(1).random(1000).astype(np.float32)
        base = expected_vertices(p, 1.0)
        assert expected_vertices(p, 4.0) <= 4 * base
        assert expected_vertices(p, 0.25) >= base / 4

    def test_between_two_sizes_lies_between_their_frequencies(self) -> None:
        low = np.full(4, 0.1, dtype=np.float32)
        high = np.full(4, 0.3, dtype=np.float32)
        found = interpolate_inclusion(2, (1, low), (4, high))
        assert np.all((found > low) & (found < high))

    def test_a_size_outside_is_refused(self) -> None:
        p = np.zeros(1, dtype=np.float32)
        with pytest.raises(ValueError, match="between 1 and 4"):
            interpolate_inclusion(8, (1, p), (4, p))
        with pytest.raises(ValueError, match="positive"):
            inclusion_at(p, 0.0)


class TestGather:
    """[A6] of docs/formulas.md 8.6 and the working set."""

    def test_512_byte_rows_are_latency_bound(self) -> None:
        found = random_gather_seconds(1e6, 512, 8, 60e-9, 12e9, 50e9)
        assert found == pytest.approx(12.83e-3, abs=5e-6)

    def test_memory_alone_would_take_10_24_ms_for_them(self) -> None:
        # Without latency, and with threads of any speed: 1e6 x 512 B / 50 GB/s.
        found = random_gather_seconds(1e6, 512, 8, 0.0, 1e30, 50e9)
        assert found == pytest.approx(10.24e-3)

    def test_4_kib_rows_are_bandwidth_bound(self) -> None:
        found = random_gather_seconds(1e6, 4096, 8, 60e-9, 12e9, 50e9)
        assert found == pytest.approx(81.92e-3)

    def test_lines_of_common_rows(self) -> None:
        assert [lines(b) for b in (400, 2408, 100, 64)] == [7.0, 38.5, 2.5, 1.0]

    def test_sources_add(self) -> None:
        # 1e5 x 100 ns + 5e4 x 400 ns = 10 ms + 20 ms, by hand.
        assert gather_seconds({"own": 1e5, "host": 5e4}, {"own": 1e-7, "host": 4e-7}) == 0.03

    def test_more_rows_are_never_faster(self) -> None:
        rates = {"own": 1e-7, "host": 4e-7}
        found = [gather_seconds({"own": n, "host": n / 2}, rates) for n in (0.0, 10.0, 100.0, 1e3)]
        assert found == sorted(found)

    def test_equal_rows_work_as_many_as_they_are(self) -> None:
        assert touched_rows(np.full(8, 0.5, dtype=np.float32)) == 8
        assert touched_rows(np.zeros(3, dtype=np.float32)) == 0

    def test_the_working_set_is_no_smaller_than_a_batch(self) -> None:
        p = np.random.default_rng(2).random(500).astype(np.float32)
        assert p.sum() <= touched_rows(p) <= 500


class TestDisk:
    """[A8] of docs/formulas.md 8.8."""

    def test_distinct_pages(self) -> None:
        p = np.full(8000, 0.01, dtype=np.float32)
        assert distinct_pages(p, 8) == pytest.approx(1000 * (1 - 0.99**8), rel=1e-5)
        assert distinct_pages(p[:0], 8) == 0.0

    def test_a_scattered_batch_reads_7_7_times_its_rows(self) -> None:
        # 80 rows of 512 B among 8000: 77.3 pages of 4 KiB.
        pages = distinct_pages(np.full(8000, 0.01, dtype=np.float32), 8)
        assert pages == pytest.approx(77.255, abs=5e-4)
        assert pages * 4096 / (80 * 512) == pytest.approx(7.73, abs=5e-3)

    def test_each_limit_binds_in_turn(self) -> None:
        assert disk_seconds(1e5, 4096, 3e9, 5e5, 1e-4, 64) == pytest.approx(0.2)  # IOPS
        assert disk_seconds(1e5, 4096, 1e9, 5e5, 1e-4, 64) == pytest.approx(0.4096)  # bandwidth
        assert disk_seconds(1e5, 4096, 3e9, 5e5, 1e-4, 4) == pytest.approx(2.5)  # latency / depth

    def test_more_bandwidth_is_never_slower(self) -> None:
        found = [disk_seconds(1e5, 4096, b, 5e5, 1e-4, 64) for b in (1e8, 1e9, 1e10)]
        assert found == sorted(found, reverse=True)

    def test_a_row_across_pages_reads_both(self) -> None:
        assert lines(4096, PAGE_BYTES) == 1.0
        assert 1.0 < lines(5000, PAGE_BYTES) < 3.0


class TestSampleAndStart:
    def test_edges_and_vertices_add(self) -> None:
        # 1e6 x 10 ns + 2e5 x 50 ns = 10 ms + 10 ms, by hand.
        assert sample_seconds(1e6, 2e5, 10e-9, 50e-9) == pytest.approx(0.02)

    def test_start_adds_process_and_load(self) -> None:
        # 3 + (2 + 2) GB / 4 GB/s = 4 s, by hand.
        found = startup_seconds(
            process_seconds=3.0,
            own_row_bytes=2e9,
            topology_bytes=2e9,
            copy_bytes_per_second=4e9,
        )
        assert found == 4.0


def top_2000(chosen_on, scored_on):
    """Rows that the 2000 vertices of highest frequency serve, and the rest."""
    own = np.argsort(-chosen_on, kind="stable")[:2000]
    hit = float(scored_on[own].sum(dtype=np.float64))
    return np.array([[hit, float(scored_on.sum(dtype=np.float64)) - hit]])


class TestHitRates:
    """[A9] of docs/formulas.md 8.9: N 20000, 20 batches, C 2000."""

    TRUE = np.minimum(1, 5 / np.arange(1, 20001) ** 0.7).astype(np.float32)

    def test_the_cross_half_rate_is_unbiased_and_the_in_sample_rate_is_not(self) -> None:
        rng = np.random.default_rng(10)
        first, second = ((rng.binomial(10, self.TRUE) / 10).astype(np.float32) for _ in range(2))
        crossed = cross_validate(first, second, top_2000)[0, 0]
        own = np.argsort(-first, kind="stable")[:2000]
        in_sample = first[own].sum() / first.sum()
        honest = self.TRUE[own].sum() / self.TRUE.sum()
        assert in_sample > honest + 0.03
        assert crossed == pytest.approx(honest, abs=0.02)

    def test_648_in_sample_is_413_on_the_other_half_and_407_in_truth(self) -> None:
        # 20 batches a half; of the best placement .462.
        rng = np.random.default_rng(10)
        first, second = ((rng.binomial(20, self.TRUE) / 20).astype(np.float32) for _ in range(2))
        one_way: list[float] = []

        def rows(chosen_on, scored_on):
            found = top_2000(chosen_on, scored_on)
            one_way.append(found[0, 0] / found.sum())
            return found

        crossed = cross_validate(first, second, rows)[0, 0]
        assert one_way == pytest.approx([0.413, 0.404], abs=5e-4)
        assert crossed == pytest.approx(0.408, abs=5e-4)  # of both ways
        in_sample = cross_validate(first, first, top_2000)[0, 0]
        true = cross_validate(first, first, lambda chosen_on, _: top_2000(chosen_on, self.TRUE))
        best = cross_validate(self.TRUE, self.TRUE, top_2000)[0, 0]
        assert [in_sample, true[0, 0], best] == pytest.approx([0.648, 0.407, 0.462], abs=5e-4)

    def test_no_reads_have_no_shares(self) -> None:
        nothing = np.zeros(3, dtype=np.float32)
        found = cross_validate(nothing, nothing, lambda a, b: np.zeros((2, 4)))
        assert found.tolist() == [[0.0] * 4] * 2
