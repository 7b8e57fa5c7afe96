"""Cores of a process: who keeps to which."""

import os
import threading
from pathlib import Path

import pytest

from gnnplan.runtime import process as module
from gnnplan.runtime.plan.schema import Threads


@pytest.mark.parametrize(
    ("compute", "sample", "cores", "beside"),
    [
        (1, 1, [0, 1], [1]),
        (2, 2, [4, 5, 6, 7], [6, 7]),
        # Not pinned: whatever compute leaves. In line, or crowded: training waits for the reads.
        (1, 1, [0, 1, 2, 3], [1, 2, 3]),
        (2, 0, [0, 1], []),
        (2, 1, [0, 1], []),
    ],
)
def test_what_waits_for_a_disk_is_kept_off_the_cores_of_compute(
    monkeypatch: pytest.MonkeyPatch, compute: int, sample: int, cores: list[int], beside: list[int]
) -> None:
    monkeypatch.setattr(module, "usable_core_ids", lambda: cores)
    threads = Threads(compute=compute, sample=sample)
    assert module.cores_beside_training(threads) == beside


def _policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_threads_started_inside_are_batch_and_the_one_that_starts_them_is_not_for_long() -> None:
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests themselves run under another policy, which is left alone")
    with module.batch_threads():
        assert _policy_of_a_new_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert _policy_of_a_new_thread() == os.SCHED_OTHER


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_where_a_container_forbids_it_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def refuse(thread: int, policy: int, _: object) -> None:
        calls.append(policy)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with module.batch_threads():
        calls.append(-1)
    assert calls == [os.SCHED_BATCH, -1]  # tried once, and not taken back


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_a_policy_that_a_user_has_chosen_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_RR)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("it was changed"))
    with module.batch_threads():
        pass


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_threads_that_run_already_are_found_by_their_names() -> None:
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests themselves run under another policy, which is left alone")
    ready, end = threading.Barrier(3), threading.Event()
    found: dict[str, int] = {}

    def run(name: str) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        ready.wait(10)
        end.wait(10)
        found[name] = os.sched_getscheduler(0)

    threads = [threading.Thread(target=run, args=[name]) for name in ("gloo_tcp_loop", "compute")]
    for thread in threads:
        thread.start()
    ready.wait(10)
    module.make_batch(module.GLOO_THREADS)
    end.set()
    for thread in threads:
        thread.join()
    assert found == {"gloo_tcp_loop": os.SCHED_BATCH, "compute": os.SCHED_OTHER}
