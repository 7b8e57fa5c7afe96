"""The last error of a child process reaches the user's line."""

from pathlib import Path

import pytest

from gnnplan.runtime.faults.failure import (
    MOST_BYTES,
    MOST_LETTERS,
    failure_of,
    last_error_line,
    last_error_of,
)

RENDEZVOUS = (
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the "
    "C10d store has failed."
)
LOG = f"""W1128 01:00:00 run.py:766] Setting OMP_NUM_THREADS
Traceback (most recent call last):
  File "static_tcp_rendezvous.py", line 68, in _create_tcp_store
    raise RendezvousConnectionError("Error: no")
torch.distributed.DistNetworkError: The server socket has failed to listen

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "torchrun.py", line 57, in <module>
{RENDEZVOUS}
"""
NCCL = """[rank0]:[E1128 14:02:11.520 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught \
collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=33, NumelOut=33, \
Timeout(ms)=600000) ran for 600014 milliseconds before timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog \
caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=33, \
NumelOut=33, Timeout(ms)=600000) ran for 600014 milliseconds before timing out.
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:618 (most recent call first):
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("all is well\n", ""),
        ("Error: something\n", ""),
        (LOG, RENDEZVOUS),
        ("ValueError: a\nKeyError: 'b'\nwarning: end\n", "KeyError: 'b'"),
        ("[rank1]: ValueError: expected rows\n", "ValueError: expected rows"),
        ("MemoryError\n", "MemoryError"),
        (
            NCCL,
            "NCCL: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType="
            "ALLREDUCE, NumelIn=33, NumelOut=33, Timeout(ms)=600000) ran for 600014 milliseconds "
            "before timing out",
        ),
        (
            "OSError: [Errno 28] No space left\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
            "OSError: [Errno 28] No space left",
        ),
        ("ValueError: " + "x" * 1000, ("ValueError: " + "x" * 1000)[:MOST_LETTERS]),
    ],
)
def test_it_is_the_last_line_that_names_a_kind_of_error(text: str, expected: str) -> None:
    assert last_error_line(text) == expected


def test_a_job_that_ended_without_a_report_says_what_its_log_says(tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    log.write_text(LOG)
    error = failure_of(tmp_path, log, 1)
    assert str(error) == f"the job could not be run: {RENDEZVOUS}; output in {log}"


def test_errors_of_an_earlier_job_in_the_same_log_are_not_told(tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    log.write_text(LOG)
    earlier = log.stat().st_size
    assert "without an error" in str(failure_of(tmp_path, log, 1, since=earlier))
    with log.open("a") as file:
        file.write("ValueError: of this one\n")
    assert "could not be run: ValueError: of this one" in str(
        failure_of(tmp_path, log, 1, since=earlier)
    )


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    log.write_bytes(b"KeyError: first\n" + b"\xff" * (2 * MOST_BYTES) + b"\nValueError: last\n")
    assert last_error_of(log) == "ValueError: last"
    assert last_error_of(tmp_path / "none.log") == ""
