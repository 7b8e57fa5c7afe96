"""The sums over a block compile for sm_90 without a GPU, and read rows in words of 16 bytes."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gnnplan.runtime.models import aggregate_triton as a

KINDS = {"indptr": "*i64", "indices": "*i32", "true_rows": "*i64"}
KINDS |= dict.fromkeys("self_loops rows local new_rows new_local".split(), "*i32")
KINDS |= dict.fromkeys("full roots".split(), "*fp32")


def compiled(kernel, rows, values):
    names = kernel.arg_names
    kinds = {n: KINDS.get(n, "*fp32" if n == "weight" else rows) for n in names}
    kinds |= {n: "constexpr" for n in values}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][0] == "*"}
    source = ASTSource(kernel, signature=kinds, constexprs=values, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    return made.asm["ptx"]


for rows in ("*fp32", "*bf16"):
    for width in (100, 256):
        for flags in (False, True):
            shape = a._tiles(10, width)[1] | {"WIDTH": width, "WEIGHTED": flags, "ROOT": flags}
            shape |= {"STEP": 1 + flags, "COUNTED": flags}
            assert shape.pop("num_warps") == 1
            for heads in (1, 4):
                shape["HEADS"] = heads
                sums = {"X_STRIDE": width, "OUT_STRIDE": 2 * width, "ADD": flags}
                found = compiled(a._sum_kernel, rows, shape | sums)
                assert "ld.global.v4.b32" in found or rows == "*bf16", found
                compiled(a._spread_kernel, "*fp32", shape | {"GRAD_STRIDE": 2 * width})

for width in (4, 300):
    shape = a._tiles(10, width)[1] | {"WIDTH": width, "X_STRIDE": 2 * width, "HEADS": 2}
    shape |= {"STEP": 1, "COUNTED": width == 300}
    shape.pop("num_warps")
    compiled(a._dot_kernel, "*fp32", shape | {"GRAD_STRIDE": 2 * width})

for full in (False, True):
    for loops in (False, True):
        shape = {"FULL": full, "LOOPS": loops, "HOPS": 3, "BLOCK": 512}
        compiled(a.root_kernel, "*i64", shape | {"NESTED": full})
        compiled(a.weigh_kernel, "*i64", shape)
"""


def test_sums_over_a_block_compile_for_hopper() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
