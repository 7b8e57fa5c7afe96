"""Every seed once per epoch, dealt the same way whatever the number of ranks."""

import os
import subprocess
import sys

import numpy as np
import pytest

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.seeds import SeedSchedule, ShardSchedule, _stable_order

TRAIN = np.random.default_rng(0).permutation(10_000)[:1003].astype(np.int64)


def shares(num_ranks: int, epoch: int, step: int, **settings) -> list:
    schedules = (
        SeedSchedule(TRAIN, 100, seed=4, num_ranks=num_ranks, rank=rank, **settings)
        for rank in range(num_ranks)
    )
    return [schedule.share(epoch, step) for schedule in schedules]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_shares_of_all_ranks_make_up_the_global_batch(num_ranks: int) -> None:
    for step in range(11):
        ((whole, whole_id, count),) = shares(1, 2, step)
        parts = shares(num_ranks, 2, step)
        np.testing.assert_array_equal(np.concatenate([p[0] for p in parts]), whole)
        np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), whole_id)
        np.testing.assert_array_equal(TRAIN[whole_id], whole)
        assert {p[2] for p in parts} == {count} == {len(whole)}
        sizes = [len(p[0]) for p in parts]
        assert max(sizes) - min(sizes) <= 1


def test_each_seed_occurs_once_per_epoch_and_epochs_differ() -> None:
    schedule = SeedSchedule(TRAIN, 100, seed=4)
    epochs = [
        np.concatenate([schedule.share(epoch, step)[0] for step in range(schedule.num_steps)])
        for epoch in range(3)
    ]
    for order in epochs:
        np.testing.assert_array_equal(np.sort(order), np.sort(TRAIN))
    assert not np.array_equal(epochs[0], epochs[1])
    np.testing.assert_array_equal(schedule.order(0), SeedSchedule(TRAIN, 7, seed=4).order(0))
    assert not np.array_equal(schedule.order(0), SeedSchedule(TRAIN, 100, seed=5).order(0))


def test_an_order_that_is_not_shuffled_is_made_once_an_epoch() -> None:
    """Else inference over all nodes would count to their number at every batch."""
    schedule = SeedSchedule(TRAIN, 100, seed=4, shuffle=False)
    assert schedule.order(1) is schedule.order(1)
    for epoch in range(2):
        shares = [schedule.share(epoch, step)[0] for step in range(schedule.num_steps)]
        np.testing.assert_array_equal(np.concatenate(shares), TRAIN)


def test_more_ranks_than_seeds_leaves_some_shares_empty() -> None:
    parts = shares(8, 0, 10)
    assert parts[0][2] == 3
    assert sorted(len(seeds) for seeds, _, _ in parts) == [0, 0, 0, 0, 0, 1, 1, 1]


def sizes_of(schedule: SeedSchedule) -> list[int]:
    """Seeds of each of this rank's batches of an epoch."""
    return [schedule.share(1, step)[0].size for step in range(schedule.num_steps)]


def test_a_last_batch_may_give_a_rank_more_seeds_than_a_whole_one() -> None:
    """By hand: of 8 and then 7 seeds the third of five ranks gets 4 - 3, then 4 - 2."""
    third = SeedSchedule(np.arange(15), 8, seed=0, num_ranks=5, rank=2)
    assert sizes_of(third) == [1, 2]
    assert third.largest_share() == 2
    for ranks in range(1, 9):
        for count in range(12, 41):
            for rank in range(ranks):
                each = SeedSchedule(np.arange(count), 12, seed=0, num_ranks=ranks, rank=rank)
                assert each.largest_share() == max(sizes_of(each))


@pytest.mark.parametrize("batch_size", [7, 9, 11, 32, 200])
def test_a_part_that_is_larger_than_others_fills_batches_in_bursts(batch_size: int) -> None:
    """Half of the seeds are rank 0's: seven of them come in a row, then one of each other."""
    parts = np.repeat(np.arange(8), [70, *[10] * 7]).astype(np.int32)
    for rank in (0, 1, 7):
        each = ShardSchedule(
            np.arange(140), batch_size, parts=parts, seed=2, num_ranks=8, rank=rank
        )
        assert each.largest_share() == max(sizes_of(each))


def test_drop_last_leaves_out_the_incomplete_batch() -> None:
    assert SeedSchedule(TRAIN, 100, seed=0).num_steps == 11
    assert SeedSchedule(TRAIN, 100, seed=0, drop_last=True).num_steps == 10
    assert SeedSchedule(TRAIN, 1003, seed=0, drop_last=True).num_steps == 1


