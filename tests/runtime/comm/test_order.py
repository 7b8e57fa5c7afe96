"""One thread issues what a GPU sends: the loader's meetings and training's sums, in one order."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.errors import GnnplanError


def _run(order: CollectiveOrder, steps: int, places: int, pause: Callable[[], None]) -> list[str]:
    """What one iteration issues for a loader's thread and this one, which come as they come."""
    issued: list[str] = []

    def note(what: str) -> str:
        assert threading.current_thread().name == "collectives"
        pause()
        issued.append(what)
        return what

    def load() -> None:
        for step in range(steps):
            for place in range(places):
                pause()
                name = f"X{step}.{place}"
                assert order.meet(step, place, lambda name=name: note(name)) == name

    order.begin(steps)
    loader = threading.Thread(target=load)
    loader.start()
    for step in range(steps):
        for part in "ab":
            pause()
            order.train(lambda step=step, part=part: note(f"R{step}{part}"))
        order.next_step()
    with order.leaving():
        loader.join(60)
    return issued


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("places", [1, 2])
def test_the_order_is_the_same_whoever_comes_first(seed: int, places: int) -> None:
    chance = random.Random(seed)
    slow = chance.choice([0.0, 0.002])

    def pause() -> None:
        time.sleep(chance.random() * slow)

    entered: list[str] = []
    order = CollectiveOrder(places, lambda: entered.append(threading.current_thread().name))

    def batch(step: int) -> list[str]:
        return [f"X{step}.{place}" for place in range(places)]

    expected = batch(0)
    for step in range(5):
        expected += batch(step + 1) if step < 4 else []
        expected += [f"R{step}a", f"R{step}b"]
    for _ in range(2):  # an iteration leaves nothing behind
        assert _run(order, 5, places, pause) == expected
    assert order.train(lambda: "between iterations") == "between iterations"
    assert order.close()
    assert entered == ["collectives"]
    assert order.train(lambda: threading.current_thread().name) == "MainThread"


def test_a_batch_that_cannot_be_made_frees_training() -> None:
    order = CollectiveOrder(1, lambda: None)
    order.begin(3)
    order.meet(0, 0, lambda: None)

    def fail() -> None:
        with pytest.raises(OSError, match="disk"), order.failing():
            raise OSError("disk")

    order.meet(1, 0, lambda: None)
    assert order.train(lambda: 0) == 0  # the batch that it needs has met
    order.next_step()
    loader = threading.Thread(target=fail)
    loader.start()
    with pytest.raises(GnnplanError, match="a batch ahead cannot be made") as error:
        order.train(lambda: 1)
    assert isinstance(error.value.__cause__, OSError)
    loader.join(60)
    assert order.close()


def test_an_error_comes_to_who_asked() -> None:
    order = CollectiveOrder(1, lambda: None)
    with pytest.raises(ZeroDivisionError):
        order.train(lambda: 1 // 0)
    assert order.train(lambda: 2) == 2
    order.close()


def test_who_leaves_early_lets_batches_under_way_meet() -> None:
    order, met = CollectiveOrder(1, lambda: None), list[int]()
    order.begin(9)

    def load() -> None:
        for step in range(4):  # two ahead of the consumer
            order.meet(step, 0, lambda step=step: met.append(step))

    loader = threading.Thread(target=load)
    loader.start()
    order.train(lambda: None)
    order.next_step()
    with order.leaving():
        loader.join(60)
    assert met == [0, 1, 2, 3]
    assert order.train(lambda: "then") == "then"
    order.close()


def test_a_closed_order_wakes_who_waits_for_a_turn() -> None:
    order = CollectiveOrder(1, lambda: None)
    order.begin(9)
    found: list[str] = []

    def wait() -> None:
        try:
            order.meet(3, 0, lambda: None)
        except GnnplanError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert order.close()
    waiting.join(60)
    assert found == ["the loader was closed before its batch met the other ranks'"]
