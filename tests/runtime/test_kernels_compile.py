"""Every Triton kernel compiles for sm_90 without a GPU; the gather moves 16 bytes at a time."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.features import gather_triton as g
from runtime.sampling import choose_triton as c, relabel_triton as r, rng_triton as d

NARROW = {"codes": "*i32", "flags": "*i32", "local": "*i32", "indices": "*i32"}
NUMBERS = "count num_nodes num_rows fanout bound known first stream above most wrap j".split()


def compiled(kernel, values, changed=None):
    names = kernel.arg_names
    kinds = {n: NARROW.get(n, "i64" if n in NUMBERS else "*i64") for n in names}
    kinds |= (changed or {}) | {n: "constexpr" for n in values}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][0] == "*"}
    source = ASTSource(kernel, signature=kinds, constexprs=values, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


block = {"BLOCK": 256}
for kernel in (d._draw_kernel, c._bounds_kernel, r._insert_kernel, r._flag_kernel,
               r._number_kernel, r._local_kernel):
    compiled(kernel, block)
compiled(c._floyd_kernel, {"ROWS": 64, "WIDE": 16})
for write in (False, True):
    compiled(c._scan_kernel, {"ROWS": 16, "COLUMNS": 32, "WRITE": write})
    compiled(c._scan_kernel, {"ROWS": 1, "COLUMNS": 1024, "WRITE": write})
for width, align in ((128, 16), (100, 16), (100, 4)):
    shape = {"WIDTH": width, "UNIT": tl.int32, "ALIGN": align, "ROWS": 16, "COLUMNS": 128,
             "LANES": 4}
    ptx = compiled(g._gather_kernel, shape, {"out": "*i32"})
    print(width, align, "ld.global.v4.b32" in ptx, "st.global.v4.b32" in ptx)
"""


def test_kernels_compile_for_hopper_and_the_gather_reads_16_bytes_where_rows_are_aligned() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
    expected = ["128 16 True True", "100 16 True True", "100 4 False True"]
    assert found.stdout.splitlines() == expected