def test_shuffle_is_uniform_over_positions() -> None:
    # Mean position of each of 50 items over 2000 epochs: z below 5 for all.
    schedule = SeedSchedule(np.arange(50), 50, seed=1)
    positions = np.array([np.argsort(schedule.order(epoch)) for epoch in range(2000)])
    z = (positions.mean(axis=0) - 24.5) / np.sqrt((50**2 - 1) / 12 / 2000)
    assert np.abs(z).max() < 5


@pytest.mark.parametrize(
    ("train", "settings", "message"),
    [
        ([], {}, "list of training nodes"),
        ([1, 1, 2], {}, "found 1 repetitions"),
        ([1, 2], {"batch_size": 0}, "batch_size >= 1"),
        ([1, 2], {"num_ranks": 2, "rank": 2}, "rank < num_ranks"),
        ([1, 2], {"batch_size": 3, "drop_last": True}, "at least one full batch"),
    ],
)
def test_schedules_that_make_no_step_are_refused(train: list, settings: dict, message: str) -> None:
    settings = {"batch_size": 2, "seed": 0} | settings
    with pytest.raises(SamplerError, match=message):
        SeedSchedule(np.array(train, dtype=np.int64), **settings)


@pytest.mark.parametrize("step", [-1, 11])
def test_steps_outside_the_epoch_are_refused(step: int) -> None:
    with pytest.raises(SamplerError, match="step between 0 and 10"):
        SeedSchedule(TRAIN, 100, seed=4).share(0, step)


@pytest.mark.parametrize("bits", [1, 8, 64])
def test_equal_keys_keep_their_order(bits: int) -> None:
    keys = np.random.default_rng(bits).integers(0, 2**bits, 5000, dtype=np.uint64, endpoint=False)
    np.testing.assert_array_equal(_stable_order(keys), np.argsort(keys, kind="stable"))


@pytest.mark.parametrize("sizes", [[60, 60, 60], [100, 50, 29], [179, 0, 0]])
def test_ranks_draw_the_seeds_of_their_parts_in_proportion(sizes: list[int]) -> None:
    train = np.arange(5, 5 + sum(sizes))
    parts = np.full(400, -1, np.int32)
    parts[np.random.default_rng(3).permutation(train)] = np.repeat(range(3), sizes)
    schedules = [
        ShardSchedule(train, 32, parts=parts, seed=9, num_ranks=3, rank=r) for r in range(3)
    ]
    orders = [[], []]
    for epoch in range(2):
        for step in range(schedules[0].num_steps):
            drawn = [schedule.share(epoch, step) for schedule in schedules]
            count = min(32, len(train) - 32 * step)
            assert [each[2] for each in drawn] == [count] * 3
            assert sum(each[0].size for each in drawn) == count
            for rank, (seeds, positions, _) in enumerate(drawn):
                assert (parts[seeds] == rank).all()
                np.testing.assert_array_equal(train[positions], seeds)
                assert seeds.size <= schedules[rank].largest_share()
                assert abs(seeds.size - count * sizes[rank] / sum(sizes)) < 2
                orders[epoch] += seeds.tolist()
    assert sorted(orders[0]) == sorted(orders[1]) == train.tolist()
    assert orders[0] != orders[1]
    with pytest.raises(SamplerError, match="parts of 2 ranks"):
        ShardSchedule(train, 32, parts=np.full(400, 2, np.int32), seed=9, num_ranks=2)


ORDERS = """
import re
import os
import subprocess
import sys

import numpy as np
from pathlib import Path
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule, ShardSchedule, order_bytes

def size(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

count = 1_500_000
ids, pairs = np.arange(count), np.zeros((count, 2), np.int64)
parts = np.random.default_rng(0).integers(0, 4, count).astype(np.int32)
ShardSchedule(ids[:9], 3, seed=0, num_ranks=4, parts=parts).order(0)
for settings, make in [
    ({}, lambda: SeedSchedule(ids, 1000, seed=0)),
    ({"links": True}, lambda: LinkSchedule(pairs, 1000, seed=0).ids),
    ({"by_parts": True}, lambda: ShardSchedule(ids, 1000, seed=0, num_ranks=4, parts=parts)),
]:
    before = size("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    schedule = make()
    schedule.order(0), schedule.order(1)
    print((size("VmHWM") - before) / order_bytes(count, **settings))
    del schedule
"""


def test_orders_of_epochs_take_the_bytes_that_are_counted() -> None:
    # Each array is given back to the system as soon as it is freed.
    told = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = subprocess.run(
        [sys.executable, "-c", ORDERS], capture_output=True, text=True, check=True, env=told
    )
    shares = [float(line) for line in found.stdout.split()]
    assert len(shares) == 3
    assert all(0.9 < share < 1.03 for share in shares), shares
