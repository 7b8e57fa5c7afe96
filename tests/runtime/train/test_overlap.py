"""The prefetcher changes who waits, never what comes out."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from gnnplan.runtime.process import pin_to
from gnnplan.runtime.train.overlap import Prefetcher, Turns, Workers


def squares(delay: Callable[[int], float] = lambda index: 0.0) -> Callable[[int, Turns], int]:
    def produce(index: int, turns: Turns) -> int:
        del turns
        time.sleep(delay(index))
        return index * index

    return produce


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_items_come_in_order_whatever_each_takes(threads: int) -> None:
    slow_first = squares(lambda index: 0.02 if index % 3 == 0 else 0.0)
    with Prefetcher(slow_first, 10, workers=Workers(threads), depth=4) as items:
        assert list(items) == [i * i for i in range(10)]


@pytest.mark.parametrize("threads", [1, 3])
def test_never_more_than_depth_items_are_made_ahead(threads: int) -> None:
    made: list[int] = []

    def produce(index: int, turns: Turns) -> int:
        del turns
        made.append(index)
        return index

    with Prefetcher(produce, 20, workers=Workers(threads), depth=2) as items:
        for consumed in range(1, 6):
            next(items)
            while len(made) < consumed + 2:
                time.sleep(0.001)
            time.sleep(0.02)  # in which one too many would be made
            assert len(made) == consumed + 2


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_an_error_comes_where_its_item_would_have_come(threads: int) -> None:
    def produce(index: int, turns: Turns) -> int:
        del turns
        if index == 3:
            raise ValueError("item 3")
        return index

    seen: list[int] = []
    items = Prefetcher(produce, 10, workers=Workers(threads), depth=3)
    with pytest.raises(ValueError, match="item 3"):
        seen.extend(items)
    items.close()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("threads", [1, 3])
def test_leaving_the_loop_early_frees_the_threads_for_the_next(threads: int) -> None:
    before = threading.active_count()
    workers = Workers(threads)
    made: list[int] = []
    for _ in range(3):
        produce = squares(lambda index: made.append(index) or 0.002)
        with Prefetcher(produce, 1000, workers=workers, depth=2) as items:
            assert next(items) == 0
    assert len(made) <= 3 * (1 + 2)
    workers.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("taken", [0, 1, 9, 10])
@pytest.mark.parametrize("threads", [1, 3])
def test_where_ranks_meet_leaving_makes_the_same_items_on_every_rank(
    threads: int, taken: int
) -> None:
    made: list[int] = []
    produce = squares(lambda index: made.append(index) or 0.0)
    workers = Workers(threads)
    items = Prefetcher(produce, 10, workers=workers, depth=3, meets=True)
    for _ in range(taken):
        next(items)
    assert items.close()
    assert sorted(made) == list(range(min(10, taken + 3)))
    assert list(items) == []
    workers.close()


def test_where_ranks_meet_nothing_more_is_made_for_ranks_that_may_be_gone() -> None:
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def produce(index: int, turns: Turns) -> int:
        del turns
        made.append(index)
        begun.set()
        go_on.wait()
        return index

    workers = Workers(1)
    items = Prefetcher(produce, 10, workers=workers, depth=3, meets=True)
    begun.wait()
    assert not items.close(at_once=True, patience_s=0.01)  # one is under way
    go_on.set()
    assert items.close()
    assert made == [0]
    workers.close()


def test_closing_twice_and_reading_after_closing_are_harmless() -> None:
    items = Prefetcher(squares(), 5, workers=Workers(1), depth=2)
    next(items)
    items.close()
    items.close()
    assert list(items) == []


def test_a_consumer_that_waits_is_let_go_where_another_thread_closes() -> None:
    go_on = threading.Event()

    def produce(index: int, turns: Turns) -> int:
        del turns
        go_on.wait()
        return index

    workers, seen = Workers(1), list[int]()
    items = Prefetcher(produce, 10, workers=workers, depth=2)
    consumer = threading.Thread(target=lambda: seen.extend(items), daemon=True)
    consumer.start()
    time.sleep(0.05)  # in which it comes to wait
    items.close(at_once=True, patience_s=0.0)
    consumer.join(10.0)
    assert not consumer.is_alive()
    assert seen == []
    go_on.set()
    workers.close()


def test_closing_on_a_thread_that_makes_items_does_not_wait_for_itself() -> None:
    begin, left = threading.Event(), threading.Event()
    whole: list[bool] = []

    def produce(index: int, turns: Turns) -> int:
        del turns
        begin.wait()
        whole.append(items.close(patience_s=None))
        left.set()
        return index

    workers = Workers(1)
    items = Prefetcher(produce, 10, workers=workers, depth=2)
    begin.set()
    assert left.wait(10.0)
    assert items.close()
    assert whole == [False]  # the thread itself was still there
    workers.close()


def test_ordered_stages_run_in_item_order_on_any_number_of_threads() -> None:
    order: list[int] = []

    def produce(index: int, turns: Turns) -> int:
        time.sleep(0.01 if index % 2 == 0 else 0.0)  # odd items overtake even ones
        turns.take(0, index)
        order.append(index)
        turns.done(0, index)
        return index

    with Prefetcher(produce, 12, workers=Workers(3), depth=4) as items:
        assert list(items) == list(range(12))
    assert order == list(range(12))


def test_an_error_frees_the_items_that_wait_for_their_turn() -> None:
    def produce(index: int, turns: Turns) -> int:
        if index == 0:
            time.sleep(0.05)
            raise ValueError("item 0")
        turns.take(0, index)
        return index

    with (
        pytest.raises(ValueError, match="item 0"),
        Prefetcher(produce, 6, workers=Workers(3), depth=4) as items,
    ):
        next(items)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system pins no threads")
def test_threads_keep_to_their_cores_also_after_the_process_was_pinned_anew() -> None:
    mine = os.sched_getaffinity(0)
    last = max(mine)
    workers = Workers(2, cores=[last])

    def where(index: int, turns: Turns) -> set[int]:
        del index, turns
        return os.sched_getaffinity(0)

    try:
        for _ in range(2):
            with Prefetcher(where, 6, workers=workers, depth=2) as items:
                assert all(cores == {last} for cores in items)
            pin_to(sorted(mine))
    finally:
        workers.close()
    assert os.sched_getaffinity(0) == mine
