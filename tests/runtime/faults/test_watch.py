"""Who hangs, from counters and a clock alone: no process is started here."""

from dataclasses import replace

import pytest

from gnnplan.runtime.faults.heartbeat import Beat, Phase
from gnnplan.runtime.faults.watch import Process, Watcher

LIMIT = 20.0


def beat(rank: int, **fields: object) -> Beat:
    values = {
        "pid": 100 + rank, "rank": rank, "attempt": 0, "phase": Phase.TRAINING, "beats": 0,
        "moves": 0, "step": 5, "stage": "forward_backward", "loader_step": 6,
        "loader_stage": "gather", "loader_meets": False,
    }  # fmt: skip
    return Beat(**(values | fields))  # pyright: ignore[reportArgumentType]


def process(rank: int, *, stopped: bool = False) -> Process:
    return Process(pid=100 + rank, rank=rank, local_rank=rank, stopped=stopped)


class Host:
    """Two ranks under a watcher, looked at once a second."""

    def __init__(self) -> None:
        self.watcher = Watcher(limit_seconds=LIMIT, start_seconds=60.0)
        self.now = 1000.0
        self.beats: list[Beat | None] = [beat(0), beat(1)]
        self.processes = [process(0), process(1)]

    def look(self, seconds: float = 1.0):
        self.now += seconds
        return self.watcher.look(self.now, self.processes, self.beats)

    def run(self, seconds: int, *, beating: tuple[int, ...], moving: tuple[int, ...]):
        """The hang and when it showed, or None."""
        for second in range(1, seconds + 1):
            for rank in beating:
                each = self.beats[rank]
                assert each is not None
                self.beats[rank] = replace(each, beats=each.beats + 2)
            for rank in moving:
                each = self.beats[rank]
                assert each is not None
                self.beats[rank] = replace(each, moves=each.moves + 9, step=each.step + 1)
            hang = self.look()
            if hang is not None:
                return hang, second
        return None


def test_ranks_that_get_on_are_left_alone() -> None:
    assert Host().run(500, beating=(0, 1), moving=(0, 1)) is None


def test_a_rank_without_a_sign_of_life_is_named_after_the_limit() -> None:
    host = Host()
    host.run(5, beating=(0, 1), moving=(0, 1))
    host.beats[0] = beat(0, stage="all_reduce", step=10, moves=45, beats=10)
    host.processes[1] = process(1, stopped=True)
    found = host.run(60, beating=(0,), moving=())
    assert found is not None
    hang, second = found
    assert (hang.rank, hang.pid) == (1, 101)
    assert LIMIT < second <= LIMIT + 2
    assert hang.line.startswith(
        "rank 1: hung in forward_backward of step 10, stopped by a signal for"
    )


@pytest.mark.parametrize(("behind", "other"), [(0, 1), (1, 0)])
def test_of_two_that_live_the_one_behind_is_named(behind: int, other: int) -> None:
    """The other is further in the same step, in the collective that both must join."""
    host = Host()
    host.run(5, beating=(0, 1), moving=(0, 1))
    host.beats[other] = beat(other, stage="all_reduce", step=10, beats=10)
    host.beats[behind] = beat(behind, stage="forward_backward", step=10, beats=10)
    found = host.run(100, beating=(0, 1), moving=())
    assert found is not None
    assert found[0].line.startswith(f"rank {behind}: hung in forward_backward of step 10, no pro")
    assert 1.25 * LIMIT < found[1] <= 1.25 * LIMIT + 2


def test_where_all_wait_in_one_collective_the_link_is_named() -> None:
    host = Host()
    host.run(5, beating=(0, 1), moving=(0, 1))
    host.beats[:] = [beat(rank, stage="all_reduce", step=10, beats=10) for rank in (0, 1)]
    found = host.run(100, beating=(0, 1), moving=())
    assert found is not None
    assert "hung in all_reduce of step 10 with every rank of its host" in found[0].line
    assert "a link is down or too slow" in found[0].line


def test_a_rank_alone_on_its_host_that_waits_for_others_says_so() -> None:
    host = Host()
    host.beats[:], host.processes = [beat(1, stage="all_reduce")], [process(1)]
    host.look()
    found = host.run(100, beating=(0,), moving=())
    assert found is not None
    assert "a link is down or too slow" in found[0].line


def test_slow_stages_buy_patience() -> None:
    """Stages of 10 s so far: no stall before ten of them."""
    host = Host()
    for _ in range(3):
        host.run(10, beating=(0, 1), moving=())
        host.run(1, beating=(0, 1), moving=(0, 1))
    found = host.run(300, beating=(0, 1), moving=())
    assert found is not None
    assert 100 <= found[1] <= 115


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.EVALUATING, Phase.SAVING])
def test_outside_training_only_silence_counts(phase: Phase) -> None:
    host = Host()
    host.beats[0] = beat(0, phase=phase)
    assert host.run(500, beating=(0, 1), moving=()) is None
    found = host.run(60, beating=(1,), moving=())
    assert found is not None
    assert found[0].line.startswith(f"rank 0: hung in {phase.name.lower()}, no sign of life")


def test_the_first_step_may_compile_for_long() -> None:
    host = Host()
    host.beats = [beat(0, step=0), beat(1, step=0)]
    assert host.run(500, beating=(0, 1), moving=()) is None


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_pause_or_a_clock_jump_is_held_against_nobody(jump: float) -> None:
    host = Host()
    host.run(5, beating=(0, 1), moving=(0, 1))
    assert host.look(jump) is None
    assert host.run(100, beating=(0, 1), moving=(0, 1)) is None


def test_a_rank_that_never_begins_is_named() -> None:
    host = Host()
    host.beats[1] = None
    found = host.run(200, beating=(0,), moving=())
    assert found is not None
    assert found[0].line.startswith("rank 1: hung in starting")
    assert 60 < found[1] <= 62


def test_a_restarted_rank_is_judged_afresh() -> None:
    host = Host()
    host.run(5, beating=(0, 1), moving=(0, 1))
    host.run(19, beating=(0,), moving=())
    host.processes[1] = Process(pid=777, rank=1, local_rank=1, stopped=False)
    host.beats[1] = beat(1, pid=777, phase=Phase.STARTING)
    assert host.run(19, beating=(0,), moving=()) is None


def test_a_finished_rank_may_be_silent() -> None:
    host = Host()
    host.beats = [beat(0, phase=Phase.FINISHED), beat(1, phase=Phase.FINISHED)]
    assert host.run(100, beating=(), moving=()) is None
