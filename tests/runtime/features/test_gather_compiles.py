"""The gather compiles for sm_90 without a GPU, and moves 16 bytes at a time where rows allow it."""

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

from gnnplan.runtime.features.gather_triton import gather_kernel as kernel

NAMES = kernel.arg_names
KINDS = {"count": "i64", "num_nodes": "i64", "out": "*i32"}


def ptx_of(codes, unit, out, ordered=False, packed=True, pads=False, **values):
    kinds = {n: KINDS.get(n, "*i64") for n in NAMES} | {"codes": codes, "out": out}
    values |= {"UNIT": unit, "ROWS": 16, "COLUMNS": 128, "LANES": 4}
    values |= {"ORDERED": ordered, "PACKED": packed, "REPORTS": True,
               "PADS": pads}
    kinds |= {n: "constexpr" for n in values}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(NAMES) if kinds[n][0] == "*"}
    source = ASTSource(kernel, signature=kinds, constexprs=values, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


for width, read, stride, align in ((128, 128, 128, 16), (100, 100, 100, 4),
                                   (104, 104, 104, 16), (101, 104, 101, 16)):
    ptx = ptx_of("*i32", tl.int32, "*i32", WIDTH=width, READ=read, STRIDE=stride, ALIGN=align)
    print(width, read, align, "ld.global.v4.b32" in ptx, "st.global.v4.b32" in ptx)
    for ordered, packed, pads in ((False, True, True), (True, True, False), (True, False, False)):
        ptx_of("*i32", tl.int32, "*i32", ordered, packed, pads,
               WIDTH=width, READ=read, STRIDE=stride, ALIGN=align)
for unit, out in ((tl.float16, "*fp32"), (tl.bfloat16, "*fp32"), (tl.float32, "*bf16")):
    ptx = ptx_of("*i64", unit, out, WIDTH=101, READ=104, STRIDE=104, ALIGN=16)
    print(unit, "v4.b32" in ptx)
"""


def test_rows_move_in_words_of_16_bytes_where_they_are_aligned_or_padded() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.splitlines() == [
        "128 128 16 True True",
        "100 100 4 False True",
        "104 104 16 True True",  # rows of 101 words, padded on both sides
        "101 104 16 True False",  # the same into an output without gaps
        "fp16 True",
        "bf16 True",
        "fp32 True",
    ]
