"""What is freed is kept for the next step, or given back at once; and in which pages it lies."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gnnplan.runtime.process import with_huge_pages

PROGRAM = """
import resource
from gnnplan.runtime.process import keep_freed_memory
kept = keep_freed_memory() if {keep} else None
block = b"1" * (16 << 20)
del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    block = b"1" * (16 << 20)
    del block
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator only")
def test_a_freed_block_comes_back_without_page_faults():
    def faults(keep: bool) -> tuple[str, int]:
        command = [sys.executable, "-c", PROGRAM.format(keep=keep)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return out[0], int(out[1])

    kept, count = faults(True)
    if kept == "False":
        pytest.skip("the C library is not glibc")
    # 8 blocks of 4096 pages each, were they mapped anew.
    assert count < 400
    assert faults(False)[1] > 10 * max(count, 40)


HELD = """
from gnnplan.runtime.process import give_back_freed_memory
from gnnplan.runtime.process import memory_bytes
given = give_back_freed_memory()
for size in (40 << 20, 30 << 20, 20 << 20):  # glibc's own threshold would have grown to 32 MB
    block = b"1" * size
    del block
before = memory_bytes()[1]
blocks = [b"1" * (1 << 20) for _ in range(30)]
last = blocks[-1]
del blocks
print(given, memory_bytes()[1] - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator only")
def test_freed_blocks_are_given_back_below_one_that_is_held():
    command = [sys.executable, "-c", HELD]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if out[0] == "False":
        pytest.skip("the C library is not glibc")
    assert int(out[1]) < 4 << 20


PAGES = """
import torch
from gnnplan.runtime.process import keep_freed_memory
keep_freed_memory()
kept = [torch.ones(1 << 16) for _ in range(256)]  # 64 MB in pieces of less than a huge page
with open("/proc/self/smaps") as file:
    print(sum(int(line.split()[1]) for line in file if line.startswith("AnonHugePages")))
"""
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _has_huge_pages() -> bool:
    return THP.is_file() and "[never]" not in THP.read_text() and platform.libc_ver()[0] == "glibc"


@pytest.mark.skipif(not _has_huge_pages(), reason="the system gives no huge pages on request")
@pytest.mark.skipif(
    platform.libc_ver()[0] == "glibc"
    and tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35),
    reason="glibc before 2.35 does not ask for huge pages",
)
def test_small_tensors_lie_in_huge_pages():
    done = subprocess.run(
        [sys.executable, "-c", PAGES],
        env=with_huge_pages(os.environ), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) > 48 * 1024


def test_what_the_environment_says_of_huge_pages_stays():
    given = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "A": "b"}
    assert with_huge_pages(given) == given
    assert with_huge_pages({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
